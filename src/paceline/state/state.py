"""The state of a run: what a checkpoint holds of it, and how it is restored.

The parts of a checkpoint: model_0, optimizer_0, scheduler_0 and so on, in the order of `prepare`; "strategy", for what
only the strategy has (a codec's residuals); "run", with counters, loaders, random streams and the fp16 scaler; and
"tracked". Loaders and tracked objects have names. The state of one that the script has not made yet when it restores is
kept until it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import collectives, generators
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, PacelineError, UsageError, warn
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.folder_lock import FolderLocks
from paceline.state.hyperparameters import Hyperparameters, Whose
from paceline.state.snapshot import SnapshotBuffers, digest
from paceline.step.call_check import CallCheck
from paceline.step.environment_fingerprint import check_ranks, check_resumed, fingerprint
from paceline.step.preparable import modules_of
from paceline.strategies.base import Strategy
from paceline.strategies.kit.named_parameters import check_same_class

T = TypeVar("T")


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
        self.whose: Whose = "checkpoint"  # hyperparameters does a restored run go on with?
        self.restored_from = ""  # where the last restored state was, in words
        self.locks = FolderLocks()  # of the folders that this run saves in; on rank 0
        self.parts: dict[str, Any] = {}  # objects of the run itself: the fp16 scaler
        self._device, self._seed, self._reproducible = device, seed, reproducible
        # Restored states of loaders and tracked objects that the script has not made yet, by name.
        self._waiting: dict[str, dict[str, Any]] = {"loaders": {}, "tracked": {}}
        self._buffers = SnapshotBuffers()
        self._writer = BackgroundWrite()  # of what is in the buffers, on rank 0
        self._unfinished = False  # have the ranks yet to hear what came of a save in the background? Alike on all

    # --- adding

    def add_loader(self, loader: Loader) -> None:
        if loader.name in self.loaders:
            raise UsageError(
                f"run.loader(name={loader.name!r}): there is a training loader of that name. Give each its own name, "
                "since a checkpoint keeps its position by it."
            )
        self.loaders[loader.name] = loader
        if loader.name in self._waiting["loaders"]:
            loader.load_state_dict(self._waiting["loaders"].pop(loader.name))

    def add_tracked(self, name: str, thing: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UsageError(
                    f"run.track({name}={type(thing).__name__}): it has no {method}(). Give it state_dict() and "
                    "load_state_dict(state), as torch's modules, optimizers and schedulers have."
                )
        if name in self.tracked and self.tracked[name] is not thing:
            raise UsageError(f"run.track({name}=...): another object is tracked by that name.")
        self.tracked[name] = thing
        if name in self._waiting["tracked"]:
            thing.load_state_dict(self._waiting["tracked"].pop(name))

    def begin(self) -> None:
        """Compare the environments of a reproducible run's processes. Collective, when threads and backends are set."""
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
        """Write a checkpoint, and return its path. Collective: rank 0 writes, and all return when it is on the disk.

        Before that all wait for what is still being written in the background. Where that has failed, this raises its
        CheckpointError on every rank, and writes nothing.

        Args:
            run: what the run itself adds to its part.
            background: return None when the state is copied; a thread of rank 0 writes.
        """
        state, streams = self.gather()

        def write() -> Path | None:
            self._writer.finish()  # it writes what the buffers hold
            self.locks.take(Path(directory))
            parts = with_models(state, self.parts_beside_models(run, streams))
            encoded = checkpoint.encode_parts(parts, self._buffers)
            meta = {"world_size": collectives.size_of(), "torch": str(torch.__version__)}
            # Absolute, since the script may change the current directory meanwhile.
            place = Path(directory).absolute() if background else directory
            own = partial(checkpoint.write, place, step=step, parts=encoded, retention=retention, meta=meta)
            if not background:
                return own()
            self._writer.begin(step, own)
            return None

        self._unfinished = False  # where this raises, nothing is under way
        path = _on_rank_0(write)
        self._unfinished = background
        return path

    def gather(self) -> tuple[dict[str, Any], list[Any]]:
        """What ranks hold together of the state: that of the strategy, whole on rank 0, and the random streams of all.
        Collective."""
        for thing in self.tracked.values():
            getattr(thing, "before_save", _nothing)()
        return self.strategy.state_dict(), collectives.gather_objects(generators.get_state(self._device))

    def wait_for_save(self) -> Path | None:
        """Wait until the last save in the background is on the disk, and return its path; None where all ranks have
        heard of it already. Collective. Raises CheckpointError, on every rank, where it could not be written."""
        if not self._unfinished:
            return None
        self._unfinished = False
        return _on_rank_0(self._writer.finish)

    def end_saves(self, calls: CallCheck) -> None:
        """`wait_for_save`, when the run ends well."""
        if self._unfinished:
            with calls.call("the end of the run"):
                self.wait_for_save()

    def close(self) -> None:
        """Wait until this process writes nothing any more, and ask no other: an error may be why the run ends, so that
        a failure is printed here."""
        try:
            self._writer.finish()
        except CheckpointError as error:
            print(f"paceline: {error}", file=sys.stderr, flush=True)
        finally:
            self.locks.close()

    def parts_beside_models(self, run: dict[str, Any], streams: list[Any]) -> dict[str, Any]:
        """The parts of a checkpoint that hold neither models nor optimizers. run: what the run itself adds to its part.
        streams: the random streams of all ranks; an empty list where they are not known."""
        parts = {f"scheduler_{i}": scheduler.state_dict() for i, scheduler in enumerate(self.schedulers)}
        kinds = [type(scheduler).__qualname__ for scheduler in self.schedulers]
        own = {"seed": self._seed, "schedulers": kinds, "streams": streams, "begun": self.hyperparameters.begun}
        return {**parts, "run": {**run, **own, **self._run_part()}, "tracked": self._tracked_part()}

    def _run_part(self) -> dict[str, Any]:
        loaders = {name: loader.state_dict() for name, loader in self.loaders.items()}
        shards = self._reproducible
        environment = {} if shards is None else {"reproducible": fingerprint(shards, self._device)}
        own = {name: part.state_dict() for name, part in self.parts.items()}
        return {"loaders": {**self._waiting["loaders"], **loaders}, **environment, **own}

    def _tracked_part(self) -> dict[str, Any]:
        return {**self._waiting["tracked"], **{name: thing.state_dict() for name, thing in self.tracked.items()}}

    # --- restoring

    def restore(
        self,
        directory: str | Path,
        missing_ok: bool,
        handed_on: Callable[[], checkpoint.WholeCheckpoint | None] | None = None,
    ) -> dict[str, Any] | None:
        """Restore the newest whole checkpoint, and return its part "run". None where there is none, with missing_ok.
        Rank 0 reads it, so that no shared disk is needed. First all wait for what is being written in the background,
        as in `save`.

        handed_on: a function that finds, on each rank, the state that was handed on to its machine (newest_state.py).
        Where one of these states is newer than the checkpoint, the lowest rank that has the newest sends it to all.
        """

        read: dict[str, Any] = {}  # on rank 0

        def find() -> tuple[Any, ...] | None:
            self._writer.finish()
            if missing_ok:
                self.locks.resumes(Path(directory))
                if not checkpoint.holds_checkpoint(directory):
                    return None
            whole = checkpoint.find(directory)
            read.update(checkpoint.read(whole.path)[1])
            return tuple(whole)

        self._unfinished = False
        told = _on_rank_0(find)
        found = None if told is None else checkpoint.WholeCheckpoint(*told)
        kept = None if handed_on is None else handed_on()
        steps = [-1] if handed_on is None else collectives.gather_objects(-1 if kept is None else kept.step)
        if max(steps) > (-1 if found is None else found.step):
            return self._restore_handed_on(kept, source=steps.index(max(steps)), step=max(steps))
        if found is None:
            return None
        if found.damage and collectives.rank_of() == 0:
            warn(
                "damaged checkpoints were passed over:\n  "
                + "\n  ".join(found.damage)
                + f"\nThe newest whole one is used: {found.path}",
            )
        self.restored_from = f"a checkpoint in {directory}"
        parts = collectives.broadcast_object(read, what="the checkpoint")
        with fits(found.path):
            return self._restore(parts)

    def _restore_handed_on(self, kept: checkpoint.WholeCheckpoint | None, *, source: int, step: int) -> dict[str, Any]:
        """Restore what rank `source` has. Collective."""
        read: dict[str, Any] = {}
        if collectives.rank_of() == source:
            assert kept is not None
            read = checkpoint.read(kept.path)[1]
        self.restored_from = f"the newest state, which was handed on to rank {source}"
        parts = collectives.broadcast_object(read, source, what="the state that was handed on")
        with fits(f"the state that was handed on after step {step}"):
            return self._restore(parts)

    def _restore(self, parts: dict[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = parts["run"]
        if run["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint was written with seed={run['seed']}, but this run has seed={self._seed}: it would go "
                "on with another order and other noise. Start with the checkpoint's seed."
            )
        if self._reproducible is not None:
            here = fingerprint(self._reproducible, self._device)
            check_resumed(run.get("reproducible"), here)
        schedulers = _numbered(parts, "scheduler")
        if len(schedulers) != len(self.schedulers):
            raise CheckpointError(
                f"the checkpoint holds {len(schedulers)} scheduler(s), but this script prepared "
                f"{len(self.schedulers)}. Prepare what the checkpoint's script prepared, before run.restore."
            )
        for number, (scheduler, name) in enumerate(zip(self.schedulers, run.get("schedulers", ()), strict=False)):
            check_same_class(scheduler, name, "scheduler", number)
        named = {"models": _numbered(parts, "model"), "optimizers": _numbered(parts, "optimizer")}
        self.strategy.load_state_dict({**parts.get("strategy", {}), **named})
        self._load(schedulers, run, parts["tracked"])
        for line in self.hyperparameters.restored(run.get("begun", {}), self.whose):
            if collectives.rank_of() == 0:
                print(f"paceline: {line}", file=sys.stderr, flush=True)
        if len(run["streams"]) == collectives.size_of():
            generators.set_state(run["streams"][collectives.rank_of()], self._device)
        return run

    def _load(self, schedulers: list[Any], run: dict[str, Any], tracked: dict[str, Any]) -> None:
        """Load everything but models, optimizers and random streams."""
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
        """A hash of the weights of the models that `used` is (one, or a tuple, list or dict of them). models: all that
        are prepared. Collective. It is known on rank 0; elsewhere it is empty."""
        wanted = list(modules_of(used))
        states = self.strategy.state_dict()["models"] if any(one is own for one in wanted for own in models) else []
        if collectives.rank_of() != 0:
            return ""
        found = []
        for one in wanted:
            number = next((number for number, own in enumerate(models) if own is one), None)
            state = one.state_dict() if number is None else states[number]
            found.append(digest({name: value for name, value in state.items() if isinstance(value, Tensor)}))
        return " ".join(found)

    def export(self, path: str | Path, number: int) -> None:
        """Write one model's state_dict as a plain safetensors file. Collective."""
        state = self.strategy.state_dict()["models"][number]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        _on_rank_0(lambda: checkpoint.export(path, tensors))


@contextmanager
def fits(place: str | Path) -> Iterator[None]:
    """Raise what a checkpoint's state brings the restored objects to raise, since it does not fit them, as a
    CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except (PacelineError, dist.DistError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{place} cannot be restored: {type(error).__name__}: {error}. The checkpoint does not fit the models, "
            "optimizers and objects of this program, or it was changed. Restore it with the program that wrote it, or "
            "use another checkpoint."
        ) from error


def with_models(state: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """All parts of a checkpoint. state: what a strategy returns. others: State.parts_beside_models."""
    parts: dict[str, Any] = {}
    for kind in ("models", "optimizers"):
        parts |= {f"{kind[:-1]}_{i}": value for i, value in enumerate(state[kind])}
    own = {key: value for key, value in state.items() if key not in ("models", "optimizers")}
    return {**parts, **({"strategy": own} if own else {}), **others}


def _nothing() -> None:
    """For a tracked object that has nothing to gather."""


def _on_rank_0(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank. Its CheckpointError is raised on every rank. Collective."""
    failure, result = None, None
    if collectives.rank_of() == 0:
        try:
            result = action()
        except CheckpointError as error:
            failure = str(error)
    failure, result = collectives.broadcast_object((failure, result))
    if failure is not None:
        raise CheckpointError(failure)
    return cast(T, result)


def _numbered(parts: dict[str, Any], kind: str) -> list[Any]:
    """The parts model_0, model_1, ... in order, for kind="model"."""
    found: list[Any] = []
    while f"{kind}_{len(found)}" in parts:
        found.append(parts[f"{kind}_{len(found)}"])
    return found


def model_number(models: Sequence[nn.Module], model: nn.Module | None) -> int:
    """The number of a prepared model; None means the only one. Raises UsageError."""
    if model is None:
        if len(models) != 1:
            raise UsageError(
                f"run.export(path): {len(models)} models are prepared: say which, run.export(path, model)."
            )
        return 0
    for number, own in enumerate(models):
        if own is model:
            return number
    raise UsageError(
        f"run.export(path, model): this {type(model).__name__} was not prepared. For an average of a prepared model's "
        "weights (a copy.deepcopy, or torch's AveragedModel) write ema = run.ema(model, decay), ema.update() after "
        "run.step, and run.export(path, ema)."
    )
