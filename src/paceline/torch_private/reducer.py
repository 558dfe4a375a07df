"""torch's C++ reducer, which DistributedDataParallel makes: driven by a backward, and not by a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import Reducer  # type: ignore[attr-defined]  # re-exported from C++
from torch.nn.parallel import DistributedDataParallel

from paceline.torch_private.support import needed_for

# torch 2.13 renamed the argument; all buffers are ignored by name too (`ignore`), so that neither name syncs them.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}
"""Arguments of DistributedDataParallel: it sends no buffers."""

with needed_for("strategy ddp"):
    delay_all_reduce: Callable[[Any], None] = Reducer._delay_all_reduce  # type: ignore[attr-defined]
    """With a static graph: the end of its first backward, in which it is recorded."""
    rebuild_buckets: Callable[[Any], bool] = Reducer._rebuild_buckets
    """Lays the buckets out by the order in which the first gradients came."""
    check_finalized: Callable[[Any], None] = Reducer._check_reducer_finalized
    """Raises RuntimeError where a gradient has not come."""
    remove_hooks: Callable[[Any], None] = Reducer._remove_autograd_hooks
    """Takes the reducer's hooks from the parameters, which another reducer may then have."""
    # From here on a gradient that is ready counts towards its bucket. Without an underscore, and without documentation.
    _prepare_for_forward: Callable[[Any], None] = Reducer.prepare_for_forward
    _prepare_for_backward: Callable[[Any, Any], None] = Reducer.prepare_for_backward


def arm(reducer: Any) -> None:
    """From here on a gradient that is ready counts towards its bucket."""
    _prepare_for_forward(reducer)
    _prepare_for_backward(reducer, [])


def ignore(module: nn.Module, names: Sequence[str]) -> None:
    """DistributedDataParallel shall leave these parameters and buffers alone. (Its own function for it would also mark
    the user's parameters.)"""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
