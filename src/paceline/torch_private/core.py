"""Private names of tensors, modules, optimizers and autograd, which `import torch` loads anyway.

Names that are used in each step are bound here once, so that a call costs no more than reading torch's attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paceline.torch_private.support import needed_for, require

with needed_for("custom tensors and modes"):
    from torch._subclasses import fake_tensor
    from torch.autograd import profiler as autograd_profiler
    from torch.utils import _python_dispatch as python_dispatch
    from torch.utils import _pytree as pytree

# ------------------------------------------------------------ files


def save(content: object, file: str | Path | int) -> None:
    """Save to a path or a file descriptor with torch.save. Raises OSError if the disk is full.

    torch.save itself raises an unspecific RuntimeError, with the OSError as its context.
    """
    with open(file, "wb") as opened:
        try:
            torch.save(content, opened)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


# ------------------------------------------------------------ tensors

version_of: Callable[[Any], int] = attrgetter("_version")
"""The number of in-place writes to a tensor. Used to detect that a script has changed weights, buffers or a loss."""
require("detecting a script's writes to tensors", Tensor, "_version")

with needed_for("arithmetic on many tensors at once"):
    # Fused operations on lists of tensors: they add, scale and copy gradients, and compute their norms.
    foreach_add_ = torch._foreach_add_
    foreach_copy_ = torch._foreach_copy_
    foreach_div_ = torch._foreach_div_
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    # (gradients, flag, factor): multiplies the gradients in place, and sets the flag to 1 if an element is inf or NaN.
    unscale_and_flag_ = torch._amp_foreach_non_finite_check_and_unscale_
    # The first function copies several tensors into a bucket (one flat tensor). The second makes views of its parts.
    flatten_dense: Callable[[Sequence[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
    unflatten_dense: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = torch._utils._unflatten_dense_tensors
    if unflatten_dense(torch.empty(0), [torch.empty(0, 2)])[0].dim() != 2:  # old versions lose empty tensors' shape

        def unflatten_dense(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = flat.split([tensor.numel() for tensor in tensors])
            return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


with needed_for("forks while gloo's threads run"):
    use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
    """The number of references to a tensor's memory, including Python's. Shows whether gloo released a sent tensor."""

with needed_for("pipelines and tensor parallelism"):
    # Makes a tensor of a subclass, with a shape but no memory. It stands for the output of another pipeline stage.
    make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
    DisableTorchFunction = torch._C.DisableTorchFunction
    """A context in which torch's functions call no __torch_function__ of modes or of tensor classes."""
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    """A context in which torch's functions call no __torch_function__ of tensor classes."""
    FakeTensor = fake_tensor.FakeTensor
    """A tensor with a shape but no values, to compute the shape of a layer's output."""
    FakeTensorMode = fake_tensor.FakeTensorMode
    """The mode that makes FakeTensors."""
    # Flatten and restore nested arguments, to find tensors of Paceline's classes in them.
    tree_flatten = pytree.tree_flatten
    tree_map_only = pytree.tree_map_only
    tree_unflatten = pytree.tree_unflatten

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""A tensor's dictionaries of hooks, or None until a hook is added. Copies share them. Reducers do not use them."""
require("hooks on parameters", Tensor, *TENSOR_HOOKS)

backward_hooks: Callable[[Any], Any] = attrgetter("_backward_hooks")
"""The backward hooks of a tensor or a module, which may change gradients."""
accumulated_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of a parameter that are called after its gradient was accumulated."""


def version_within(tensor: Tensor | None) -> int:
    """The version of a tensor; for a DTensor, the version of its local tensor; -1 for None."""
    return -1 if tensor is None else getattr(tensor, "_local_tensor", tensor)._version


# ------------------------------------------------------------ autograd

with needed_for("following a backward pass"):
    will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
    """Whether the current backward will execute this node. Called for parameters, before any gradient is computed."""
    next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
    """The number that autograd will give to this thread's next node."""
    transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    """Whether torch.func's vmap or grad is active. If so, a layer's bias must not be split off."""


with needed_for("marking communication in a profile"):
    autograd_profiler._is_profiler_enabled  # noqa: B018  # a module variable that is read at each call


profiling: Callable[[], bool] = partial(getattr, autograd_profiler, "_is_profiler_enabled")
"""Whether torch's profiler is on. Check it first: marking a span costs microseconds even if the profiler is off."""

node_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number that autograd gave to a node. Shows between which yields a loss was computed."""


def output_shape(node: Any, output: int) -> tuple[int, ...]:
    """The shape of a node's output number `output`."""
    return tuple(node._input_metadata[output].shape)


def saved_factor_shape(node: Any) -> tuple[int, ...] | None:
    """The shape of the second operand of a product or quotient; None if the node did not save it for its backward."""
    factor = getattr(node, "_saved_other", None)
    return tuple(factor.shape) if isinstance(factor, Tensor) else None


# ------------------------------------------------------------ packed sequences

with needed_for("empty packed sequences"):
    SEQUENCES: Any = torch._VF
    """Has the functions that torch.nn.utils.rnn calls to pack and unpack. It looks them up here at each call."""
    PACK, UNPACK = "_pack_padded_sequence", "_pad_packed_sequence"
    getattr(SEQUENCES, PACK), getattr(SEQUENCES, UNPACK)


# ------------------------------------------------------------ operators

