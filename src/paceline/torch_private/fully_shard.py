"""FSDP2's internals: the states of wrapped modules, and of the groups of parameters that are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.torch_private.support import needed_for, require

with needed_for("strategy fsdp, stages 2 and 3"):
    # Activation checkpointing: recomputes a layer's forward in the backward, including hooks such as FSDP2's.
    from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

require("strategy fsdp, stages 2 and 3", FSDPModule, "_get_fsdp_state")
require("strategy fsdp, stages 2 and 3", FSDPState, "_lazy_init", "_pre_forward", "_post_forward",
        "_root_post_backward_final_callback")  # fmt: skip
require("strategy fsdp, stages 2 and 3", FSDPParamGroup, "_to_sharded")


def state_of(module: Any) -> Any:
    """FSDP2's state of a wrapped module."""
    return module._get_fsdp_state()


def become_root(state: Any) -> None:
    """Make this module the root now, even if one of its submodules is called first."""
    state._lazy_init()


def groups_under(root: Any) -> Iterator[Any]:
    """The groups of parameters of all wrapped modules of a root."""
    for state in root._state_ctx.all_states:
        yield from _groups_of(state)


def _groups_of(state: Any) -> Iterator[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:  # earlier versions have at most one group
        yield state._fsdp_param_group


def adopt_memory(model: nn.Module) -> None:
    """Tell FSDP2 that the sharded parameters of a model have new memory, as `to_empty` does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups_of(state_of(module)):
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()


def phase(owner: Any) -> str:
    """The training phase of a state or a group: IDLE, FORWARD, PRE_BACKWARD or POST_BACKWARD."""
    name: str = owner._training_state.name
    return name


def finish_backward(root: Any) -> None:
    """Reduce the remaining gradients, and free gathered parameters, as FSDP2 does itself after a full backward."""
    context = root._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # since 2.15, if no backward has set it
        context.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()


def slice_again(group: Any) -> None:
    """Reshard a group: free its gathered parameters, even if FSDP2 would keep them."""
    group._to_sharded()


def as_forward(state: Any, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of a module as FSDP2 calls its forward: with FSDP2's pre-forward and post-forward."""
    args, kwargs = state._pre_forward(module, args, kwargs)
    return state._post_forward(module, args, method(*args, **kwargs))


def around_inputs(group: Any, around: Callable[..., tuple[Any, Any]]) -> None:
    """Replace register(args, kwargs) by around(register, args, kwargs). register passes the inputs of a layer's forward
    through an autograd.Function, whose backward reduces the group's gradients; it returns (args, kwargs)."""
    group._register_post_backward_hook = partial(around, group._register_post_backward_hook)


def gathered(parameter: Any) -> Tensor | None:
    """The gathered tensor of a sharded parameter, as it appears in graphs; None before the first forward."""
    found: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return found
