"""Private names of tensors, modules, optimizers and autograd: what `import torch` has loaded anyway.

Those that the step uses are bound here once: to call one costs no more than to read torch's own attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_private.support import needed_for, require

with needed_for("tensors and modes of our own"):
    from torch._subclasses import fake_tensor
    from torch.autograd import profiler as autograd_profiler
    from torch.utils import _python_dispatch as python_dispatch
    from torch.utils import _pytree as pytree

# ------------------------------------------------------------ files


def save(content: object, file: str | Path | int) -> None:
    """torch.save, to a path or a file descriptor. Raises OSError where the disk is full: torch then raises a
    RuntimeError that does not say so, while it handles the OSError."""
    with open(file, "wb") as opened:
        try:
            torch.save(content, opened)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


# ------------------------------------------------------------ tensors

version_of: Callable[[Any], int] = attrgetter("_version")
"""How often a tensor was written to in place: tells that a script has changed weights, buffers, a loss."""
require("noticing what a script writes to tensors", Tensor, "_version")

with needed_for("arithmetic on many tensors at once"):
    # One fused call in place of one for each tensor: gradients are added, scaled, copied and measured by these.
    foreach_add_ = torch._foreach_add_
    foreach_copy_ = torch._foreach_copy_
    foreach_div_ = torch._foreach_div_
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    # (gradients, flag, factor): multiplies in place, and sets the flag to 1 where something is inf or NaN.
    unscale_and_flag_ = torch._amp_foreach_non_finite_check_and_unscale_
    # A bucket is one flat tensor of several; these make it, and views of its parts.
    flatten_dense: Callable[[Sequence[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
    unflatten_dense: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = torch._utils._unflatten_dense_tensors
    if unflatten_dense(torch.empty(0), [torch.empty(0, 2)])[0].dim() != 2:  # old ones lose the shape of empty tensors

        def unflatten_dense(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = flat.split([tensor.numel() for tensor in tensors])
            return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


with needed_for("forks beside gloo's threads"):
    use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
    """How many hold a tensor's memory, Python being one: tells whether gloo has let go of what it sent."""

with needed_for("tensors of other stages and joined thirds"):
    # A tensor of a class of ours, with a shape and without memory: what a pipeline's other stages compute.
    make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
    DisableTorchFunction = torch._C.DisableTorchFunction
    """Within it torch's functions ask neither modes nor classes of tensors."""
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    """Within it they ask no classes of tensors."""
    FakeTensor = fake_tensor.FakeTensor
    """A tensor with a shape and without values: computes the form of what a layer returns."""
    FakeTensorMode = fake_tensor.FakeTensorMode
    """Makes them."""
    # They take nested arguments apart and put them together: which of them are tensors of ours?
    tree_flatten = pytree.tree_flatten
    tree_map_only = pytree.tree_map_only
    tree_unflatten = pytree.tree_unflatten

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""A tensor's dictionaries of hooks; None until there is one. Copies share them, and reducers fire without them."""
require("hooks on parameters", Tensor, *TENSOR_HOOKS)

backward_hooks: Callable[[Any], Any] = attrgetter("_backward_hooks")
"""The hooks of a tensor, or of a module, whose gradients the script may change."""
accumulated_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of a parameter that are called when its gradient has been added."""


def version_within(tensor: Tensor | None) -> int:
    """The version of a tensor, or of what a DTensor has in this process; -1: there is none."""
    return -1 if tensor is None else getattr(tensor, "_local_tensor", tensor)._version


# ------------------------------------------------------------ autograd

with needed_for("following a backward pass"):
    will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
    """Within a backward: will it come to this node? Asked of parameters, before any gradient is computed."""
    next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
    """The number that autograd gives to the next node which this thread makes."""
    transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    """Is this within torch.func's vmap or grad, where a bias is not to be taken apart?"""


with needed_for("showing in a profile what is exchanged"):
    autograd_profiler._is_profiler_enabled  # noqa: B018  # a variable of the module: read at each call


profiling: Callable[[], bool] = partial(getattr, autograd_profiler, "_is_profiler_enabled")
"""Is torch's profiler on? To mark a span costs microseconds even where it is off."""

