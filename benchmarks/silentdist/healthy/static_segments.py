"""Sequence regression with activation checkpointing under DDP with a static graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

STEPS = 16
BATCH = 6
LENGTH = 16


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        h = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.out(torch.tanh(h))


class Net(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.stages = nn.ModuleList(Stage(width) for _ in range(depth))
        self.shared = Stage(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for stage in self.stages:
            h = checkpoint(stage, h, use_reentrant=False)
            h = checkpoint(self.shared, h, use_reentrant=False)  # one set of weights after every stage
        return self.out(h)


def waves(step, rank):
    g = torch.Generator().manual_seed(step * 31 + rank)
    phase = torch.rand(BATCH, 1, generator=g) * 6.28
    t = torch.linspace(0, 6.28, LENGTH)
    x = torch.stack([torch.sin(t + phase), torch.cos(2 * t + phase)], -1)
    return x, (x[..., :1] * x[..., 1:]).cumsum(1) / 8


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    model = DDP(Net(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    for step in range(STEPS):
        x, y = waves(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"{step:3d} {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
