"""A bias before batch norm: its gradient is zero, and exactly so.

Batch norm subtracts each channel's mean, so that a number added to a whole channel before it changes nothing, and the
gradient of the bias of the layer before it is zero. What autograd computes is the sum of the gradients that come out
of the batch norm, which is zero but for rounding. Adam divides a gradient by its own size and makes whole steps of that
rounding: other ones on another number of processes. Instance norm has the same property.

1. A layer with a bias (LAYERS) computes with a detached bias, and `_Attach` gives its output the edge to the bias that
   is in it already. The output carries a Source, which belongs to this one call of the layer.
2. A norm that is given this very tensor, and takes its statistics from it, passes it through `_Listen`, whose backward
   notes in the Source the gradient dx that the norm returned. Over all examples that the statistics are of, dx sums to
   zero in each channel.
3. `_Attach` gets the gradient g of the output, from all that used it, and returns for the bias the sum of g - dx, which
   is that of what came by other ways than through the norm. Where g is dx itself, nothing else used the output: zero.

So nothing is assumed of what else a script does with the output, the bias or their gradients. Where statistics are
those of several replicas, one replica's sum of dx is not zero, only that over all: dx is left out only where all
replicas do so (Source.agreed, which travels with the statistics).

Not under torch.compile, where gradients have no identity: what it computes is torch's own.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.torch_private.core import (
    BatchNormBase,
    InstanceNormBase,
    backward_hooks,
    conv_forward,
    forward_pre_hooks,
    output_padding,
    transforms_active,
    unbatched_dims,
    version_of,
)

_Compute = Callable[[Any, Tensor, Tensor], Tensor]


def _linear(layer: nn.Linear, x: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, layer.weight, bias)


def _convolution(layer: Any, x: Tensor, bias: Tensor) -> Tensor:
    output: Tensor = conv_forward(layer)(x, layer.weight, bias)
    return output


def _transposed(function: Callable[..., Tensor], dims: int) -> _Compute:
    def compute(layer: Any, x: Tensor, bias: Tensor) -> Tensor:
        shape = layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
        padding = output_padding(layer)(x, None, *shape)
        return function(x, layer.weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)

    return compute


LAYERS: dict[type[nn.Module], tuple[_Compute, int]] = {
    nn.Linear: (_linear, 2),
    nn.Conv1d: (_convolution, 3),
    nn.Conv2d: (_convolution, 4),
    nn.Conv3d: (_convolution, 5),
    nn.ConvTranspose1d: (_transposed(F.conv_transpose1d, 1), 3),
    nn.ConvTranspose2d: (_transposed(F.conv_transpose2d, 2), 4),
    nn.ConvTranspose3d: (_transposed(F.conv_transpose3d, 3), 5),
}
"""What adds its bias to each channel: how it computes its output from x and a bias, and how many dimensions an output
has whose channels are dimension 1. Of this very class: a subclass may do something else."""

_CHANNEL = 1
_SOURCE = "_paceline_source"  # an attribute of a layer's output
_HAD_NO_EFFECT = "_paceline_bias_had_no_effect"  # of a layer


class Source:
    """One output of a layer, until its backward.

    version: of the output; a later one says that something was written to it.
    agreed: whether all replicas that share the norm's statistics leave dx out. dx: what the norm returned.
    """

    __slots__ = ("agreed", "bias_dtype", "dx", "layer", "version")

    def __init__(self, layer: nn.Module, bias: Tensor) -> None:
        self.layer, self.bias_dtype = layer, bias.dtype
        self.version = 0
        self.agreed: bool | Tensor = False
        self.dx: Tensor | None = None

    def bias_gradient(self, g: Tensor) -> Tensor:
        """(C,) of g, the gradient of the output (n, C, ...)."""
        dx, self.dx = self.dx, None
        if dx is None or self.agreed is False:
            return self._over_channels(g)
        if g is dx and self.agreed is True:
            vars(self.layer)[_HAD_NO_EFFECT] = True
            return g.new_zeros(g.size(_CHANNEL), dtype=self.bias_dtype)
        without = self._over_channels(g - dx)
        if self.agreed is True:
            return without
        assert isinstance(self.agreed, Tensor)
        return torch.where(self.agreed, without, self._over_channels(g))

    def _over_channels(self, g: Tensor) -> Tensor:
        return g.sum([dim for dim in range(g.dim()) if dim != _CHANNEL], dtype=self.bias_dtype)


class _Attach(torch.autograd.Function):
    """The output as it is, with an edge to the bias that is in it already."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, source: Source) -> Tensor:
        ctx.source = source
        return output.detach()  # no view of it: an activation in place may follow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.source.bias_gradient(gradients[0]), None


