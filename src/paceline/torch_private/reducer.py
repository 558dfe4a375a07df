"""DistributedDataParallel's C++ reducer, driven by a backward instead of by the forward of a wrapped model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed import Reducer  # type: ignore[attr-defined]  # re-exported from C++
from torch.nn.parallel import DistributedDataParallel

from paceline.torch_private.support import needed_for, require

# torch 2.13 renamed the argument. Paceline also excludes all buffers by name (`ignore`), so DDP never broadcasts them.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_RENAMED = "forward_sync_buffers" in _ARGUMENTS
NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}
"""Arguments of DistributedDataParallel: do not broadcast buffers."""

_FIRST_BUCKET_MB = 1
_DEFAULT_BUCKET_MB = 25
_WHOLE_MB = 2**20
"""torch's default bucket sizes in MB (DDP has no public names for them), and a size for a single bucket."""


def bucket_sizes(bucket_mb: float) -> dict[str, Any]:
    """Arguments of DistributedDataParallel for buckets of `bucket_mb` MB. math.inf: a single bucket.

    The first bucket has 1 MB, so that communication starts early. (If DDP is given one size, it uses this size for the
    first bucket too.)
    """
    if bucket_mb <= _FIRST_BUCKET_MB:
        return {"bucket_cap_mb": bucket_mb}
    if bucket_mb == math.inf:
        return {"bucket_cap_mb": _WHOLE_MB}
    if "bucket_cap_mb_list" in _ARGUMENTS:  # the last size applies to all further buckets
        return {"bucket_cap_mb_list": [_FIRST_BUCKET_MB, bucket_mb]}
    return {"bucket_cap_mb": None if bucket_mb == _DEFAULT_BUCKET_MB else bucket_mb}


with needed_for("strategy ddp"):
    delay_all_reduce: Callable[[Any], None] = Reducer._delay_all_reduce  # type: ignore[attr-defined]
    """Ends the first backward of a static graph, which records the graph."""
    rebuild_buckets: Callable[[Any], bool] = Reducer._rebuild_buckets
    """Assigns parameters to buckets in the order of the first gradients."""
    check_finalized: Callable[[Any], None] = Reducer._check_reducer_finalized
    """Raises RuntimeError if a gradient is missing."""
    remove_hooks: Callable[[Any], None] = Reducer._remove_autograd_hooks
    """Removes the reducer's hooks from the parameters, so that another reducer can use them."""
    # After these calls a ready gradient counts towards its bucket. The names have no underscore, but are undocumented.
    _prepare_for_forward: Callable[[Any], None] = Reducer.prepare_for_forward
    _prepare_for_backward: Callable[[Any, Any], None] = Reducer.prepare_for_backward

require("compile under strategy ddp", DistributedDataParallel, "_active_ddp_module")


def split_compiled_graphs(bucket_mb: float | None) -> None:
    """Make torch.compile split each compiled graph into one graph per bucket of `bucket_mb` MB (None: do not split).

    torch.compile also splits graphs within the forward of DistributedDataParallel. The backward of a graph returns all
    gradients at its end, so without the split no bucket is sent before the whole backward has ended.
    """
    cut = None if bucket_mb is None else SimpleNamespace(bucket_bytes_cap=int(max(bucket_mb, _FIRST_BUCKET_MB) * 2**20))
    # torch.compile reads the bucket size from the DDP module that is running its forward.
    DistributedDataParallel._active_ddp_module = cut  # type: ignore[assignment]


def arming(reducer: Any) -> tuple[Callable[[], None], ...]:
    """The calls that arm the reducer: after them a ready gradient counts towards its bucket."""
    return partial(_prepare_for_forward, reducer), partial(_prepare_for_backward, reducer, [])


def ignore(module: nn.Module, names: Sequence[str]) -> None:
    """Make DistributedDataParallel ignore these parameters and buffers.

    DDP's function for this would also mark the user's parameters.
    """
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
