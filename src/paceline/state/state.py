"""The state of a run: gather it into checkpoints, and restore it.

A checkpoint has these parts:

    model_0, optimizer_0, scheduler_0, ...   in the order of `prepare`
    strategy                                 state of the strategy itself, such as a codec's residuals
    run                                      counters, loaders, random streams and the fp16 scaler
    tracked                                  the objects of run.track

Loaders and tracked objects are identified by name. If the script restores before it makes such an object, the restored
state waits until the object is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import generators
from paceline.comm.mesh import world_group
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, PacelineError, UsageError, warn
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.folder_lock import FolderLocks
from paceline.state.hyperparameters import Hyperparameters, HyperparameterSource
from paceline.state.sharded_save import (
    HeldParts,
    SlicedSave,
    all_see,
    help_verify,
    on_rank_0,
    part_name,
    read_together,
    verifying,
)
from paceline.state.snapshot import SnapshotBuffers, digest
from paceline.step.call_check import CallCheck
from paceline.step.environment_fingerprint import check_ranks, check_resumed, fingerprint
from paceline.step.preparable import modules_of
from paceline.strategies.base import Strategy
from paceline.strategies.kit.named_parameters import check_same_class


class State:
    """Gathers the state of a run into checkpoints, and restores it."""

    def __init__(
        self,
        strategy: Strategy,
        hyperparameters: Hyperparameters,
        *,
        device: torch.device,
        seed: int,
        reproducible: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.schedulers: list[Any] = []
        self.loaders: dict[str, Loader] = {}
        self.tracked: dict[str, Any] = {}
        self.hyperparameters = hyperparameters
        self.hyperparameter_source: HyperparameterSource = (
            "checkpoint"  # the source of a restored run's hyperparameters
        )
        self.restored_from = ""  # describes the source of the last restored state
        self.locks = FolderLocks()  # of the folders that this run saves in; on rank 0
        self.parts: dict[str, Any] = {}  # objects of the run itself: the fp16 scaler
        self._device, self._seed, self._reproducible = device, seed, reproducible
        # Restored states of loaders and tracked objects that the script has not made yet, by name.
        self._waiting: dict[str, dict[str, Any]] = {"loaders": {}, "tracked": {}}
        self._buffers = SnapshotBuffers()
        self._writer = BackgroundWrite()  # writes the buffers, on rank 0, or this rank's slices
        self._sliced = SlicedSave(self._writer)
        self._unfinished = False  # whether the ranks still lack a background save's result; the same on all ranks

    # --- adding

    def add_loader(self, loader: Loader) -> None:
        if loader.name in self.loaders:
            raise UsageError(
                f"run.loader(name={loader.name!r}): another training loader has this name. Use different names, since "
                "a checkpoint stores the position of each loader by its name."
            )
        self.loaders[loader.name] = loader
        if loader.name in self._waiting["loaders"]:
            loader.load_state_dict(self._waiting["loaders"].pop(loader.name))

    def add_tracked(self, name: str, thing: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UsageError(
                    f"run.track({name}={type(thing).__name__}): this object has no {method}(). Give it state_dict() "
                    "and load_state_dict(state), like torch's modules, optimizers and schedulers."
                )
        if name in self.tracked and self.tracked[name] is not thing:
            raise UsageError(f"run.track({name}=...): another object is tracked under this name. Use another name.")
        self.tracked[name] = thing
        if name in self._waiting["tracked"]:
            thing.load_state_dict(self._waiting["tracked"].pop(name))

    def begin(self) -> None:
        """Compare the environments of a reproducible run's processes. Collective; call it after backends.apply."""
        if self._reproducible is not None:
            check_ranks(fingerprint(self._reproducible, self._device))

    # --- saving

    def save(
        self,
        directory: str | Path,
        step: int,
        retention: checkpoint.Retention,
        run: dict[str, Any],
        *,
        background: bool = False,
    ) -> Path | None:
        """Write a checkpoint, and return its path. Collective.

        Rank 0 writes; if the strategy shards tensors, each rank writes its own slices. All ranks return when the
        checkpoint is on the disk. If a background save is still running, all ranks first wait for it. If it failed,
        `save` raises its CheckpointError on every rank and writes nothing.

        Args:
            run: entries for the part "run".
            background: return None when the state is copied; threads then write the checkpoint.
        """
        self.wait_for_save()  # a background save uses the buffers
        self._before_save()
        meta = {"world_size": world_group().size, "torch": str(torch.__version__)}
        kept = None if world_group().size == 1 else self.strategy.held_state()
        if kept is not None:
            sliced = HeldParts(kept, self.strategy.parameter_mesh)
            streams = self._streams()
            on_rank_0(lambda: self.locks.take(Path(directory)))
            shared, path = self._sliced.save(
                directory,
                step,
                sliced,
                lambda: with_strategy(kept, self.parts_beside_models(run, streams)),
                background=background,
                retention=retention,
                meta=meta,
            )
            if shared:
                self._unfinished = background
                return path
        state, streams = self.strategy.state_dict(), self._streams()

        def write() -> Path | None:
            self.locks.take(Path(directory))
            parts = with_models(state, self.parts_beside_models(run, streams))
            encoded = checkpoint.encode_parts(parts, self._buffers)
            # Absolute, since the script may change the current directory meanwhile.
            target = Path(directory).absolute() if background else directory
            write_files = partial(checkpoint.write, target, step=step, parts=encoded, retention=retention, meta=meta)
            if not background:
                return write_files()
            self._writer.begin(step, write_files)
            return None

        path = on_rank_0(write)
        self._unfinished = background
        return path

    def gather(self) -> tuple[dict[str, Any], list[Any]]:
        """Gather the distributed state. Collective.

        Returns (the strategy's state, whole on rank 0; the random streams of all ranks).
        """
        self._before_save()
        return self.strategy.state_dict(), self._streams()

    def _before_save(self) -> None:
        for thing in self.tracked.values():
            getattr(thing, "before_save", _nothing)()

    def _streams(self) -> list[Any]:
        """The random streams of all ranks. Collective."""
        return world_group().gather(generators.get_state(self._device))

    def wait_for_save(self) -> Path | None:
        """Wait for the last background save, and return its path; None if its result is already known on all ranks.

        Collective. Raises CheckpointError on every rank if the save failed.
        """
        if not self._unfinished:
            return None
        self._unfinished = False
        return self._sliced.finish()

    def end_saves(self, calls: CallCheck) -> None:
        """Call `wait_for_save` at the end of a run that had no error."""
        if self._unfinished:
            with calls.call("the end of the run"):
                self.wait_for_save()

    def close(self) -> None:
        """Wait for this process's background save, without a collective, since an error may be ending the run.

        Prints a failure instead of raising it.
        """
        try:
            self._writer.finish()
        except CheckpointError as error:
            print(f"paceline: {error}", file=sys.stderr, flush=True)
        finally:
            self.locks.close()

    def parts_beside_models(self, run: dict[str, Any], streams: list[Any]) -> dict[str, Any]:
        """All parts of a checkpoint except models, optimizers and "strategy".

        run: entries for the part "run". streams: the random streams of all ranks; empty if they are not known.
        """
        parts = {f"scheduler_{i}": scheduler.state_dict() for i, scheduler in enumerate(self.schedulers)}
        kinds = [type(scheduler).__qualname__ for scheduler in self.schedulers]
        fixed = {"seed": self._seed, "schedulers": kinds, "streams": streams, "begun": self.hyperparameters.begun}
        return {**parts, "run": {**run, **fixed, **self._run_part()}, "tracked": self._tracked_part()}

    def _run_part(self) -> dict[str, Any]:
        loaders = {name: loader.state_dict() for name, loader in self.loaders.items()}
        shards = self._reproducible
        environment = {} if shards is None else {"reproducible": fingerprint(shards, self._device)}
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {"loaders": {**self._waiting["loaders"], **loaders}, **environment, **states}

    def _tracked_part(self) -> dict[str, Any]:
        return {**self._waiting["tracked"], **{name: thing.state_dict() for name, thing in self.tracked.items()}}

    # --- restoring

    def restore(
        self,
        directory: str | Path,
        missing_ok: bool,
        find_kept: Callable[[], checkpoint.WholeCheckpoint | None] | None = None,
    ) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint, and return its part "run".

        Rank 0 reads the checkpoint, so no shared disk is needed. If the strategy shards tensors and all ranks see the
        directory, each rank reads its own part. If a background save is still running, all ranks first wait for it, as
        in `save`.

        Args:
            missing_ok: return None if there is no checkpoint.
            find_kept: called on each rank; returns the newest state that this machine kept before a restart, or None
                (newest_state.py, memory_checkpoints.py). If a kept state is newer than the checkpoint, the newest kept
                state is restored instead: the lowest rank with this state sends it to all.
        """

        def find() -> tuple[Any, ...] | None:
            with verifying() as verify:
                if missing_ok:
                    self.locks.resumes(Path(directory))
                    if not checkpoint.holds_checkpoint(directory):
                        return None
                return tuple(checkpoint.find(directory, verify))

        self.wait_for_save()
        if world_group().rank != 0:
            help_verify()
        on_disk = on_rank_0(find)
        found = None if on_disk is None else checkpoint.WholeCheckpoint(*on_disk)
        kept = None if find_kept is None else find_kept()
        steps = [-1] if find_kept is None else world_group().gather(-1 if kept is None else kept.step)
        if max(steps) > (-1 if found is None else found.step):
            return self._restore_kept(kept, source=steps.index(max(steps)), step=max(steps))
        if found is None:
            return None
        if found.damage and world_group().rank == 0:
            warn(
                "skipped damaged checkpoints:\n  "
                + "\n  ".join(found.damage)
                + f"\nUsing the newest intact checkpoint: {found.path}",
            )
        self.restored_from = f"a checkpoint in {directory}"
        parts = self._read(found.path)
        with fits(found.path):
            return self._restore(parts)

    def _read(self, path: Path) -> dict[str, Any]:
        """Read an intact checkpoint. Collective."""
        if self.strategy.reads_stored() and world_group().size > 1 and all_see(path):
            return read_together(path)
        read: dict[str, Any] = {}  # filled on rank 0
        on_rank_0(lambda: read.update(checkpoint.read(path)[1]))
        return world_group().broadcast(read, what="the checkpoint")

    def _restore_kept(self, kept: checkpoint.WholeCheckpoint | None, *, source: int, step: int) -> dict[str, Any]:
        """Restore the kept state of rank `source`. Collective."""
        read: dict[str, Any] = {}
        if world_group().rank == source:
            assert kept is not None
            read = checkpoint.read(kept.path)[1]
        self.restored_from = f"the newest state, kept on the machine of rank {source}"
        parts = world_group().broadcast(read, source, what="the newest state")
        with fits(f"the newest state (after step {step})"):
            return self._restore(parts)

    def _restore(self, parts: dict[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = parts["run"]
        if run["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint was written with seed={run['seed']}, but this run has seed={self._seed}, so the order "
                f"of the data and the noise would change. Start with seed={run['seed']}."
            )
        if self._reproducible is not None:
            here = fingerprint(self._reproducible, self._device)
            check_resumed(run.get("reproducible"), here)
        schedulers = _numbered(parts, "scheduler")
        if len(schedulers) != len(self.schedulers):
            raise CheckpointError(
                f"the checkpoint holds {len(schedulers)} scheduler(s), but this script prepared "
                f"{len(self.schedulers)}. Prepare the same schedulers as for the checkpoint, before run.restore."
            )
        for number, (scheduler, name) in enumerate(zip(self.schedulers, run.get("schedulers", ()), strict=False)):
            check_same_class(scheduler, name, "scheduler", number)
        named = {"models": _numbered(parts, "model"), "optimizers": _numbered(parts, "optimizer")}
        self.strategy.load_state_dict({**parts.get("strategy", {}), **named})
        self._load(schedulers, run, parts["tracked"])
        for line in self.hyperparameters.restored(run.get("begun", {}), self.hyperparameter_source):
            if world_group().rank == 0:
                print(f"paceline: {line}", file=sys.stderr, flush=True)
        if len(run["streams"]) == world_group().size:
            generators.set_state(run["streams"][world_group().rank], self._device)
        return run

    def _load(self, schedulers: list[Any], run: dict[str, Any], tracked: dict[str, Any]) -> None:
        """Load schedulers, loaders, tracked objects and the fp16 scaler."""
        for scheduler, state in zip(self.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(state)
        for name, part in self.parts.items():
            part.load_state_dict(run[name])
        self._waiting = {"loaders": dict(run["loaders"]), "tracked": dict(tracked)}
        for name in [name for name in self.loaders if name in self._waiting["loaders"]]:
            self.loaders[name].load_state_dict(self._waiting["loaders"].pop(name))
        for name in [name for name in self.tracked if name in self._waiting["tracked"]]:
            self.tracked[name].load_state_dict(self._waiting["tracked"].pop(name))

    def digest(self, models: Sequence[nn.Module], used: Any) -> str:
        """A hash of the weights of the models in `used` (a model, or a tuple, list or dict of models). Collective.

        Ranks other than 0 return an empty string. models: all prepared models.
        """
        wanted = list(modules_of(used))
        states = self.strategy.state_dict()["models"] if any(one is model for one in wanted for model in models) else []
        if world_group().rank != 0:
            return ""
        found = []
        for one in wanted:
            number = next((number for number, model in enumerate(models) if model is one), None)
            state = one.state_dict() if number is None else states[number]
            found.append(digest({name: value for name, value in state.items() if isinstance(value, Tensor)}))
        return " ".join(found)

    def export(self, path: str | Path, number: int) -> None:
        """Write the state_dict of model `number` as a plain safetensors file. Collective."""
        state = self.strategy.state_dict()["models"][number]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        on_rank_0(lambda: checkpoint.export(path, tensors))


@contextmanager
def fits(source: str | Path) -> Iterator[None]:
    """A context for loading a checkpoint's state. Converts errors into a CheckpointError that names the source."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except (PacelineError, dist.DistError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} cannot be restored: {type(error).__name__}: {error}. The checkpoint does not match the models, "
            "optimizers and objects of this program, or it was modified. Restore it with the program that wrote it, "
            "or use another checkpoint."
        ) from error


