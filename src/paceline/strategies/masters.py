"""Masters: the tensors that an optimizer updates in place of a model's own parameters.

Where parameters are computed with on one device and kept on another, or kept in slices, the user's optimizer goes on
holding the user's own parameters, which scripts clip, freeze and look at; only while it updates, or its state is read
or loaded, do the masters stand in their place. Its state belongs to the masters all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_place_of(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """While it lasts, the optimizer's groups hold the masters of those parameters that have one."""
    own = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, own, strict=True):
        group["params"] = [masters.get(p, p) for p in parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, own, strict=True):
            group["params"] = parameters
