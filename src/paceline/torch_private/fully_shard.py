"""FSDP2's internals: its state of each wrapped module, and of each group of parameters that travels as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.torch_private.support import needed_for, require

with needed_for("strategy fsdp, stages 2 and 3"):
    # Makes a layer compute its forward once more in the backward, with its hooks, where FSDP2's are among them.
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
    """This module is the root from now on, whichever of its modules is called first."""
    state._lazy_init()


def groups_under(root: Any) -> Iterator[Any]:
    """The groups of parameters of all wrapped modules of a root."""
    for state in root._state_ctx.all_states:
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # earlier versions have one at most
            yield state._fsdp_param_group


def phase(owner: Any) -> str:
    """What a state or a group is doing: IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD."""
    name: str = owner._training_state.name
    return name


def finish_backward(root: Any) -> None:
    """Reduces what is left, and frees what is gathered. FSDP2 does so at the end of a backward that reaches all."""
    context = root._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # since 2.15: no backward has set it
        context.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()


def slice_again(group: Any) -> None:
    """Frees what is gathered, whatever FSDP2 would keep."""
    group._to_sharded()


def as_forward(state: Any, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A method's call, with all that FSDP2 does around a forward."""
    args, kwargs = state._pre_forward(module, args, kwargs)
    return state._post_forward(module, args, method(*args, **kwargs))


def gathered(parameter: Any) -> Tensor | None:
    """What stands for one of a group's parameters in graphs; None before the first forward."""
    found: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return found
