"""Placeholders for tensors that another process computes. They have a shape, a dtype and a device, but no values.

Each process of a pipeline runs the user's whole forward, but skips the layers of other stages. A skipped layer returns
`Placeholder` tensors. An operation on one returns a new placeholder; torch's fake tensors infer its form (shape and
dtype). An operation that needs values raises ModelError. When the value arrives from the previous stage, the
placeholder is filled, and later operations use the value.
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
"""Functions that need only the form of a tensor, not its values."""
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
"""Substrings of the names of the exceptions that torch's fake tensors raise if they cannot infer a form."""
_SELECTING = frozenset(["__getitem__", "masked_select"])
"""Functions that select elements of a tensor by the values of another tensor."""
_TENSORS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""Attributes that are tensors with values. All other attributes describe the form."""


class ValuesNeededError(ModelError):
    """An operation needs the values of a placeholder."""


class Placeholder(Tensor):
    """A tensor without values."""

    fake: Tensor  # a fake tensor of the same form
    value: Tensor | None  # the real tensor, once it has arrived
    of_parameter = False  # whether it represents a parameter of the model

    @staticmethod
    def __new__(cls, fake: Tensor) -> Placeholder:
        made: Placeholder = make_wrapper_subclass(
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
        """Set the value. Later operations use it, so gradients go to the value. But a user's torch.autograd.Function
        ignores tensor subclasses: its gradient would go to the placeholder and be lost, so a hook raises ModelError."""
        self.value = value
        if self.dtype.is_floating_point:
            with DisableTorchFunctionSubclass():
                self.register_hook(_lost)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({form(self)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs or {})


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Placeholder:
    with _fakes:
        return Placeholder(torch.empty(tuple(shape), dtype=dtype, device=device))


def form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


Listener = Callable[[Sequence["Placeholder"], Sequence["Placeholder"]], None]
"""Called with the placeholders among the inputs and the outputs of each operation."""
_listeners: list[Listener] = []


def call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function that has Placeholder arguments."""
    leaves, tree = tree_flatten((args, kwargs))
    leaves = [leaf.value if type(leaf) is Placeholder and leaf.value is not None else leaf for leaf in leaves]
    missing = [leaf for leaf in leaves if type(leaf) is Placeholder]
    args, kwargs = tree_unflatten(leaves, tree)
    if not missing:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "").partition(".")[0]  # the name of an aten operation includes its overload
    if name in _FORM or (name == "__get__" and func.__self__.__name__ not in _TENSORS):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("__repr__", "__format__", "__str__"):
        return repr(missing[0])
    if name == "__iter__":
        return iter(call(Tensor.unbind, args, {}))
    if name == "register_hook":  # the process that computes the tensor calls the hook
        return torch.utils.hooks.RemovableHandle({})
    if name in _VALUES:
        _need_values(name)
    if name == "grad":
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
        if all(type(one) is Placeholder and not one.of_parameter for one in tree_flatten(inputs)[0]):
            _need_values(name)
        _refuse(name, "differentiates with respect to a tensor of another stage (a gradient penalty)")
    changed = args[0] if args and isinstance(args[0], Tensor) and _changes(name) else kwargs.get("out")
    if isinstance(changed, Tensor) and type(changed) is not Placeholder:
        _refuse(name, "writes another stage's result into a tensor of this stage")
    own = {id(one.fake): one for one in missing}
    faked = [leaf.fake if type(leaf) is Placeholder else leaf for leaf in leaves]
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
        with torch.no_grad():  # a mask selects the same number of elements from zeros as from a placeholder
            chosen = func(torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        result = _fakes.from_tensor(chosen)
    made: list[Placeholder] = []

    def wrapped(fake: FakeTensor) -> Placeholder:
        one = own.get(id(fake))
        if one is None:
            one = Placeholder(fake)
            made.append(one)
        return one

    result = tree_map_only(FakeTensor, wrapped, result)
    for listener in _listeners:
        listener(missing, made)
    return result


def _changes(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _need_values(name: str) -> NoReturn:
    _refuse(name, "needs the values of another stage's result", ValuesNeededError)


def _refuse(name: str, what: str, kind: type[ModelError] = ModelError) -> NoReturn:
    raise kind(
        f"strategy pipeline: the model, or the closure, {what} (torch's {name}), but this stage knows only its shape. "
        "Do this inside a layer, or with the model's inputs or, in the closure, the model's output; or use "
        "strategy='ddp'."
    )


def _lost(gradient: Tensor) -> NoReturn:
    raise ModelError(
        "strategy pipeline: code between layers passes another stage's result to a torch.autograd.Function, and the "
        "gradient would be lost. Call it in a layer, or use strategy='ddp'."
    )


class PlaceholderParameters(TorchFunctionMode):
    """A context in which placeholders replace all parameters, so that the model's forward computes nothing."""

    def __init__(self, parameters: Mapping[int, Placeholder], listener: Listener) -> None:
        super().__init__()
        self._parameters, self._listener = parameters, listener

    def __enter__(self) -> PlaceholderParameters:
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
        if any(type(leaf) is Placeholder for leaf in found):
            return call(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def restoring_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    """After the block, restore the buffers that it changed."""
    saved = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value, version in saved:
            if version_of(buffer) != version:
                buffer.copy_(value)
