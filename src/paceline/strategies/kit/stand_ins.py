"""Stand-ins for a module's tensors, while a function of the module initialises them.

A stand-in has the shape of the whole tensor, and no memory. There are two kinds of functions:

- A function of CONSTANT or DRAWS overwrites all values, each independently of its place. It is noted, and applied
  later, to some rows at a time (`_Written`). A process makes the rows that it has a part of. The generator is seeded
  by the tensor's name and the first row, so the rows do not depend on who makes them.
- Before any other function, a whole tensor in host memory takes the stand-in's place, with the values so far. So a
  process holds the whole tensors that one call has touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from paceline.comm import dtensor
from paceline.comm.slices import write_part, write_rows
from paceline.data.randomness import mix, tag
from paceline.torch_private.core import TorchDispatchMode, buffers_of, parameters_of, tree_map_only, version_within

ROWS = 2**20
"""Number of elements that are made at a time, in whole rows. Another number gives other draws."""

CONSTANT: set[Any] = {Tensor.fill_, Tensor.zero_, init.constant_, init.ones_, init.zeros_}
"""Functions that give all elements one value."""

DRAWS: set[Any] = {Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.trunc_normal_}
"""Functions that draw each element from one distribution."""

SCALED_DRAWS: set[Any] = {
    init.kaiming_uniform_,
    init.kaiming_normal_,
    init.xavier_uniform_,
    init.xavier_normal_,
}
"""Functions that compute a distribution from the shape, and then draw each element from it."""

_FORMS: set[Any] = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
}
"""Functions that read no values."""

_ALIASES: set[Any] = {Tensor.data.__get__, Tensor.detach}  # type: ignore[attr-defined]

_Call = Callable[[Tensor], object]
"""Writes all values of a tensor."""


def clear(tensor: Tensor) -> None:
    """Write NaN, or 0 to integers: a tensor that nothing fills must not have random values."""
    tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)


@contextmanager
def stand_ins(module: nn.Module, key: int, empty: Collection[Tensor]) -> Iterator[dict[Tensor, Callable[[], None]]]:
    """Within the block, a module's tensors are stand-ins. Yields a dict that is filled at the end: for each tensor that
    the block has written, a function that writes this process's part.

    key: of the draws. empty: tensors without values, which are not gathered.
    """
    places = [
        (kind, name, tensor, f"{prefix}.{name}")
        for prefix, one in module.named_modules()
        for kind in (parameters_of(one), buffers_of(one))
        for name, tensor in kind.items()
        if tensor is not None
    ]
    made: dict[Tensor, _StandIn] = {}
    for _, _, tensor, path in places:
        if tensor not in made:
            made[tensor] = _StandIn(tensor, mix(key, tag(path)), tensor in empty)
    for kind, name, tensor, _ in places:
        kind[name] = made[tensor].meta
    found: dict[Tensor, Callable[[], None]] = {}
    assigned: dict[Tensor, Tensor] = {}
    try:
        with _Touching(made.values()):
            yield found
    finally:
        for kind, name, tensor, _ in places:
            now = kind.get(name)
            if now is not None and now is not made[tensor].meta and now.shape == tensor.shape:
                assigned[tensor] = now  # module.weight = nn.Parameter(...)
            kind[name] = tensor
    found.update((tensor, one.write) for tensor, one in made.items() if one.is_written())
    found.update((tensor, partial(write_part, tensor, whole)) for tensor, whole in assigned.items())


class _StandIn:
    """The stand-in of one tensor of the model.

    Attributes:
        meta: the whole tensor on "meta".
    """

    def __init__(self, tensor: Tensor, key: int, is_empty: bool) -> None:
        self._tensor, self._key, self._is_empty = tensor, key, is_empty
        self.meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            self.meta = nn.Parameter(self.meta, tensor.requires_grad)
        self._call: _Call | None = None  # the last one that has been noted
        self._whole: Tensor | None = None  # in host memory
        self._version = 0  # of that tensor, at the beginning

    def note(self, call: _Call) -> bool:
        """Note a call, instead of those before. Returns False if a whole tensor has taken the place."""
        if self._whole is not None:
            return False
        self._call = call
        return True

    def whole(self) -> Tensor:
        """The whole tensor in host memory, with the values so far."""
        if self._whole is None:
            if self._call is None and not self._is_empty:
                whole = dtensor.whole(self._tensor).detach().to("cpu", copy=True)
            else:
                whole = torch.empty(self.meta.shape, dtype=self.meta.dtype, device="cpu")
                clear(whole)
            self._version = version_within(whole)
            if self._call is not None:
                state = torch.default_generator.get_state()
                self._write_rows(whole, self._call)
                torch.default_generator.set_state(state)
            is_parameter = isinstance(self.meta, nn.Parameter)
            self._whole = nn.Parameter(whole, self.meta.requires_grad) if is_parameter else whole
        return self._whole

    def is_written(self) -> bool:
        if self._whole is None:
            return self._call is not None
        return version_within(self._whole) != self._version

    def write(self) -> None:
        """Write this process's part of the values."""
        if self._whole is not None:
            write_part(self._tensor, self._whole)
        elif self._call is not None:
            self._write_rows(self._tensor, self._call)

    def _write_rows(self, target: Tensor, call: _Call) -> None:
        shape = self.meta.shape or (1,)
        count = max(1, ROWS // max(1, self.meta.numel() // max(1, shape[0])))
        for first in range(0, shape[0], count):
            part = (min(count, shape[0] - first), *shape[1:]) if self.meta.dim() else ()
            if self.meta.dim():
                write_rows(target, first, part[0], partial(self._made, call, part, first))
            else:
                write_part(target, self._made(call, part, first))

    def _made(self, call: _Call, shape: tuple[int, ...], first: int) -> Tensor:
        rows = torch.empty(shape, dtype=self.meta.dtype, device="cpu")
        torch.default_generator.manual_seed(mix(self._key, first))
        call(rows)
        return rows


class _Touching(TorchFunctionMode):
    """Notes functions that stand-ins can wait for, and passes whole tensors to all others."""

    def __init__(self, stand_ins: Collection[_StandIn]) -> None:
        super().__init__()
        self._of = {one.meta: one for one in stand_ins}  # also of `x.data` and `x.detach()`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORMS:
            return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("tensor")
        if isinstance(first, Tensor) and first in self._of:
            if func in _ALIASES:
                alias = torch.empty_like(first, requires_grad=False)
                self._of[alias] = self._of[first]
                return alias
            if (call := _to_note(func, first, args[1:], kwargs)) is not None and self._of[first].note(call):
                return first
        args, kwargs = tree_map_only(Tensor, self._real, (args, kwargs))
        return func(*args, **kwargs)

    def _real(self, tensor: Tensor) -> Tensor:
        if tensor not in self._of:
            return tensor
        whole = self._of[tensor].whole()
        return whole if tensor is self._of[tensor].meta else whole.detach()


def _to_note(func: Any, stand_in: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """The call that a stand-in can wait for; None if it cannot, or if a given generator draws."""
    others = {name: value for name, value in kwargs.items() if name != "tensor"}
    if any(isinstance(value, (Tensor, torch.Generator)) for value in (*args, *others.values())):
        return None
    if func in CONSTANT or func in DRAWS:
        return lambda rows: func(rows, *args, **others)
    if func in SCALED_DRAWS:
        with _LastWrite() as seen:
            func(stand_in, *args, **others)
        return seen.call
    return None


class _LastWrite(TorchDispatchMode):
    """Sees which operator writes a tensor on "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.call: _Call | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::uniform_", "aten::normal_"):
            self.call = lambda rows: func(rows, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
