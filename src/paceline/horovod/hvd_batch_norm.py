"""hvd.SyncBatchNorm: batch norm over the examples of all processes."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.mesh import current, world_group
from paceline.horovod import hvd_world
from paceline.norm.batchnorm import GlobalSyncBatchNorm


class SyncBatchNorm(GlobalSyncBatchNorm):
    """Batch norm over the examples of all processes, also on CPUs. In evaluation mode it is torch's batch norm.

    The statistics and their gradients equal those of one process with the global batch, even if the processes have
    different numbers of examples. The arguments are those of torch.nn.BatchNorm2d.
    """

    def forward(self, input: Tensor) -> Tensor:
        hvd_world.members()
        with current().computing(world_group()):
            return super().forward(input)
