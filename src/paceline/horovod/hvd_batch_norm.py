"""hvd.SyncBatchNorm."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.mesh import current
from paceline.comm.replicas import ProcessReplicas
from paceline.horovod import hvd_world
from paceline.norm.batchnorm import GlobalSyncBatchNorm


class SyncBatchNorm(GlobalSyncBatchNorm):
    """Batch norm over the examples of all processes, on CPUs too; in evaluation torch's own. The statistics, and their
    gradients, are those of one process with the global batch, also where the processes have unequally many examples.

    Arguments: those of torch.nn.BatchNorm2d.
    """

    def forward(self, input: Tensor) -> Tensor:
        hvd_world.members()
        with current().computing(ProcessReplicas()):
            return super().forward(input)