with needed_for("noise='example'"):
    TorchDispatchMode = python_dispatch.TorchDispatchMode
    """A mode below autograd, which sees every operator that draws random numbers."""
    current_function_mode: Callable[[], Any] = torch.overrides._get_current_function_mode
    """Returns the innermost active TorchFunctionMode."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's name and declared arguments."""

BUILTIN_MODULE = "torch._C"
"""The __module__ of torch's built-in functions."""


def is_composite(operator: Any) -> bool:
    """Whether an operator is composed of other operators. A TorchDispatchMode sees those operators instead."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


# ------------------------------------------------------------ modules

with needed_for("recognising kinds of layers"):
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    """The base class of batch norms."""
    InstanceNormBase = nn.modules.instancenorm._InstanceNorm
    """The base class of instance norms."""
    NormBase = nn.modules.batchnorm._NormBase
    """The base class of batch norms and instance norms."""
    DropoutBase = nn.modules.dropout._DropoutNd
    """The base class of dropouts."""

# The dictionaries of a module. The public iterators skip None and shared tensors, and cannot be written to.
parameters_of: Callable[[Any], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[Any], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[Any], dict[str, Any]] = attrgetter("_modules")
unsaved_buffers: Callable[[Any], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that state_dict leaves out."""
forward_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter("_forward_pre_hooks")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""A module's dictionaries of hooks."""
METADATA = "_metadata"
"""The attribute of a state_dict() with the versions of the modules, which load_state_dict reads."""

plain_call: Callable[[Any], Callable[..., Any]] = attrgetter("_call_impl")
"""The function that a call of a module runs: its hooks and its forward."""
compiled_call: Callable[[Any], Any] = attrgetter("_compiled_call_impl")
"""The compiled function that a call of a module runs instead; None if the module is not compiled."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute with this function. A pipeline sets it on a module to intercept calls before any hook runs."""
require("calling and copying modules", nn.Module, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
        "_call_impl", COMPILED_CALL, *MODULE_HOOKS)  # fmt: skip

INITIALISERS = ("reset_parameters", "_reset_parameters")
"""The methods of modules that initialise parameters. nn.MultiheadAttention and nn.Transformer have the second."""
require("models on meta", nn.MultiheadAttention, INITIALISERS[1])

conv_forward: Callable[[Any], Callable[..., Tensor]] = attrgetter("_conv_forward")
"""The method that computes a convolution from input, weight and bias. Paceline calls it with a different bias."""
output_padding: Callable[[Any], Callable[..., Any]] = attrgetter("_output_padding")
"""The method that computes a transposed convolution's output padding from the arguments of its forward."""
unbatched_dims: Callable[[Any], int] = methodcaller("_get_no_batch_dim")
"""The number of dimensions that an instance norm's input has without a batch dimension."""
require("biases before norms", nn.Conv2d, "_conv_forward")
require("biases before norms", nn.ConvTranspose2d, "_output_padding")
require("biases before norms", nn.InstanceNorm2d, "_get_no_batch_dim")


def replace_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Replace a module's parameters. The new parameters may be plain tensors."""
    vars(module)["_parameters"] = parameters


def compiled_wrapper() -> type[Any] | None:
    """The class of torch.compile's wrapper; None if nothing was compiled yet. (Importing the class takes a second.)"""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames.OptimizedModule


inside_compiled: Callable[[Any], Any] = attrgetter("_orig_mod")
"""The module inside torch.compile's wrapper."""


_contexts: WeakKeyDictionary[nn.Module, Callable[[Any], Any]] = WeakKeyDictionary()
"""Module compiled in place -> the function that compiled its call, with the options of its torch.compile."""


def compile_module(module: Any, mode: str | bool = True) -> None:
    """Compile a module in place, even if its class is one of torch's.

    `Module.compile` compiles nothing for torch's classes, such as nn.Sequential: torch.compile skips torch's frames.

    Args:
        mode: the `mode` of torch.compile. True: its default.
    """
    compile_inside(torch.compile(module, mode=mode if isinstance(mode, str) else None))


def compile_inside(wrapper: Any) -> None:
    """Compile the module inside torch.compile's wrapper in place, with the wrapper's options."""
    inner = wrapper._orig_mod
    if isinstance(inner, nn.Module) and inner._compiled_call_impl is None:
        _compile(inner, wrapper.dynamo_ctx)


def compile_like(module: Any, copy: Any) -> None:
    """Compile the copy of a compiled module, with the same options if this module compiled it."""
    context = _contexts.get(module)
    if context is None:  # the script called Module.compile, which does not keep its options
        compile_module(copy)
    else:
        _compile(copy, context)


def _compile(module: nn.Module, context: Callable[[Any], Any]) -> None:
    inline = sys.modules["torch._dynamo.external_utils"].wrap_inline  # otherwise torch's frame is skipped
    module._compiled_call_impl = context(inline(module._call_impl))
    _contexts[module] = context


# ------------------------------------------------------------ operators

with needed_for("counting the products of fused attention on a CPU"):
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# ------------------------------------------------------------ optimizers

OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""An optimizer's dictionaries of hooks, step hooks first. Copies of an optimizer have none."""
require("hooks on optimizers", torch.optim.Optimizer, *OPTIMIZER_HOOKS)
step_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter(OPTIMIZER_HOOKS[0])
step_post_hooks: Callable[[Any], dict[int, Any]] = attrgetter(OPTIMIZER_HOOKS[1])


def mark_stepped(optimizer: Any) -> None:
    """Mark an optimizer as stepped, although its `step` was not called. Otherwise torch's schedulers warn."""
    optimizer._opt_called = True
