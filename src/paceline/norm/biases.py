"""Sets the gradient of a bias before batch norm to exactly zero.

Batch norm subtracts each channel's mean, so adding a number to a whole channel before the norm changes nothing: the
gradient of such a bias is zero. Autograd computes it as the sum of the gradients that the norm returns, which is zero
up to rounding. Adam divides a gradient by its magnitude, so it turns this rounding noise into full steps, which differ
with the number of processes. Instance norm has the same property.

1. A layer with a bias (LAYERS) computes its output from a detached bias. `_Attach` adds the edge from the output to the
   bias. Each call of the layer attaches a BiasedOutput to its output.
2. A norm that computes statistics from this unchanged output passes it through `_Listen`. The backward of `_Listen`
   records the gradient dx that the norm returns. Summed over all examples of the statistics, dx is zero in each
   channel.
3. The backward of `_Attach` gets the gradient g of the output, summed over all its uses. It returns the sum of g - dx
   as the gradient of the bias: the contribution of all uses except the norm. If g is dx itself, the norm is the only
   use, and the gradient is exactly zero.

The script may use the output, the bias and their gradients in any other way. With statistics over several replicas,
only the sum of dx over all of them is zero. So dx is left out only if all replicas leave it out (BiasedOutput.agreed,
which is exchanged with the statistics).

Under torch.compile, g cannot be compared with dx by identity, so torch's gradient is kept.
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
"""Layers that add their bias to each channel. For each, a function that computes its output from (layer, x, bias), and
the number of dimensions of an output with its channels in dimension 1. Subclasses may compute something else, so they
are not converted."""

_CHANNEL = 1
_BIASED_OUTPUT = "_paceline_biased_output"  # an attribute of a layer's output
_HAD_NO_EFFECT = "_paceline_bias_had_no_effect"  # an attribute of a layer


class BiasedOutput:
    """A record of one output of a converted layer, until its backward."""

    __slots__ = ("agreed", "bias_dtype", "dx", "layer", "version")

    def __init__(self, layer: nn.Module, bias: Tensor) -> None:
        self.layer, self.bias_dtype = layer, bias.dtype
        self.version = 0  # version of the output; an in-place change increases it
        self.agreed: bool | Tensor = False  # do all replicas that share the norm's statistics leave dx out?
        self.dx: Tensor | None = None  # the gradient that the norm returned

    def bias_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient of the bias, (C,), from the gradient g of the output, (n, C, ...)."""
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
    """Returns the output unchanged, with an autograd edge to its bias."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, noted: BiasedOutput) -> Tensor:
        ctx.noted = noted
        return output.detach()  # an in-place activation may follow, which torch does not allow on a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.noted.bias_gradient(gradients[0]), None


class _Listen(torch.autograd.Function):
    """Returns x unchanged. The backward records the gradient that the norm returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: BiasedOutput) -> Tensor:
        ctx.noted = noted
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.noted.dx = gradients[0]
        return gradients[0], None


# --- layers


class _Converted(nn.Module):
    """The base class of converted layers. Each output gets a BiasedOutput, even if no norm follows. If this depended on
    earlier steps, a resumed run would round differently from an uninterrupted run."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer as torch's class, so that the pickle can be read without Paceline."""
        state = {key: value for key, value in self.__getstate__().items() if key != _HAD_NO_EFFECT}
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), state  # type: ignore[attr-defined]


def _converted(kind: type[Any]) -> type[nn.Module]:
    """Create the converted class for a class of layers."""
    compute, dims = LAYERS[kind]

    @functools.wraps(kind.forward)
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = self.bias
        if (
            torch.compiler.is_compiling()
            or not self.training
            or args
            or kwargs
            or input.dim() != dims  # channels are in another dimension
            or not input.numel()  # an empty shard, which norms may skip
            or type(bias) not in (nn.Parameter, Tensor)  # such as a DTensor
            or not (bias.requires_grad and torch.is_grad_enabled())
            or transforms_active()
        ):
            output: Tensor = kind.forward(self, input, *args, **kwargs)
            return output
        output = compute(self, input, bias.detach())
        noted = BiasedOutput(self, bias)
        output = _Attach.apply(output, bias, noted)
        noted.version = version_of(output)
        setattr(output, _BIASED_OUTPUT, noted)
        return output

    return type(kind.__name__, (_Converted, kind), {"forward": forward, "__module__": kind.__module__})


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {kind: _converted(kind) for kind in LAYERS}


# --- norms


def is_biased_output(x: Tensor) -> bool:
    """Whether x is the unchanged output of a converted layer."""
    noted = getattr(x, _BIASED_OUTPUT, None)
    return noted is not None and bool(noted.version == version_of(x))


def listen(x: Tensor, agreed: bool | Tensor = True) -> Tensor:
    """Pass x, the input of a norm, through `_Listen` if it is the output of a converted layer. Returns x otherwise.

    The norm must compute its statistics from x. agreed: (), do all replicas that share the statistics listen?
    """
    if not is_biased_output(x):
        return x
    if isinstance(agreed, Tensor) and agreed.device.type == "cpu":  # on an accelerator, reading would wait
        agreed = bool(agreed)
    noted = getattr(x, _BIASED_OUTPUT)
    noted.agreed = agreed
    heard: Tensor = _Listen.apply(x, noted)
    return heard


def _listen(norm: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of torch's norms, which calls `listen`. Does nothing if a later hook may change the input."""
    if torch.compiler.is_compiling():
        return None
    x = inputs[0]
    last = next(reversed(forward_pre_hooks(norm).values())) is _listen
    if not (last and is_biased_output(x) and _uses_batch_statistics(norm, x)) or backward_hooks(norm):
        return None
    return listen(x), *inputs[1:]


def _uses_batch_statistics(norm: Any, x: Tensor) -> bool:
    """Whether the norm computes its statistics from the input, for each of its channels."""
    if isinstance(norm, InstanceNormBase):
        batched = x.dim() == unbatched_dims(norm) + 1
        return batched and (norm.training or not norm.track_running_stats)
    return norm.training or (norm.running_mean is None and norm.running_var is None)


def convert(model: nn.Module) -> None:
    """Make a model compute zero gradients for biases before norms.

    If the model has norms and layers with a bias, these layers change their class, and the norms get a hook. The norms
    of batchnorm.py call `listen` themselves. A second call changes nothing.
    """
    modules = list(model.modules())
    norms: list[Any] = [module for module in modules if isinstance(module, (BatchNormBase, InstanceNormBase))]
    channels = {norm.num_features for norm in norms}
    found = False
    layer: Any
    for layer in modules:
        known = type(layer) in LAYERS and layer.bias is not None and "forward" not in vars(layer)
        if known and layer.bias.numel() in channels:
            layer.__class__ = _CLASSES[type(layer)]
        found = found or isinstance(layer, _Converted)
    for norm in norms:
        plain = type(norm).forward in (BatchNormBase.forward, InstanceNormBase.forward) and "forward" not in vars(norm)
        if found and plain and _listen not in forward_pre_hooks(norm).values():
            norm.register_forward_pre_hook(_listen)


def without_effect(models: Iterable[nn.Module]) -> list[str]:
    """Return the names of layers with a bias that had no effect in training."""
    return [
        name for model in models for name, module in model.named_modules() if vars(module).get(_HAD_NO_EFFECT, False)
    ]


def note(names: Sequence[str]) -> str:
    """Return the message about layers with a bias that has no effect."""
    which = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"the bias of {which} has no effect, since batch norm follows. Paceline sets its gradient to zero; in plain "
        "PyTorch it is rounding noise, which Adam turns into full steps. Use bias=False."
    )
