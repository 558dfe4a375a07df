"""A gradient that is not finite on one process of several that hold parts of a model, on 2 processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from paceline.comm.mesh import world_group
from paceline.strategies.gradient_store import GradientStore


@pytest.mark.ranks(2)
def test_all_processes_find_what_one_has() -> None:
    store = GradientStore(model_parallel=world_group())
    for flag in (torch.zeros(()), None):  # as on a CPU, as on an accelerator
        for value in (math.nan, math.inf):
            for bad in range(dist.get_world_size()):
                p = torch.ones(3, requires_grad=True)
                p.grad = torch.full((3,), value if dist.get_rank() == bad else 1.0)
                places = [p] if value == value or dist.get_rank() == bad else []  # one may have no gradient at all
                assert store.found_inf(places, torch.device("cpu"), flag).item() != 0.0, (flag, value, bad)
                if flag is not None:
                    flag.zero_()
        assert store.found_inf([], torch.device("cpu"), flag).item() == 0.0
