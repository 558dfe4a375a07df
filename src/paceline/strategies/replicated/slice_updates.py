"""Updates this process's slices with the user's optimizer, on plain tensors instead of DTensors where possible.

A master weight (sharded_state.py) is a DTensor: it has the shape and norm of the whole parameter, for optimizers that
use them. A DTensor costs some 50 us per operation. An optimizer that updates each element independently makes the same
update on a plain tensor of this process's rows. Such optimizers (ELEMENTWISE, most of torch.optim) get the rows in
pieces, each like a separate parameter. Then each operation on a piece finds the previous result in the processor's
cache. (AdamW with defaults, on 12.5 million parameters: 27 ms instead of 101.) The state of these optimizers is in
plain tensors too, and is converted to DTensors for a checkpoint or the optimizer's `state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh
from paceline.strategies.kit.named_parameters import in_place_of

if TYPE_CHECKING:
    from paceline.strategies.kit.sharded_state import Masters

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers that update each element independently. Subclasses do not count: they may compute something else."""

_PIECE = 2**17
"""Number of elements of a piece, unless a row is longer."""


class SliceUpdates:
    """Updates this process's rows of some parameters. All ranks must add parameters in the same order."""

    def __init__(
        self, mesh: Mesh, memory: Callable[[Tensor], Tensor], gradient_rows: Callable[[Tensor], Tensor]
    ) -> None:
        """memory: parameter -> the whole tensor that an update writes to. gradient_rows: parameter -> the rows of its
        gradient that this process uses."""
        self._mesh = mesh
        self._memory, self._gradient_rows = memory, gradient_rows
        self._pieces: dict[Tensor, list[Tensor]] = {}  # parameter -> its rows here, in the master's memory
        # parameter -> (rows of its gradient, their pieces); cached, since most steps have the same tensors
        self._gradients: dict[Tensor, tuple[Tensor, list[Tensor]]] = {}
        self._closing = ExitStack()  # callbacks for `close`
        self._looked_at = False  # whether all state is in DTensors, for a checkpoint

    @cached_property
    def masters(self) -> Masters:
        """The masters of all parameters. Made on first use: loading torch's DTensor takes 40 MB and half a second."""
        from paceline.strategies.kit.pickling import PickleGuard
        from paceline.strategies.kit.sharded_state import Masters

        guard = PickleGuard("shared")
        guard.install()
        made = Masters(self._mesh, self._memory, "shared")
        self._closing.callback(guard.close)
        self._closing.callback(made.close)
        for p in self._pieces:
            made.add(p)
        return made

    def add(self, parameter: Tensor) -> None:
        if parameter not in self._pieces:
            self._pieces[parameter] = _cut(self._rows(self._memory(parameter)))
            if "masters" in vars(self):
                self.masters.add(parameter)

    def _rows(self, whole: Tensor) -> Tensor:
        """The rows that this process updates, split as in Masters. A scalar is returned whole."""
        if not whole.dim():
            return whole
        first, last = dtensor.rows_of(whole.size(0), self._mesh.shard, self._mesh.shards)
        return whole[first:last]

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the optimizer's state and, until `close`, state that a script loads into it. The optimizer's
        `state_dict` then holds DTensors."""
        if type(optimizer) not in ELEMENTWISE:
            self.masters.register(optimizer)
            return
        contexts: list[Any] = []

        def before(_: torch.optim.Optimizer) -> None:
            self._as_dtensors(optimizer)
            contexts.append(in_place_of(optimizer, self.masters.of))
            contexts[-1].__enter__()

        def after(_: torch.optim.Optimizer, __: dict[str, Any]) -> None:
            contexts.pop().__exit__(None, None, None)
            self._as_plain(optimizer)

        for hook in (
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_state_dict_post_hook(after),
            optimizer.register_load_state_dict_post_hook(self._as_plain),
        ):
            self._closing.callback(hook.remove)
        self._as_plain(optimizer)

    def close(self) -> None:
        self._closing.close()

    def update(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer's step on slices. args, kwargs: for its `step`."""
        if type(optimizer) not in ELEMENTWISE:
            self.masters.update(optimizer)
            return
        own = [group["params"] for group in optimizer.param_groups]
        updated = [p for group in own for p in group if p.grad is not None and p in self._pieces]
        for p in updated:
            if not p.dim() and p.data_ptr() != self._pieces[p][0].data_ptr():  # the script assigned p.data
                self._pieces[p] = [_with_state_of(self._pieces[p][0], p.detach(), optimizer)]
            rows = self._gradient_rows(p)
            if p not in self._gradients or self._gradients[p][0] is not rows:
                self._gradients[p] = rows, _cut(rows)
            for piece, gradient in zip(self._pieces[p], self._gradients[p][1], strict=True):
                piece.grad = gradient
        for group, parameters in zip(optimizer.param_groups, own, strict=True):
            group["params"] = [piece for p in parameters for piece in self._pieces.get(p, (p,))]
        try:
            optimizer.step(*args, **kwargs)
        finally:
            for group, parameters in zip(optimizer.param_groups, own, strict=True):
                group["params"] = parameters
            for p in updated:
                for piece in self._pieces[p]:
                    piece.grad = None

    @contextmanager
    def looked_at(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Within the block all state belongs to the masters, and sharded state is in DTensors."""
        for optimizer in optimizers:
            self._as_dtensors(optimizer)
        self._looked_at = True
        try:
            yield
        finally:
            self._looked_at = False
            for optimizer in optimizers:
                if type(optimizer) in ELEMENTWISE:
                    self._as_plain(optimizer)

    def _as_dtensors(self, optimizer: torch.optim.Optimizer) -> None:
        if self._looked_at:
            return
        for p, pieces in self._pieces.items():
            if pieces[0] in optimizer.state:
                master = self.masters.of[p]
                states: list[dict[str, Any]] = [optimizer.state.pop(piece) for piece in pieces]
                optimizer.state[master] = {
                    key: self._whole(torch.cat([state[key] for state in states]) if p.dim() else value, p, master)
                    if _is_cut(key, value, p)
                    else value
                    for key, value in states[0].items()
                }

    def _as_plain(self, optimizer: torch.optim.Optimizer) -> None:
        if self._looked_at:
            return
        masters = self.masters.of if "masters" in vars(self) else {}
        for p, pieces in self._pieces.items():
            held = next((key for key in (p, masters.get(p)) if key is not None and key in optimizer.state), None)
            if held is None or held is pieces[0]:
                continue
            values: dict[str, Any] = optimizer.state.pop(held)
            cut = {
                key: _cut(self._here(value)) if _is_cut(key, value, p) else [_own(value) for _ in pieces]
                for key, value in values.items()
            }
            for number, piece in enumerate(pieces):
                optimizer.state[piece] = {key: parts[number] for key, parts in cut.items()}

    def _here(self, value: Tensor) -> Tensor:
        """This process's rows of a tensor with a parameter's shape."""
        return dtensor.local(value) if dtensor.is_sharded(value) else self._rows(value).clone()

    def _whole(self, rows: Tensor, parameter: Tensor, master: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        made: Tensor = DTensor.from_local(
            rows,
            self.masters.mesh,
            master.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made


def _is_cut(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state value belongs to the parameter's elements, and is not a counter (sharded_state.py,
    shard_optimizer_state)."""
    return isinstance(value, Tensor) and not (not value.dim() and (parameter.dim() > 0 or key == "step"))


def _cut(rows: Tensor) -> list[Tensor]:
    """Split rows into pieces. Tensors of the same shape are split in the same way."""
    if not rows.dim():
        return [rows]
    return list(rows.split(max(1, _PIECE // max(1, rows[0].numel()) if len(rows) else 1)))


def _own(value: Any) -> Any:
    """A copy of a counter. Each piece needs a separate copy, since an update changes counters in place."""
    return dtensor.local(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _with_state_of(before: Tensor, now: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Move optimizer state from the tensor `before` to the tensor `now`. Returns `now`."""
    if before in optimizer.state:
        optimizer.state[now] = optimizer.state.pop(before)
    return now
