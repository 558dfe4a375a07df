"""Splits layers that torch's tensor parallelism does not support: linear layers with a transposed weight (GPT-2's
Conv1D), layers that compute q, k and v together, and convolutions.

Such a layer computes with its local weight, a plain tensor. Its inputs and outputs are whole tensors or DTensors, as
with torch's ColwiseParallel and RowwiseParallel:

    kind     weight                    input         output
    column   split by outputs          replicated    split along the features (of a convolution, the channels)
    gather   split by outputs          replicated    gathered
    row      split by inputs           split         the sum of the parts, by an all-reduce
    qkv      each third split by       replicated    three tensors side by side (`Thirds`), each split along the
             its outputs                             features

A grouped convolution computes each group of channels from the same group of inputs. It is split by whole groups, so
column and gather split its input too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from paceline.errors import ModelError
from paceline.torch_private.core import (
    DisableTorchFunctionSubclass,
    buffers_of,
    children_of,
    make_wrapper_subclass,
    parameters_of,
    replace_parameters,
    tree_map_only,
)
from paceline.torch_private.distributed_tensor import StridedShard

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module computes x @ weight + bias, as GPT-2's Conv1D does. The class's name does not matter: the
    forward of a copy is run with fixed weights, which are the same on all processes."""
    own = parameters_of(module)
    weight, bias = own.get("weight"), own.get("bias")
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or len(own) != 2:
        return False
    if children_of(module) or buffers_of(module) or isinstance(module, nn.Linear) or isinstance(weight, DTensor):
        return False
    if weight.dim() != 2 or bias.shape != weight.shape[1:] or not weight.is_floating_point():
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        device = torch.device("cpu") if weight.is_meta else weight.device
        rows, columns = (torch.linspace(-1, 1, n, dtype=torch.float32, device=device) for n in weight.shape)
        tried = copy.copy(module)
        replace_parameters(tried, {"weight": rows[:, None] - columns, "bias": columns * 2})
        x = torch.stack([rows, rows.square() + 1])[None]
        try:
            found = type(module).forward(tried, x)
        except Exception:  # other layers may raise any exception for this input
            return False
        expected = x @ tried.weight + tried.bias  # type: ignore[operator]
        return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.allclose(found, expected))


def is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or (module is not None and is_transposed_linear(module))