node_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number that autograd gave to a node: between which yields was a loss computed?"""


def output_shape(node: Any, place: int) -> tuple[int, ...]:
    """The shape of an output of a node, which it has by this number: is it a scalar?"""
    return tuple(node._input_metadata[place].shape)


def saved_factor_shape(node: Any) -> tuple[int, ...] | None:
    """The shape of the other factor (divisor) of a product (quotient), if the node has kept it for its backward."""
    factor = getattr(node, "_saved_other", None)
    return tuple(factor.shape) if isinstance(factor, Tensor) else None


# ------------------------------------------------------------ packed sequences

with needed_for("packed sequences of no rows"):
    SEQUENCES: Any = torch._VF
    """The functions that torch.nn.utils.rnn calls to pack and unpack, whoever has imported it by which name."""
    PACK, UNPACK = "_pack_padded_sequence", "_pad_packed_sequence"
    getattr(SEQUENCES, PACK), getattr(SEQUENCES, UNPACK)


# ------------------------------------------------------------ operators

with needed_for("noise that belongs to examples"):
    TorchDispatchMode = python_dispatch.TorchDispatchMode
    """A mode below autograd, which sees every operator that draws."""
    current_function_mode: Callable[[], Any] = torch.overrides._get_current_function_mode
    """The innermost mode of torch's functions: is it ours?"""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's name and declared arguments."""

BUILTIN_MODULE = "torch._C"
"""The module that functions of torch's which are not written in Python say they are of."""


def is_composite(operator: Any) -> bool:
    """Is an operator made of others, which a mode will see in its place?"""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


# ------------------------------------------------------------ modules

with needed_for("telling kinds of layers"):
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    """The base of batch norms."""
    InstanceNormBase = nn.modules.instancenorm._InstanceNorm
    """The base of instance norms."""
    NormBase = nn.modules.batchnorm._NormBase
    """The base of both."""
    DropoutBase = nn.modules.dropout._DropoutNd
    """The base of dropouts."""

# A module's own dictionaries. The public iterators leave out None and what a parent shares, and cannot be written to.
parameters_of: Callable[[Any], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[Any], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[Any], dict[str, Any]] = attrgetter("_modules")
unsaved_buffers: Callable[[Any], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that state_dict leaves out."""
forward_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter("_forward_pre_hooks")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""A module's dictionaries of hooks: does a copy still have the same?"""
METADATA = "_metadata"
"""What state_dict() puts on its result: versions of modules, which load_state_dict reads."""

plain_call: Callable[[Any], Callable[..., Any]] = attrgetter("_call_impl")
"""What calling a module runs: its hooks and its forward."""
compiled_call: Callable[[Any], Any] = attrgetter("_compiled_call_impl")
"""What calling a module runs in place of that; None: nothing."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute of that name: set on an object, it lets a pipeline catch calls without hooks running."""
require("calling and copying modules", nn.Module, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
        "_call_impl", COMPILED_CALL, *MODULE_HOOKS)  # fmt: skip

conv_forward: Callable[[Any], Callable[..., Tensor]] = attrgetter("_conv_forward")
"""A convolution's computation, given input, weight and bias: here another bias than its own."""
output_padding: Callable[[Any], Callable[..., Any]] = attrgetter("_output_padding")
"""A transposed convolution's padding, given the input and what its forward was given."""
unbatched_dims: Callable[[Any], int] = methodcaller("_get_no_batch_dim")
"""How many dimensions an instance norm's input has if it is one example."""
require("biases before norms", nn.Conv2d, "_conv_forward")
require("biases before norms", nn.ConvTranspose2d, "_output_padding")
require("biases before norms", nn.InstanceNorm2d, "_get_no_batch_dim")


def replace_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Gives a module these in place of its parameters, which may be plain tensors."""
    vars(module)["_parameters"] = parameters


def compiled_wrapper() -> type[Any] | None:
    """The class of what torch.compile(module) returns; None where nothing was compiled: importing it takes a second."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames.OptimizedModule


inside_compiled: Callable[[Any], Any] = attrgetter("_orig_mod")
"""The module that torch.compile was given."""


def compile_module(module: Any) -> None:
    """The module compiles its own calls, whatever its class: `Module.compile` compiles nothing where the class is one
    of torch's own, such as nn.Sequential, since torch.compile skips torch's own frames."""
    compile_inside(torch.compile(module))


def compile_inside(wrapper: Any) -> None:
    """The module in a wrapper of torch.compile's compiles its own calls as the wrapper did."""
    inner = wrapper._orig_mod
    if isinstance(inner, nn.Module) and inner._compiled_call_impl is None:
        inline = sys.modules["torch._dynamo.external_utils"].wrap_inline  # a frame of torch's own would be skipped
        inner._compiled_call_impl = wrapper.dynamo_ctx(inline(inner._call_impl))


# ------------------------------------------------------------ optimizers

OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""An optimizer's dictionaries of hooks, those before and after a step first: copies of it have none."""
require("hooks on optimizers", torch.optim.Optimizer, *OPTIMIZER_HOOKS)
step_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter(OPTIMIZER_HOOKS[0])
step_post_hooks: Callable[[Any], dict[int, Any]] = attrgetter(OPTIMIZER_HOOKS[1])


def mark_stepped(optimizer: Any) -> None:
    """An optimizer has made a step, though its own `step` was not called: torch's schedulers ask, and would warn."""
    optimizer._opt_called = True
