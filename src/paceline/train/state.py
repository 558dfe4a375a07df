"""What a checkpoint holds, and putting it back: model, optimizer, schedule, scaler, position, random streams, tracked.

Everything has a name: model_0, optimizer_0, scheduler_0 in the order of `prepare`; loaders and tracked objects by their
own; what is a strategy's alone (a codec's residuals) is in "strategy". A part that a restored checkpoint holds and the
script has not made yet (a loader, a tracked object) waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives, generators
from paceline.errors import CheckpointError, UsageError
from paceline.strategies.base import Strategy
from paceline.strategies.replicated import check_same_class
from paceline.train import checkpoint
from paceline.train.environment_fingerprint import agree, circumstances, compare
from paceline.train.loader import Loader
from paceline.train.snapshot import SnapshotBuffers


class State:
    """The named parts of a run. `Run` adds to the dictionaries; this gathers them into checkpoints and back."""

    def __init__(self, strategy: Strategy, *, device: torch.device, seed: int, reproducible: int | None = None) -> None:
        self.strategy = strategy
        self.schedulers: list[Any] = []
        self.loaders: dict[str, Loader] = {}
        self.tracked: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}  # the run's own: counters, scaler
        self._device, self._seed, self._reproducible = device, seed, reproducible
        self._waiting: dict[str, dict[str, Any]] = {"loaders": {}, "tracked": {}}
        self._compared: set[str] = set()  # loaders whose data those that were there before had compared
        self._buffers = SnapshotBuffers()

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
        loader.probing = loader.probing and loader.name not in self._compared

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
        """Compares what the bits depend on between the processes. All call it, when threads and backends are set."""
        if self._reproducible is not None:
            agree(circumstances(self._reproducible, self._device))

    # --- saving

    def save(self, directory: str | Path, step: int, keep: int | None, run: dict[str, Any]) -> Path:
        """Writes a checkpoint. All processes call it; rank 0 writes, and all return when it stands on the disk."""
        state = self.strategy.state_dict()
        streams = collectives.gather_objects(generators.get_state(self._device))
        failure, path = None, ""
        if collectives.rank_of() == 0:
            parts: dict[str, Any] = {}
            for kind in ("models", "optimizers"):
                parts |= {f"{kind[:-1]}_{i}": value for i, value in enumerate(state[kind])}
            own = {key: value for key, value in state.items() if key not in ("models", "optimizers")}
            parts |= {"strategy": own} if own else {}
            parts |= {f"scheduler_{i}": scheduler.state_dict() for i, scheduler in enumerate(self.schedulers)}
            kinds = [type(scheduler).__qualname__ for scheduler in self.schedulers]
            parts["run"] = {**run, "seed": self._seed, "schedulers": kinds, "streams": streams, **self._run_part()}
            parts["tracked"] = self._tracked_part()
            try:
                path = str(self._write(Path(directory), step, parts, keep))
            except CheckpointError as error:
                failure = str(error)
        failure, path = collectives.broadcast_object((failure, path))
        if failure is not None:
            raise CheckpointError(failure)
        return Path(path)

    def _run_part(self) -> dict[str, Any]:
        loaders = {name: loader.state_dict() for name, loader in self.loaders.items()}
        own = {name: part.state_dict() for name, part in self.parts.items()}
        return {"loaders": {**self._waiting["loaders"], **loaders}, **self._circumstances(), **own}

    def _tracked_part(self) -> dict[str, Any]:
        return {**self._waiting["tracked"], **{name: thing.state_dict() for name, thing in self.tracked.items()}}

    def _circumstances(self) -> dict[str, Any]:
        shards = self._reproducible
        return {} if shards is None else {"reproducible": circumstances(shards, self._device)}

    def _write(self, directory: Path, step: int, parts: dict[str, Any], keep: int | None) -> Path:
        return checkpoint.write(
            directory,
            step=step,
            parts=checkpoint.stage(parts, self._buffers),
            keep=keep,
            meta={"world_size": collectives.size_of(), "torch": str(torch.__version__)},
        )

    # --- restoring

    def restore(self, directory: str | Path, missing_ok: bool) -> dict[str, Any] | None:
        """Puts back the newest whole checkpoint, and returns the run's own part; None where there is none and that is
        allowed. Rank 0 reads it, so that no shared disk is needed."""
        found = collectives.broadcast_object(self._find(directory, missing_ok) if collectives.rank_of() == 0 else None)
        assert found is not None
        failure, path, damages = found
        if failure is not None:
            raise CheckpointError(failure)
        if path is None:
            return None
        if damages and collectives.rank_of() == 0:
            warnings.warn(
                "damaged checkpoints were passed over:\n  "
                + "\n  ".join(damages)
                + f"\nThe newest whole one is used: {path}",
                stacklevel=2,
            )
        parts = self._distribute(checkpoint.read(Path(path))[1] if collectives.rank_of() == 0 else None)
        return self._put_back(parts)

    def _find(self, directory: str | Path, missing_ok: bool) -> tuple[str | None, str | None, list[str]]:
        """(why it failed, the path, what was damaged)."""
        try:
            if missing_ok and not checkpoint.holds_checkpoint(directory):
                return None, None, []
            found = checkpoint.find(directory)
        except CheckpointError as error:
            return str(error), None, []
        return None, str(found.path), list(found.damage)

    def _distribute(self, parts: dict[str, Any] | None) -> dict[str, Any]:
        """The same tree on all processes: its form by pickle between them, its tensors by broadcast."""
        if collectives.size_of() == 1:
            assert parts is not None
            return parts
        tensors: list[Tensor] = []

        def take(node: Any) -> Any:
            if isinstance(node, Tensor):
                tensors.append(node)
                return _Slot(len(tensors) - 1, tuple(node.shape), node.dtype)
            return _map(node, take)

        form = collectives.broadcast_object(take(parts) if collectives.rank_of() == 0 else None)
        if collectives.rank_of() != 0:

            def make(node: Any) -> Any:
                if isinstance(node, _Slot):
                    tensors.append(torch.empty(node.shape, dtype=node.dtype))
                    return node
                return _map(node, make)

            make(form)
        collectives.broadcast_tensors(tensors)

        def fill(node: Any) -> Any:
            return tensors[node.number] if isinstance(node, _Slot) else _map(node, fill)

        whole: dict[str, Any] = fill(form)
        return whole

    def _put_back(self, parts: dict[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = parts["run"]
        if run["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint was written with seed={run['seed']}, but this run has seed={self._seed}: it would go "
                "on with another order and other noise. Start with the checkpoint's seed."
            )
        if self._reproducible is not None:
            here = circumstances(self._reproducible, self._device)
            compare(run.get("reproducible"), here, told=collectives.rank_of() == 0)
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
        self._put_back_others(schedulers, run, parts["tracked"])
        if len(run["streams"]) == collectives.size_of():
            generators.set_state(run["streams"][collectives.rank_of()], self._device)
        return run

    def _put_back_others(self, schedulers: list[Any], run: dict[str, Any], tracked: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(state)
        for name, part in self.parts.items():
            part.load_state_dict(run[name])
        self._waiting = {"loaders": dict(run["loaders"]), "tracked": dict(tracked)}
        for name in [name for name in self.loaders if name in self._waiting["loaders"]]:
            self.loaders[name].load_state_dict(self._waiting["loaders"].pop(name))
        for name in [name for name in self.tracked if name in self._waiting["tracked"]]:
            self.tracked[name].load_state_dict(self._waiting["tracked"].pop(name))

    # --- for a process that joins

    def place(self) -> dict[str, Any]:
        """What a checkpoint holds beside models, optimizers and random streams, with tensors on the CPU."""
        place = {
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "run": self._run_part(),
            "tracked": self._tracked_part(),
            "compared": [name for name, loader in self.loaders.items() if not loader.probing],
        }
        whole: dict[str, Any] = _on_cpu(place)
        return whole

    def put_place(self, place: dict[str, Any]) -> None:
        self._put_back_others(place["schedulers"], place["run"], place["tracked"])
        self._compared = set(place["compared"])
        for name in self._compared & self.loaders.keys():
            self.loaders[name].probing = False

    def export(self, path: str | Path, number: int) -> None:
        """Writes one model's state_dict as a plain safetensors file."""
        state = self.strategy.state_dict()["models"][number]
        failure = None
        if collectives.rank_of() == 0:
            try:
                checkpoint.export(Path(path), {name: t for name, t in state.items() if isinstance(t, Tensor)})
            except CheckpointError as error:
                failure = str(error)
        failure = collectives.broadcast_object(failure)
        if failure is not None:
            raise CheckpointError(failure)


class _Slot:
    """The place of a tensor in a tree that travels without its tensors."""

    def __init__(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype


def _map(node: Any, function: Any) -> Any:
    if isinstance(node, dict):
        mapped = {key: function(value) for key, value in node.items()}
        if type(node) is dict:
            return mapped
        copied = node.copy()
        copied.update(mapped)
        return copied
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and type(node) in (list, tuple):
        return type(node)(function(item) for item in node)
    return node


def _on_cpu(node: Any) -> Any:
    return node.cpu() if isinstance(node, Tensor) else _map(node, _on_cpu)


def _numbered(parts: dict[str, Any], kind: str) -> list[Any]:
    found: list[Any] = []
    while f"{kind}_{len(found)}" in parts:
        found.append(parts[f"{kind}_{len(found)}"])
    return found


def model_number(models: Sequence[nn.Module], model: nn.Module | None) -> int:
    """Which prepared model is meant. Raises UsageError."""
    if model is None:
        if len(models) != 1:
            raise UsageError(
                f"run.export(path): {len(models)} models are prepared: say which, run.export(path, model)."
            )
        return 0
    for number, own in enumerate(models):
        if own is model:
            return number
    raise UsageError(f"run.export(path, model): this {type(model).__name__} was not prepared.")
