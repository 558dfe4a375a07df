"""Runs a script of another tool in float64, in a process that the tool's own launcher has started.

    torchrun --nproc-per-node 2 tests/migrate/theirs.py FOLDER SCRIPT [ARGUMENT]...

Writes FOLDER/counts.RANK.json: for each optimizer step of this process the examples whose loss was computed for it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook


class Counts:
    """Examples of each optimizer step, by the rows that F.cross_entropy is given while gradients are recorded."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.open = 0
        self._cross_entropy = F.cross_entropy

    def install(self) -> None:
        F.cross_entropy = self.cross_entropy
        nn.functional.cross_entropy = self.cross_entropy
        register_optimizer_step_post_hook(self.stepped)

    def cross_entropy(self, outputs: Tensor, labels: Tensor, *rest: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled():
            self.open += len(labels)
        return self._cross_entropy(outputs, labels, *rest, **options)

    def stepped(self, *_: Any) -> None:
        self.steps.append(self.open)
        self.open = 0


class _Sum(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(context, gradient.contiguous())


class SyncedOnCpu(nn.BatchNorm2d):
    """What SyncBatchNorm computes; torch's own refuses tensors on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        own = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), x.new_tensor([x.numel() / x.shape[1]])])
        sums = _Sum.apply(own)
        total, squares, count = sums[: x.shape[1]], sums[x.shape[1] : -1], sums[-1]
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        unit = (x - mean[:, None, None]) * (variance + self.eps).rsqrt()[:, None, None]
        return unit * self.weight[:, None, None] + self.bias[:, None, None]

    @classmethod
    def convert(cls, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = cls
        return model


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    nn.SyncBatchNorm.convert_sync_batchnorm = SyncedOnCpu.convert
    counts = Counts()
    counts.install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    rank = os.environ.get("RANK", "0")
    Path(folder, f"counts.{rank}.json").write_text(json.dumps(counts.steps))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # not every tool ends it, and gloo's threads, when the interpreter exits under them, sometimes abort the process
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