class _Listen(torch.autograd.Function):
    """x as it is; notes the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Source) -> Tensor:
        ctx.source = source
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.source.dx = gradients[0]
        return gradients[0], None


# --- layers


class _Feeding(nn.Module):
    """What the classes of converted layers share. Every output of such a layer carries a Source, whether a norm takes
    it or not: were that known only after the first steps, a run that is resumed would round otherwise than one that
    was not stopped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has torch's own class, and can be read without Paceline."""
        state = {key: value for key, value in self.__getstate__().items() if key != _HAD_NO_EFFECT}
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), state  # type: ignore[attr-defined]


def _feeding(kind: type[Any]) -> type[nn.Module]:
    compute, dims = LAYERS[kind]

    @functools.wraps(kind.forward)
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = self.bias
        if (
            torch.compiler.is_compiling()
            or not self.training
            or args
            or kwargs
            or input.dim() != dims  # channels elsewhere
            or not input.numel()  # an empty shard, which norms may pass over
            or type(bias) not in (nn.Parameter, Tensor)  # such as a DTensor
            or not (bias.requires_grad and torch.is_grad_enabled())
            or transforms_active()
        ):
            output: Tensor = kind.forward(self, input, *args, **kwargs)
            return output
        output = compute(self, input, bias.detach())
        source = Source(self, bias)
        output = _Attach.apply(output, bias, source)
        source.version = version_of(output)
        setattr(output, _SOURCE, source)
        return output

    return type(kind.__name__, (_Feeding, kind), {"forward": forward, "__module__": kind.__module__})


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {kind: _feeding(kind) for kind in LAYERS}


# --- norms


def offered(x: Tensor) -> bool:
    """Whether a norm's input is the output of a layer, as it made it."""
    source = getattr(x, _SOURCE, None)
    return source is not None and bool(source.version == version_of(x))


def alone(x: Tensor) -> Tensor:
    """x, for a norm that computes statistics from it and no other replica's."""
    if not offered(x):
        return x
    source = getattr(x, _SOURCE)
    source.agreed = True
    heard: Tensor = _Listen.apply(x, source)
    return heard


def shared(x: Tensor, agreed: Tensor) -> Tensor:
    """x, which is offered, for a norm whose statistics are those of several replicas. agreed: (), whether all of them
    call this."""
    source = getattr(x, _SOURCE)
    source.agreed = bool(agreed) if agreed.device.type == "cpu" else agreed  # reading it would wait for an accelerator
    heard: Tensor = _Listen.apply(x, source)
    return heard


def _listen(norm: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of torch's own norms. Not where a later hook may put something between."""
    if torch.compiler.is_compiling():
        return None
    x = inputs[0]
    last = next(reversed(forward_pre_hooks(norm).values())) is _listen
    if not (last and offered(x) and _of_its_input(norm, x)) or backward_hooks(norm):
        return None
    return alone(x), *inputs[1:]


def _of_its_input(norm: Any, x: Tensor) -> bool:
    """Whether the statistics are those of the input, in each of its channels."""
    if isinstance(norm, InstanceNormBase):
        batched = x.dim() == unbatched_dims(norm) + 1
        return batched and (norm.training or not norm.track_running_stats)
    return norm.training or (norm.running_mean is None and norm.running_var is None)


def convert(model: nn.Module) -> None:
    """Lets the gradients of biases before norms be zero: layers with a bias change their class, norms get a hook. Only
    where the model has both. A second call finds nothing to do. batchnorm.py listens by itself."""
    modules = list(model.modules())
    norms: list[Any] = [module for module in modules if isinstance(module, (BatchNormBase, InstanceNormBase))]
    channels = {norm.num_features for norm in norms}
    found = False
    layer: Any
    for layer in modules:
        known = type(layer) in LAYERS and layer.bias is not None and "forward" not in vars(layer)
        if known and layer.bias.numel() in channels:
            layer.__class__ = _CLASSES[type(layer)]
        found = found or isinstance(layer, _Feeding)
    for norm in norms:
        own = type(norm).forward in (BatchNormBase.forward, InstanceNormBase.forward) and "forward" not in vars(norm)
        if found and own and _listen not in forward_pre_hooks(norm).values():
            norm.register_forward_pre_hook(_listen)


def without_effect(models: Iterable[nn.Module]) -> list[str]:
    """Names of the layers whose bias has been found to do nothing."""
    return [
        name for model in models for name, module in model.named_modules() if vars(module).get(_HAD_NO_EFFECT, False)
    ]


def note(names: Sequence[str]) -> str:
    """What to say of them, once."""
    which = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"the bias of {which} has no effect, since batch norm follows: its gradient is zero, and is kept so, where "
        "plain PyTorch has rounding there, of which Adam makes whole steps. Write bias=False."
    )
