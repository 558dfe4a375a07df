"""If a rank dies, the surviving ranks save the newest state for the restart. Only the current step is lost.

If each process holds the whole state (Strategy.local_state), each survivor has a newer state than the last checkpoint.

1. After each step, when the script fetches its next batch, each rank takes a snapshot in memory. The snapshot holds
   everything that may change before the next update: all parts of a checkpoint except weights and optimizer state
   (counters, loader positions, schedulers, tracked objects), the options of optimizers, and buffers.
2. A rank dies. In the other ranks a collective raises, and the script does not catch the error. On each machine, the
   excepthook of one rank writes a checkpoint of its last snapshot into a folder from the launcher (world.HANDOVER). The
   launcher waits for this rank (Agent._await_handover).
3. All ranks restart. In `run.restore` they exchange the steps that they find in that folder. If one is newer than the
   script's last checkpoint, its rank sends the state to all ranks.

A snapshot without weights is valid only while the weights are unchanged. They have changed if the collective raises
after the rank's update, in the rest of the loop body (`run.mean`). They are also different during an evaluation with
other weights. So if it is cheap, the snapshot also copies weights and optimizer states. Otherwise, if the weights have
changed, the run resumes from the last checkpoint: resuming with the new weights would skip the rest of the loop body.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import process_group
from paceline.comm.mesh import world_group
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, chain_of, describe_error, only_reports_lost_peer
from paceline.state import checkpoint
from paceline.state.run_position import RunPosition
from paceline.state.state import State, with_models
from paceline.strategies.base import Strategy
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.torch_private.core import foreach_copy_, version_of
from paceline.world import KEEPS, WRITING, send_to_launcher, withdraw

_COPIED_ELEMENTS = 2**16
"""Larger tensors of tracked objects, such as an average of weights, are not copied; only their version is recorded."""
_MAX_SNAPSHOT_SHARE, _FREE_SECONDS = 0.05, 0.5
"""Stop taking snapshots when they take more than this fraction of the training time, plus _FREE_SECONDS."""
_MAX_COPY_SHARE, _MAX_COPIED_BYTES = 0.02, 2**26
"""Copy weights of at most _MAX_COPIED_BYTES in total, while the copies take less than _MAX_COPY_SHARE of the training
time, plus _FREE_SECONDS."""
_PROBES = 4
"""Record one element of this number of weights, since a write to `weight.data` changes no version."""


_Key = tuple[str, int, str, str]
"""("model", its number, the weight's name, ""), or ("optimizer", its number, the weight's name, "exp_avg")."""


@dataclass(frozen=True)
class _Snapshot:
    """The state of a rank between two steps, except weights and optimizer states that were not copied."""

    step: int
    counts: list[int]  # RunPosition.counts(): while they are the same, weights without a copy are unchanged
    parts: dict[str, Any]  # the parts of a checkpoint, except models and optimizers
    options: list[list[dict[str, Any]]]  # for each optimizer: learning rate and other options of each param group
    buffers: dict[str, Any]  # of all models, by "NUMBER OF THE MODEL/name"
    copies: dict[_Key, Any] | None  # of weights and optimizer states; None: too expensive
    versions: list[tuple[Tensor, int]]  # of tensors in `parts` that were not copied
    weights: tuple[list[int], list[tuple[int, float]]]  # to detect a change of weights that were not copied

    def copied(self, optimizer: int) -> dict[str, dict[str, Any]]:
        """The copied state of an optimizer, by the names of the weights. optimizer: its number."""
        state: dict[str, dict[str, Any]] = {}
        for (kind, number, name, what), value in (self.copies or {}).items():
            if kind == "optimizer" and number == optimizer:
                state.setdefault(name, {})[what] = value
        return state


class NewestState:
    """The newest state of one rank, saved if another rank dies. Used if the launcher restarts ranks after a failure.

    Args:
        folder: this machine's folder, the same at all starts of the run.
        models, optimizers: the prepared objects, in the order of the strategy's state. The run extends these lists.
        ready: returns whether a checkpoint may be written now, as between `run.step` and the next batch.
        steps: returns the number of steps so far.
    """

    def __init__(
        self,
        folder: str,
        strategy: Strategy,
        state: State,
        position: RunPosition,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        ready: Callable[[], bool],
        steps: Callable[[], int],
    ) -> None:
        # A script may make several runs in sequence, and each run has a subfolder.
        self._folder = Path(folder) / f"run-{process_group.runs}"
        self._strategy, self._state, self._position = strategy, state, position
        self._models, self._optimizers = models, optimizers
        self._ready, self._steps = ready, steps
        self._snapshot: _Snapshot | None = None
        self._taken, self._spent, self._began = 0, 0.0, 0.0  # number of snapshots; their total seconds; start time
        self._weights: list[Tensor] | None = None  # the weights of all models; None: collect them again
        self._buffers: list[tuple[nn.Module, str, str]] = []  # (module, name in it, "NUMBER OF THE MODEL/whole name")
        self._probes: list[tuple[Tensor, Tensor]] = []  # (weight, its last element)
        self._named: list[tuple[_Key, Tensor]] = []  # the weights; a tied weight under each of its names
        self._names: dict[Tensor, str] = {}  # weight -> its name in a state of all models
        self._copying, self._copied_seconds = True, 0.0
        self._restored: int | None = None  # the step at which the run began; None: the script has not called restore

    # --- during training

    def prepared(self) -> None:
        """Collect weights and buffers again: models may have changed."""
        self._weights = None

    def begin(self) -> None:
        """Start taking snapshots: the script has called restore, so a restarted script will find the newest state."""
        if self._restored is None:
            self._restored, self._began = self._steps(), time.perf_counter()
            self._try_to_take()

    def after_batch(self, loader: Loader) -> None:
        """Take a snapshot, if due. Called when the script fetches its next training batch."""
        if self._snapshot is not None and loader.stepped and self._ready():
            self._try_to_take()

    def close(self) -> None:
        """Drop the snapshot, and take no more."""
        if self._snapshot is not None:
            self._snapshot = None
            _stop_keeping()

    def _can(self) -> bool:
        """Whether this process alone holds everything that a checkpoint needs."""
        return (
            world_group().size > 1
            and self._strategy.local_state() is not None
            and not any(hasattr(thing, "before_save") for thing in self._state.tracked.values())
        )

    def _try_to_take(self) -> None:
        """Take a snapshot, but give up if this fails or is slow: it must not stop or slow down the training."""
        began = time.perf_counter()
        try:
            if self._snapshot is None and not self._can():
                return
            self._take()
            now = time.perf_counter()
            self._spent += now - began
            slow = self._spent > _FREE_SECONDS + _MAX_SNAPSHOT_SHARE * (now - self._began)
            why = f"its snapshot takes {self._spent / self._taken * 1e3:.2g} ms after each step" if slow else ""
        except Exception as problem:  # such as from a tracked object: for other saves, only rank 0 calls state_dict
            why = describe_error(problem)
        if why:
            self.close()
            print(
                "paceline: if another rank dies, the run will resume from the last checkpoint, not from the newest "
                f"state of rank {world_group().rank}: {why}. Check the objects that you pass to run.track.",
                file=sys.stderr,
                flush=True,
            )

    def _take(self) -> None:
        first = self._snapshot is None
        if self._weights is None:
            self._look_at_models()
        versions: list[tuple[Tensor, int]] = []
        copies = self._copies()
        most = _COPIED_ELEMENTS if copies is None else sys.maxsize
        freeze = partial(_frozen, versions=versions, most=most)
        former = {} if self._snapshot is None else self._snapshot.buffers
        self._snapshot = _Snapshot(
            step=self._steps(),
            counts=self._position.counts(),
            parts=freeze(self._state.parts_beside_models(self._position.counters(), streams=[])),
            options=[[_options_of(group) for group in one.param_groups] for one in self._optimizers],
            # Read each buffer from its module each time: `self.mean = ...` replaces the tensor.
            buffers=_copied({name: getattr(module, key) for module, key, name in self._buffers}, former),
            copies=copies,
            versions=versions,
            weights=self._fingerprint(),
        )
        self._taken += 1
        if first:
            send_to_launcher(os.environ, KEEPS)

    def _look_at_models(self) -> None:
        self._weights = [weight for model in self._models for weight in model.parameters()]
        probed = [weight for weight in self._weights if weight.numel() and weight.is_contiguous()][: 2 * _PROBES : 2]
        self._probes = [(weight, weight.detach().view(-1)[-1]) for weight in probed]
        self._names = parameter_names(self._models)
        self._named = [
            (("model", number, name, ""), weight)
            for number, model in enumerate(self._models)
            for name, weight in model.named_parameters(remove_duplicate=False)
        ]
        self._copying = self._copying and sum(weight.nbytes for weight in self._weights) <= _MAX_COPIED_BYTES
        self._buffers = [
            (module, name, f"{number}/{path}{'.' if path else ''}{name}")
            for number, model in enumerate(self._models)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, _ in module.named_buffers(recurse=False)
        ]

    def _copies(self) -> dict[_Key, Any] | None:
        """Copies of everything that an update changes: weights and optimizer states. None if they are too expensive."""
        if not self._copying:
            return None
        began = time.perf_counter()
        found: dict[_Key, Any] = {key: weight.detach() for key, weight in self._named}
        for number, optimizer in enumerate(self._optimizers):
            for weight, state in optimizer.state.items():
                name = self._names.get(weight)
                if name is None:  # the optimizer has a state that belongs to no weight
                    self._copying = False
                    return None
                found |= {("optimizer", number, name, what): value for what, value in state.items()}
        copies = _copied(found, (self._snapshot.copies if self._snapshot else None) or {})
        now = time.perf_counter()
        self._copied_seconds += now - began
        self._copying = self._copied_seconds < _FREE_SECONDS + _MAX_COPY_SHARE * (now - self._began)
        return copies

    def _fingerprint(self) -> tuple[list[int], list[tuple[int, float]]]:
        """Values that a write to the weights changes: versions, and for `weight.data` some addresses and elements."""
        assert self._weights is not None
        return list(map(version_of, self._weights)), [(weight.data_ptr(), last.item()) for weight, last in self._probes]

    # --- when a rank has died

    def save_newest(self, error: BaseException) -> None:
        """Save the snapshot for the restart, if `error`, which ends this rank, reports that another rank has died."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        try:
            if self._is_newest(snapshot) and only_reports_lost_peer(map(describe_error, chain_of(error))):
                self._write(snapshot)
        except Exception as problem:  # in any case the user must see `error`
            why = str(problem) if isinstance(problem, CheckpointError) else describe_error(problem)
            print(
                f"paceline: the state after step {snapshot.step} is not saved for the restart: {why}",
                file=sys.stderr,
                flush=True,
            )
        finally:
            self.close()

    def _is_newest(self, snapshot: _Snapshot) -> bool:
        """Whether the snapshot still applies, and is newer than the state at the start of the run."""
        return (
            self._restored is not None
            and snapshot.step > self._restored
            and self._weights is not None  # run.prepare was not called since
            and (snapshot.copies is not None or self._is_untouched(snapshot))
            and all(version_of(tensor) == version for tensor, version in snapshot.versions)
            and self._can()
        )

    def _is_untouched(self, snapshot: _Snapshot) -> bool:
        """Whether weights and optimizers have not changed since the snapshot."""
        return self._position.counts() == snapshot.counts and self._fingerprint() == snapshot.weights

    def _write(self, snapshot: _Snapshot) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            os.close(os.open(self._folder / f"taken-{start}-{snapshot.step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another rank of this machine writes the same state
        for step, path in _kept(self._folder):
            if step < snapshot.step - 1:  # keep the previous step: a rank that is a step behind may be writing it
                shutil.rmtree(path, ignore_errors=True)
        send_to_launcher(os.environ, KEEPS, WRITING)
        whole = self._strategy.local_state()
        assert whole is not None
        for number, state in enumerate(whole["models"]):
            named = {name: f"{number}/{name}" for name in state}
            state.update({name: snapshot.buffers[key] for name, key in named.items() if key in snapshot.buffers})
            if snapshot.copies is not None:
                copies = {name: ("model", number, name, "") for name in state}
                state.update({name: snapshot.copies[key] for name, key in copies.items() if key in snapshot.copies})
        for number, (state, groups) in enumerate(zip(whole["optimizers"], snapshot.options, strict=True)):
            if snapshot.copies is not None:
                state["state"] = snapshot.copied(number)
            for group, options in zip(state["groups"], groups, strict=True):
                group.update(options)
        meta = {"world_size": world_group().size, "torch": str(torch.__version__)}
        checkpoint.write(self._folder, step=snapshot.step, parts=with_models(whole, snapshot.parts), meta=meta)

    # --- after the restart

    def find(self) -> checkpoint.WholeCheckpoint | None:
        """The newest intact state that was saved on this machine; None if there is none.

        Also None after the script's first restore (only this restore resumes the run), and at the first start of the
        run.
        """
        if self._restored is not None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        for _, path in _kept(self._folder):
            with contextlib.suppress(CheckpointError):
                return checkpoint.find(path)
        return None


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of the options of a param group. A learning rate may be a tensor that a scheduler changes in place."""
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    del options["params"]
    return options


def _kept(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, newest first."""
    paths = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(((int(path.name.split("-")[1]), path) for path in paths), reverse=True)


def _stop_keeping() -> None:
    """Inform the launcher that it need not wait any longer for this rank's state."""
    withdraw(os.environ, KEEPS)


@torch.no_grad()
def _copied(found: Mapping[Any, Any], former: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of each value, by its key. Reuses the memory of `former`, the last copies."""
    copies: dict[Any, Any] = {}
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for key, value in found.items():
        if not isinstance(value, Tensor):
            copies[key] = _frozen(value, versions=[], most=sys.maxsize)
            continue
        copy = former.get(key)
        if not isinstance(copy, Tensor) or copy.shape != value.shape or copy.dtype != value.dtype:
            copies[key] = value.clone()
            continue
        copies[key] = copy
        targets, sources = by_dtype.setdefault(value.dtype, ([], []))
        targets.append(copy)
        sources.append(value)
    for targets, sources in by_dtype.values():
        foreach_copy_(targets, sources)
    return copies


def _frozen(node: Any, versions: list[tuple[Tensor, int]], most: int) -> Any:
    """Return a copy of a nested state, so that later steps do not change it.

    A tensor with more than `most` elements is not copied. It is added to `versions` with its version.
    """
    if isinstance(node, Tensor):
        if node.numel() <= most:
            return node.detach().clone()
        versions.append((node, version_of(node)))
        return node
    if node is None or isinstance(node, (bool, int, float, str, bytes)):
        return node
    if type(node) is dict:
        return {key: _frozen(value, versions, most) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)([_frozen(value, versions, most) for value in node])
    if isinstance(node, Mapping):
        frozen = shallow_copy(node)
        frozen.update({key: _frozen(value, versions, most) for key, value in node.items()})  # type: ignore[attr-defined]
        return frozen
    return deepcopy(node)
