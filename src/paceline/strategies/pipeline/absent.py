"""Absent tensors stand for what another process computes: they have a shape, a dtype and a device, and no values.

A process of a pipeline runs the user's whole forward, without computing the layers of other stages. Such a layer
returns `Absent` tensors. An operation on one returns an Absent too, whose form torch's fake tensors infer; an operation
that needs values is refused. When the value arrives from the stage before, the Absent is filled, and from then on
operations use the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.torch_private.core import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    make_wrapper_subclass,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    version_of,
)

_fakes = FakeTensorMode(allow_non_fake_inputs=True)

_FORM = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "__len__",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "element_size",
        "get_device",
        "requires_grad_",
        "retain_grad",
        "is_same_size",
        "type",
        "__hash__",
    ]
)
"""Functions that return the form of a tensor, or change no values."""
_VALUES = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__complex__",
        "__contains__",
        "item",
        "tolist",
        "numpy",
        "backward",
        "equal",
        "allclose",
        "is_nonzero",
        "data_ptr",
        "storage",
        "untyped_storage",
    ]
)
"""Functions that need a tensor's values."""
_IN_PLACE = frozenset(
    [
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__idiv__",
        "__itruediv__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
    ]
)
_BY_VALUES = ("DataDependent", "DynamicOutputShape", "UnsupportedOperator")
"""In the names of the exceptions with which torch's fake tensors say that they cannot infer a form."""
_SELECTING = frozenset(["__getitem__", "masked_select"])
"""Functions that select from a tensor by the values of another."""
_TENSORS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""Attributes that are tensors with its values; all others are about the form."""


class ValuesNeededError(ModelError):
    """An operation needs the values of an absent tensor."""


class Absent(Tensor):
    """A tensor without values."""

    fake: Tensor  # a fake tensor of its form
    value: Tensor | None  # what it stands for, once that has arrived
    of_parameter = False  # whether it stands for a parameter of the model

    @staticmethod
    def __new__(cls, fake: Tensor) -> Absent:
        made: Absent = make_wrapper_subclass(
            cls,
            fake.shape,
            strides=fake.stride(),
            dtype=fake.dtype,
            device=fake.device,
            requires_grad=fake.dtype.is_floating_point,
        )
        made.fake, made.value = fake, None
        return made

    def __init__(self, fake: Tensor) -> None:
        super().__init__()

    def fill(self, value: Tensor) -> None:
        """From here on it stands for this value, which gets the gradients. A gradient that comes here would be lost: a
        user's torch.autograd.Function, which ignores tensor subclasses, would send one."""
        self.value = value
        if self.dtype.is_floating_point:
            with DisableTorchFunctionSubclass():
                self.register_hook(_lost)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({form(self)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs or {})


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Absent:
    with _fakes:
        return Absent(torch.empty(tuple(shape), dtype=dtype, device=device))


def form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


Listener = Callable[[Sequence["Absent"], Sequence["Absent"]], None]
"""Called with the absent inputs and the absent outputs of each operation."""
_listeners: list[Listener] = []


def call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Calls torch's function, some of whose arguments are Absent."""
    leaves, tree = tree_flatten((args, kwargs))
    leaves = [leaf.value if type(leaf) is Absent and leaf.value is not None else leaf for leaf in leaves]
    missing = [leaf for leaf in leaves if type(leaf) is Absent]
    args, kwargs = tree_unflatten(leaves, tree)
    if not missing:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "").partition(".")[0]  # an operation of aten has its overload in the name
    if name in _FORM or (name == "__get__" and func.__self__.__name__ not in _TENSORS):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("__repr__", "__format__", "__str__"):
        return repr(missing[0])
    if name == "__iter__":
        return iter(call(Tensor.unbind, args, {}))
    if name == "register_hook":  # the process that computes it calls the hook
        return torch.utils.hooks.RemovableHandle({})
    if name in _VALUES:
        _need_values(name)
    if name == "grad":
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
        if all(type(one) is Absent and not one.of_parameter for one in tree_flatten(inputs)[0]):
            _need_values(name)
        _refuse(name, "differentiates by something that another stage has (a gradient penalty)")
    changed = args[0] if args and isinstance(args[0], Tensor) and _changes(name) else kwargs.get("out")
    if isinstance(changed, Tensor) and type(changed) is not Absent:
        _refuse(name, "writes what another stage computes into a tensor of this one")
    own = {id(one.fake): one for one in missing}
    faked = [leaf.fake if type(leaf) is Absent else leaf for leaf in leaves]
    faked_args, faked_kwargs = tree_unflatten(faked, tree)
    try:
        with torch.no_grad():
            result = func(*faked_args, **faked_kwargs)
    except ModelError:
        raise
    except Exception as error:
        if not any(word in type(error).__name__ for word in _BY_VALUES):
            raise
        if name not in _SELECTING or len(missing) > 1 or not args or args[0] is not missing[0]:
            _need_values(name)
        with torch.no_grad():  # a mask that has values selects from an absent tensor: as many as from zeros
            chosen = func(torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        result = _fakes.from_tensor(chosen)
    made: list[Absent] = []

    def wrapped(fake: FakeTensor) -> Absent:
        one = own.get(id(fake))
        if one is None:
            one = Absent(fake)
            made.append(one)
        return one

    result = tree_map_only(FakeTensor, wrapped, result)
    for listener in _listeners:
        listener(missing, made)
    return result


def _changes(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _need_values(name: str) -> NoReturn:
    _refuse(name, "asks for the values of what another stage computes", ValuesNeededError)


def _refuse(name: str, what: str, kind: type[ModelError] = ModelError) -> NoReturn:
    raise kind(
        f"strategy pipeline: the model, or the closure, {what} (torch's {name}), and has only its form here. Do this "
        "inside a layer, or with the model's inputs, or in the closure with its output; or use strategy='ddp'."
    )


def _lost(gradient: Tensor) -> NoReturn:
    raise ModelError(
        "strategy pipeline: code between layers hands what another stage has computed to a torch.autograd.Function, "
        "and the gradient would be lost. Call it in a layer, or use strategy='ddp'."
    )


class AbsentParameters(TorchFunctionMode):
    """Within it every parameter counts as absent, so that nothing of the model is computed."""

    def __init__(self, parameters: Mapping[int, Absent], listener: Listener) -> None:
        super().__init__()
        self._parameters, self._listener = parameters, listener

    def __enter__(self) -> AbsentParameters:
        _listeners.append(self._listener)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _listeners.remove(self._listener)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return func(*args, **(kwargs or {}))
        found = [self._parameters.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(found, tree)
        if any(type(leaf) is Absent for leaf in found):
            return call(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def restoring_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restores the buffers that the block has written to."""
    saved = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value, version in saved:
            if version_of(buffer) != version:
                buffer.copy_(value)