def features(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer."""
    weight = parameters_of(module)["weight"]
    assert weight is not None
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def placements_of(module: nn.Module, kind: str) -> dict[str, Placement]:
    """The placement of each parameter of a layer of this kind."""
    if isinstance(module, CONVOLUTIONS):
        out, inner = 0, 1
    else:
        out, inner = (0, 1) if isinstance(module, nn.Linear) else (1, 0)
    if kind == "row":
        return {"weight": Shard(inner), "bias": Replicate()}
    if kind == "qkv":
        return {"weight": StridedShard(out, split_factor=3), "bias": StridedShard(0, split_factor=3)}
    return {"weight": Shard(out), "bias": Shard(0)}


def cut(module: nn.Module, kind: str, mesh: Any) -> None:
    """Split a layer's parameters in place, and replace its forward by one that uses the local parts."""
    for name, placement in placements_of(module, kind).items():
        parameter = parameters_of(module).get(name)
        if parameter is not None and not isinstance(parameter, DTensor):
            made = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            parameters_of(module)[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    module.forward = partial(_FORWARDS[kind], module)


def _mesh(module: Any) -> Any:
    return module.weight.device_mesh


def _compute(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, CONVOLUTIONS):
        convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        size = _mesh(module).size()
        groups = module.groups // size if module.groups > 1 else 1
        return convolve(x, weight, bias, module.stride, module.padding, module.dilation, groups)
    return F.linear(x, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def _axis(module: Any, x: Tensor) -> int:
    """The dimension of the features in a layer's input and output."""
    return x.dim() - module.weight.dim() + 1 if isinstance(module, CONVOLUTIONS) else x.dim() - 1


def _placed(x: Any, mesh: Any, placement: Placement) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    placed: DTensor = x.redistribute(placements=[placement])
    return placed


def _here(parameter: Any) -> Any:
    return None if parameter is None else parameter.to_local()


def _outputs(module: Any, x: Tensor) -> Tensor:
    """This device's part of the outputs."""
    mesh, weight = _mesh(module), _here(module.weight)
    if isinstance(module, CONVOLUTIONS) and module.groups > 1:
        given = _placed(x, mesh, Shard(_axis(module, x))).to_local()  # the channels of this device's groups
    else:
        given = _placed(x, mesh, Replicate()).to_local(grad_placements=[Partial()])
    return _compute(module, given, weight, _here(module.bias))


def _column(module: Any, x: Tensor) -> DTensor:
    return DTensor.from_local(_outputs(module, x), _mesh(module), [Shard(_axis(module, x))], run_check=False)


def _gather(module: Any, x: Tensor) -> Tensor:
    return _column(module, x).redistribute(placements=[Replicate()]).to_local()


def _row(module: Any, x: Tensor) -> Tensor:
    mesh = _mesh(module)
    given = _placed(x, mesh, Shard(_axis(module, x))).to_local()
    added = DTensor.from_local(_compute(module, given, _here(module.weight), None), mesh, [Partial()], run_check=False)
    output = added.redistribute(placements=[Replicate()]).to_local()
    bias = _here(module.bias)
    if bias is None:
        return output
    shape = [1] * output.dim()
    shape[_axis(module, x)] = -1
    return output + bias.reshape(shape)


def _qkv(module: Any, x: Tensor) -> Tensor:
    mesh = _mesh(module)
    output = _outputs(module, x)
    if not output.numel():  # no examples: return a whole tensor, connected to the graph
        return output.new_zeros((*output.shape[:-1], output.shape[-1] * mesh.size())) + output.sum()
    last = [Shard(output.dim() - 1)]
    return Thirds([DTensor.from_local(part, mesh, last, run_check=False) for part in output.chunk(3, -1)])


_FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "column": _column,
    "gather": _gather,
    "row": _row,
    "qkv": _qkv,
}


class Thirds(Tensor):
    """Three tensors of one shape, side by side in the last dimension: q, k and v of one layer.

    `split`, `chunk` and `tensor_split` into the thirds return these tensors, and a `view` that makes the thirds a
    separate dimension stacks them, without communication. Any other operation joins them first.
    """

    thirds: list[Tensor]

    @staticmethod
    def __new__(cls, thirds: list[Tensor]) -> Thirds:
        first = thirds[0]
        shape = (*first.shape[:-1], 3 * first.shape[-1])
        needed = torch.is_grad_enabled() and any(third.requires_grad for third in thirds)
        made = make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device, requires_grad=needed)
        made.thirds = thirds
        if needed:
            with DisableTorchFunctionSubclass():
                made.register_hook(_lost)
        return made

    def __init__(self, thirds: list[Tensor]) -> None:
        super().__init__()

    def joined(self) -> Tensor:
        return torch.cat(self.thirds, -1)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Thirds({self.thirds!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and type(args[0]) is cls:
            found = _split_thirds(args[0], getattr(func, "__name__", ""), args[1:], kwargs)
            if found is not None:
                return found
        if getattr(func, "__name__", "") in _FORM_QUERIES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Thirds, Thirds.joined, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Thirds, Thirds.joined, (args, kwargs or {}))
        return func(*args, **kwargs)


def _lost(gradient: Tensor) -> NoReturn:
    """A hook: raise ModelError for a gradient of the wrapper, since gradients must go to the thirds. A user's
    torch.autograd.Function causes this, since it ignores tensor subclasses."""
    raise ModelError(
        "strategy tensor: the output of a layer that computes q, k and v together is passed to a "
        "torch.autograd.Function, and its gradient would be lost. Leave the layer out of the plan, or use kind gather "
        "for it."
    )


_FORM_QUERIES = ("size", "dim", "ndimension", "numel", "__len__", "is_floating_point", "__get__", "get_device")
"""Functions that return the form of a tensor, not its values. `__get__`: shape, dtype, device, ndim."""


def _split_thirds(whole: Thirds, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that splits the tensor into its thirds; None for other calls."""
    first = whole.thirds[0]
    last, width = first.dim() - 1, first.shape[-1]
    if name in ("split", "split_with_sizes", "chunk", "tensor_split"):
        how = args[0] if args else next((value for key, value in kwargs.items() if key != "dim"), None)
        along = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        wanted = {"chunk": (3,), "tensor_split": (3,)}.get(name, (width, [width] * 3))
        how = list(how) if isinstance(how, (tuple, list, torch.Size)) else how
        return tuple(whole.thirds) if along in (-1, last) and how in wanted else None
    if name in ("view", "reshape"):
        shape = args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args
        shape = list(kwargs.get("shape", kwargs.get("size", shape)))
        if not all(isinstance(length, int) for length in shape) or shape[:last].count(-1) > 1:
            return None
        rest = shape[last:]
        if len(shape) <= last + 1 or rest[0] != 3 or -1 in rest[1:] or shape[:last] != list(first.shape[:-1]):
            return None
        return torch.stack(whole.thirds, last).view(shape)
    return None
