"""Batch norm in one process that computes the examples of several ranks: each rank's examples are normalised alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.observe.patching import Patches
from paceline.torch_private.core import BatchNormBase


def norm_of_each_rank(patches: Patches, sizes: Callable[[], Sequence[int]]) -> None:
    """Make torch's batch norms normalise the examples of each rank separately, as DistributedDataParallel does.

    The running statistics become those of the first rank, which DistributedDataParallel broadcasts.

    Args:
        sizes: returns the number of examples of each rank in the current batch, in order.
    """

    def wrap(original: Any) -> Any:
        def forward(module: Any, x: Tensor) -> Tensor:
            rows = sizes()
            if not module.training or len(rows) < 2 or x.shape[0] != sum(rows):
                result: Tensor = original(module, x)
                return result
            first, *rest = x.split(list(rows))
            found = [original(module, first)]
            kept = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
            found += [original(module, part) for part in rest]
            for name, buffer in module.named_buffers(recurse=False):
                buffer.data.copy_(kept[name])  # `.data` has its own version: a graph may hold the buffer
            return torch.cat(found)

        return forward

    patches.wrap(BatchNormBase, "forward", wrap)
