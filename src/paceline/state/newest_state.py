"""A rank dies, and those that live hand their state on: no step is lost but the one at hand.

Where each process holds the whole state (Strategy.own_state), any that lives has a newer one than the last checkpoint.

1. After each step, when the script comes back for its next batch, a rank notes what the next batch or the rest of an
   epoch may change before the next update: all that a checkpoint holds beside weights and the state of optimizers
   (counters, positions of loaders, schedulers, tracked objects), the options of optimizers, and buffers. Nothing is
   written.
2. A rank dies. The others learn it from a collective, which raises. The script does not catch that, and the excepthook
   writes a checkpoint of the last note into a folder that the launcher has named (world.HANDOVER). The launcher waits
   for it (Agent._await_handover). Of the ranks of a machine one writes.
3. All ranks start again. In `run.restore` they tell each other which step they find in that folder. If it is newer
   than the script's last checkpoint, who has it sends it to all.

The weights must be those of the note. They are not any more where a rank learns it after its own update, from a
collective in the rest of the loop's body (`run.mean`), for the rest of that body would never be run; nor where an
evaluation has put others in their place. So where it costs little, the note has a copy of weights and optimizer states.
Where it does not, and the weights are others, the run goes on from the last checkpoint.
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

from paceline.comm import collectives, process_group
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, chain_of, in_words, only_tells_of_a_lost_peer
from paceline.state import checkpoint
from paceline.state.run_position import RunPosition
from paceline.state.state import State, with_models
from paceline.strategies.base import Strategy
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.torch_private.core import foreach_copy_, version_of
from paceline.world import KEEPS, WRITING, take_back, tell_launcher

_COPIED_ELEMENTS = 2**16
"""A larger tensor of a tracked object, such as an average of weights, is not copied at each step: it is noted which
version of it that was."""
_MOST, _FREE_SECONDS = 0.05, 0.5
"""Notes that take a larger part of the time of training than this, and so many seconds more, are given up."""
_MOST_FOR_COPIES, _MOST_COPIED = 0.02, 2**26
"""Copies are made of weights of so many bytes at most, as long as they take a smaller part of the time than this, and
_FREE_SECONDS more."""
_PROBES = 4
"""Of so many weights a number is noted, beside their versions, which a write to `weight.data` does not change."""


_Key = tuple[str, int, str, str]
"""("model", its number, the weight's name, ""), or ("optimizer", its number, the weight's name, "exp_avg")."""


@dataclass(frozen=True)
class _Note:
    """Where a rank stood between two steps."""

    step: int
    counts: list[int]  # RunPosition.counts(): weights without a copy are those of the note while these are the same
    parts: dict[str, Any]  # of a checkpoint, but for models and optimizers
    options: list[list[dict[str, Any]]]  # of each optimizer, the groups' learning rates and so on
    buffers: dict[str, Any]  # of all models, by "NUMBER OF THE MODEL/name"
    copies: dict[_Key, Any] | None  # of weights and of the optimizers' states; None: they cost too much
    versions: list[tuple[Tensor, int]]  # of tensors in `parts` that were not copied
    weights: tuple[list[int], list[tuple[int, float]]]  # by which they are known again where they were not copied

    def copied(self, optimizer: int) -> dict[str, dict[str, Any]]:
        """The state of this optimizer, by the names of the weights."""
        state: dict[str, dict[str, Any]] = {}
        for (kind, number, name, what), value in (self.copies or {}).items():
            if kind == "optimizer" and number == optimizer:
                state.setdefault(name, {})[what] = value
        return state


class NewestState:
    """What one rank could hand on of a run. Made where the launcher starts ranks again after a failure.

    Args:
        folder: of this machine, for all starts of the run.
        models, optimizers: those that are prepared, in the order of the strategy's state; more may come.
        ready: whether a checkpoint may be written now, as after `run.step` and before the next batch.
        steps: how many steps were made.
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
        # Of this run of those that the script makes one after the other.
        self._folder = Path(folder) / f"run-{process_group.runs}"
        self._strategy, self._state, self._position = strategy, state, position
        self._models, self._optimizers = models, optimizers
        self._ready, self._steps = ready, steps
        self._note: _Note | None = None
        self._taken, self._spent, self._began = 0, 0.0, 0.0  # notes; seconds that they have taken; when they began
        self._weights: list[Tensor] | None = None  # of all models; None: to be looked for
        self._buffers: list[tuple[nn.Module, str, str]] = []  # (module, name in it, "NUMBER OF THE MODEL/whole name")
        self._probes: list[tuple[Tensor, Tensor]] = []  # (weight, its last element)
        self._named: list[tuple[_Key, Tensor]] = []  # the weights, a tied one under each of its names
        self._names: dict[Tensor, str] = {}  # of the weights, in a state of all models
        self._copying, self._copied_seconds = True, 0.0
        self._restored: int | None = None  # the step at which the run began; None: the script restores nothing

    # --- while it trains

    def prepared(self) -> None:
        """Models may have other weights, buffers or layers than before."""
        self._weights = None

    def begin(self) -> None:
        """The script has looked for a checkpoint, and would again: what is handed on has a place to come in."""
        if self._restored is None:
            self._restored, self._began = self._steps(), time.perf_counter()
            self._try_to_take()

    def after_batch(self, loader: Loader) -> None:
        """The script comes back for its next training batch."""
        if self._note is not None and loader.stepped and self._ready():
            self._try_to_take()

    def close(self) -> None:
        """The run ends: there is nothing to hand on."""
        if self._note is not None:
            self._note = None
            _stop_keeping()

    def _can(self) -> bool:
        """Whether this process, alone, holds all that a checkpoint holds."""
        return (
            collectives.size_of() > 1
            and self._strategy.own_state() is not None
            and not any(hasattr(thing, "before_save") for thing in self._state.tracked.values())
        )

    def _try_to_take(self) -> None:
        """Take a note. What cannot be noted, or not in a short time, must not stop or slow the training."""
        began = time.perf_counter()
        try:
            if self._note is None and not self._can():
                return
            self._take()
            now = time.perf_counter()
            self._spent += now - began
            dear = self._spent > _FREE_SECONDS + _MOST * (now - self._began)
            why = f"to note it takes {self._spent / self._taken * 1e3:.2g} ms after each step" if dear else ""
        except Exception as problem:  # of a tracked object, whose state_dict runs on other ranks than 0 here alone
            why = in_words(problem)
        if why:
            self.close()
            print(
                "paceline: should another rank die, the run goes on from the last checkpoint, and not from the state "
                f"of rank {collectives.rank_of()}: {why}. Look at what is given to run.track.",
                file=sys.stderr,
                flush=True,
            )

    def _take(self) -> None:
        first = self._note is None
        if self._weights is None:
            self._look_at_models()
        versions: list[tuple[Tensor, int]] = []
        copies = self._copies()
        most = _COPIED_ELEMENTS if copies is None else sys.maxsize
        freeze = partial(_frozen, versions=versions, most=most)
        former = {} if self._note is None else self._note.buffers
        self._note = _Note(
            step=self._steps(),
            counts=self._position.counts(),
            parts=freeze(self._state.parts_beside_models(self._position.counters(), streams=[])),
            options=[[_options_of(group) for group in one.param_groups] for one in self._optimizers],
            # By its module each time: `self.mean = ...` puts another tensor there.
            buffers=_copied({name: getattr(module, own) for module, own, name in self._buffers}, former),
            copies=copies,
            versions=versions,
            weights=self._known_by(),
        )
        self._taken += 1
        if first:
            tell_launcher(os.environ, KEEPS)

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
        self._copying = self._copying and sum(weight.nbytes for weight in self._weights) <= _MOST_COPIED
        self._buffers = [
            (module, name, f"{number}/{path}{'.' if path else ''}{name}")
            for number, model in enumerate(self._models)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, _ in module.named_buffers(recurse=False)
        ]

    def _copies(self) -> dict[_Key, Any] | None:
        """Of all that an update changes."""
        if not self._copying:
            return None
        began = time.perf_counter()
        found: dict[_Key, Any] = {key: weight.detach() for key, weight in self._named}
        for number, optimizer in enumerate(self._optimizers):
            for weight, state in optimizer.state.items():
                name = self._names.get(weight)
                if name is None:  # the optimizer keeps something of its own there
                    self._copying = False
                    return None
                found |= {("optimizer", number, name, what): value for what, value in state.items()}
        copies = _copied(found, (self._note.copies if self._note else None) or {})
        now = time.perf_counter()
        self._copied_seconds += now - began
        self._copying = self._copied_seconds < _FREE_SECONDS + _MOST_FOR_COPIES * (now - self._began)
        return copies

    def _known_by(self) -> tuple[list[int], list[tuple[int, float]]]:
        """What changes when somebody writes to the weights: their versions; or, through `weight.data`, their memory or
        what is in it."""
        assert self._weights is not None
        return list(map(version_of, self._weights)), [(weight.data_ptr(), last.item()) for weight, last in self._probes]

    # --- when a rank has died

    def hand_on(self, error: BaseException) -> None:
        """The error ends this rank. If it is that another has gone, the others' next start gets this rank's state."""
        note = self._note
        if note is None:
            return
        try:
            if self._is_newest(note) and only_tells_of_a_lost_peer(map(in_words, chain_of(error))):
                self._write(note)
        except Exception as problem:  # whatever it is, the user must see `error`
            why = str(problem) if isinstance(problem, CheckpointError) else in_words(problem)
            print(f"paceline: the state after step {note.step} is not handed on: {why}", file=sys.stderr, flush=True)
        finally:
            self.close()

    def _is_newest(self, note: _Note) -> bool:
        """Whether the state is still that of the note, and newer than that with which the run began."""
        return (
            self._restored is not None
            and note.step > self._restored
            and self._weights is not None  # run.prepare was not called since
            and (note.copies is not None or self._is_untouched(note))
            and all(version_of(tensor) == version for tensor, version in note.versions)
            and self._can()
        )

    def _is_untouched(self, note: _Note) -> bool:
        """Whether weights and optimizers are still as they were."""
        return self._position.counts() == note.counts and self._known_by() == note.weights

    def _write(self, note: _Note) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            os.close(os.open(self._folder / f"taken-{start}-{note.step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another rank of this machine writes the same
        for step, path in _kept(self._folder):
            if step < note.step - 1:  # not that of a rank that is a step behind, and writes now
                shutil.rmtree(path, ignore_errors=True)
        tell_launcher(os.environ, KEEPS, WRITING)
        own = self._strategy.own_state()
        assert own is not None
        for number, state in enumerate(own["models"]):
            named = {name: f"{number}/{name}" for name in state}
            state.update({name: note.buffers[key] for name, key in named.items() if key in note.buffers})
            if note.copies is not None:
                copies = {name: ("model", number, name, "") for name in state}
                state.update({name: note.copies[key] for name, key in copies.items() if key in note.copies})
        for number, (state, groups) in enumerate(zip(own["optimizers"], note.options, strict=True)):
            if note.copies is not None:
                state["state"] = note.copied(number)
            for group, options in zip(state["groups"], groups, strict=True):
                group.update(options)
        meta = {"world_size": collectives.size_of(), "torch": str(torch.__version__)}
        checkpoint.write(self._folder, step=note.step, parts=with_models(own, note.parts), meta=meta)

    # --- at the next start

    def find(self) -> checkpoint.WholeCheckpoint | None:
        """What was handed on to this machine, the newest that is whole. None after the script's first restore, which
        alone begins where the run was, and where nothing was handed on."""
        if self._restored is not None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        for _, path in _kept(self._folder):
            with contextlib.suppress(CheckpointError):
                return checkpoint.find(path)
        return None


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's options for a group of parameters. A learning rate may be a tensor, which a scheduler fills."""
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    del options["params"]
    return options


def _kept(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, with their steps, the newest first."""
    paths = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(((int(path.name.split("-")[1]), path) for path in paths), reverse=True)


def _stop_keeping() -> None:
    """The launcher need not wait for this rank any more."""
    take_back(os.environ, KEEPS)


@torch.no_grad()
def _copied(found: Mapping[Any, Any], former: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of each value, by its key. former: the last copies, whose memory is used again."""
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
    """A copy that later steps do not change. A tensor of more than `most` elements is shared, and put into `versions`
    with its own."""
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
