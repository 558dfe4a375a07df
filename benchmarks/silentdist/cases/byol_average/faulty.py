"""Keypoint regression; every few updates the online network restarts from its moving average.

torchrun --nproc-per-node 2 faulty.py
"""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

POINTS = 5


class MovingAverage:
    def __init__(self, online, decay=0.8, copy_back_every=4):
        self.online = online
        self.shadow = copy.deepcopy(online).requires_grad_(False)
        self.decay = decay
        self.copy_back_every = copy_back_every
        self.count = 0

    @torch.no_grad()
    def update(self):
        self.count += 1
        for average, current in zip(self.shadow.parameters(), self.online.parameters()):
            average.lerp_(current, 1 - self.decay)
        if self.count % self.copy_back_every == 0:
            for average, current in zip(self.shadow.parameters(), self.online.parameters()):
                current.copy_(average)


def keypoint_net():
    torch.manual_seed(33)
    return nn.Sequential(nn.Conv1d(2, 12, 5, padding=2), nn.GELU(), nn.AdaptiveAvgPool1d(6),
                         nn.Flatten(), nn.Linear(72, 2 * POINTS))


def curves(step, rank, n=12):
    g = torch.Generator().manual_seed(100 * step + rank)
    walk = torch.randn(n, 2, 40, generator=g).cumsum(-1) / 4
    return walk, walk[:, :, ::8].flatten(1)


def train(steps=12, lr=0.03):
    rank = dist.get_rank()
    net = keypoint_net()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    average = MovingAverage(net)
    for step in range(steps):
        x, y = curves(step, rank)
        optimizer.zero_grad()
        loss = (ddp(x) - y).abs().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            average.update()
            print("step", step, "mae", round(loss.item(), 4))
    return average


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