def with_models(state: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """All parts of a checkpoint. state: from Strategy.state_dict. others: from State.parts_beside_models."""
    parts: dict[str, Any] = {}
    for kind in ("models", "optimizers"):
        parts |= {part_name(kind, number): value for number, value in enumerate(state[kind])}
    return {**parts, **with_strategy(state, others)}


def with_strategy(state: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint without models and optimizers. Arguments as for `with_models`."""
    further = {key: value for key, value in state.items() if key not in ("models", "optimizers")}
    return {**({"strategy": further} if further else {}), **others}


def _nothing() -> None:
    """The default `before_save` of tracked objects."""


def _numbered(parts: dict[str, Any], kind: str) -> list[Any]:
    """The parts of one kind, in order. For the kind "model" these are model_0, model_1, ..."""
    found: list[Any] = []
    while f"{kind}_{len(found)}" in parts:
        found.append(parts[f"{kind}_{len(found)}"])
    return found


def model_number(models: Sequence[nn.Module], model: nn.Module | None, call: str = "export") -> int:
    """The number of this model among the prepared models; for None, of the only prepared model. Raises UsageError.

    call: the method of Run, for messages.
    """
    if model is None:
        if len(models) != 1:
            raise UsageError(f"run.{call}(path): {len(models)} models are prepared. Name one: run.{call}(path, model).")
        return 0
    for number, prepared in enumerate(models):
        if prepared is model:
            return number
    if call != "export":
        raise UsageError(
            f"run.{call}(path, model): this {type(model).__name__} was not prepared. Call run.prepare(model) first."
        )
    raise UsageError(
        f"run.export(path, model): this {type(model).__name__} was not prepared. For an average of a prepared model's "
        "weights (a copy.deepcopy, or torch's AveragedModel) write ema = run.ema(model, decay), ema.update() after "
        "run.step, and run.export(path, ema)."
    )
