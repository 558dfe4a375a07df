"""torch's C++ reducer, which DistributedDataParallel makes: driven by a backward, and not by a model's forward."""

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

# torch 2.13 renamed the argument; all buffers are ignored by name too (`ignore`), so that neither name syncs them.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_RENAMED = "forward_sync_buffers" in _ARGUMENTS
NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}
"""Arguments of DistributedDataParallel: it sends no buffers."""

_FIRST_BUCKET_MB = 1
_DEFAULT_BUCKET_MB = 25
_WHOLE_MB = 2**20
"""The sizes that torch takes where none is named: DDP's constants for them have no public names."""


def bucket_sizes(bucket_mb: float) -> dict[str, Any]:
    """Arguments of DistributedDataParallel: a bucket is full at `bucket_mb`, and the first one at 1 MB, so that
    communication starts early. Where one size is named, DDP takes it for the first bucket too. math.inf: one bucket."""
    if bucket_mb <= _FIRST_BUCKET_MB:
        return {"bucket_cap_mb": bucket_mb}
    if bucket_mb == math.inf:
        return {"bucket_cap_mb": _WHOLE_MB}
    if "bucket_cap_mb_list" in _ARGUMENTS:  # the last size is that of all further buckets
        return {"bucket_cap_mb_list": [_FIRST_BUCKET_MB, bucket_mb]}
    return {"bucket_cap_mb": None if bucket_mb == _DEFAULT_BUCKET_MB else bucket_mb}


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

require("compile under strategy ddp", DistributedDataParallel, "_active_ddp_module")


def cut_compiled_graphs(bucket_mb: float | None) -> None:
    """From here on torch.compile cuts what it compiles into one graph for each bucket of `bucket_mb` (None: leaves it
    whole), as it does within the forward of DistributedDataParallel. The backward of one graph gives all its gradients
    at its end: uncut, no bucket is sent before the whole backward has ended."""
    cut = None if bucket_mb is None else SimpleNamespace(bucket_bytes_cap=int(max(bucket_mb, _FIRST_BUCKET_MB) * 2**20))
    # torch.compile asks for the module whose forward is running, and reads the size of its buckets.
    DistributedDataParallel._active_ddp_module = cut  # type: ignore[assignment]


def arming(reducer: Any) -> tuple[Callable[[], None], ...]:
    """Calls after which a gradient that is ready counts towards its bucket."""
    return partial(_prepare_for_forward, reducer), partial(_prepare_for_backward, reducer, [])


def ignore(module: nn.Module, names: Sequence[str]) -> None:
    """DistributedDataParallel shall leave these parameters and buffers alone. (Its own function for it would also mark
    the user's parameters.)"""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
