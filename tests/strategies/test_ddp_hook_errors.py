"""What fails while buckets are reduced is raised by the backward as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.strategies.replicated.ddp_hook import Reduction
from paceline.world import World

LOST = "connection closed by peer: rank 1 on this machine is lost"


class Breaks:
    """Sums over processes of which one goes, at a bucket that the test chooses."""

    def __init__(self) -> None:
        self.left: int | None = None  # buckets until it goes

    def add(self, flat: Tensor) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ConnectionError(LOST)

    def close(self) -> None:
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_lost_peer_is_raised_by_the_backward_and_not_as_a_failed_cast(bucket: int) -> None:
    world = World(0, 1, 0, 1, 0, 1, "alone")
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    sums = Breaks()
    reduction = Reduction(None, sums, None, world, torch.device("cpu"))  # type: ignore[arg-type]  # stand-ins
    model.register_comm_hook(None, lambda state, bucket: reduction.start(bucket))
    model(torch.ones(2, 64)).sum().backward()  # after it DDP has a bucket for each layer
    sums.left = bucket
    with pytest.raises(ConnectionError, match=LOST):
        model(torch.ones(2, 64)).sum().backward()
    assert sums.left == -1, "no other bucket was sent to it"
    reduction.close()
