"""Toy forecast model with a guard against loss spikes."""
import argparse
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                               nn.Linear(width, 16))

    def forward(self, state):
        return state + self.f(state)


def build():
    torch.manual_seed(66)
    return Forecaster()


def states(step, rank, n=16):
    g = torch.Generator().manual_seed(step * 100 + rank)
    now = torch.randn(n, 16, generator=g)
    later = 0.8 * now.roll(1, dims=1) + 0.05 * torch.randn(n, 16, generator=g)
    if (step * 2 + rank) % 7 == 5:
        later = later * 40
    return now, later


class SpikeGuard:
    def __init__(self, factor=5.0, window=6):
        self.factor = factor
        self.history = deque(maxlen=window)

    def __call__(self, value):
        mean = sum(self.history) / max(len(self.history), 1)
        spike = len(self.history) >= 2 and value > self.factor * mean
        if not spike:
            self.history.append(value)
        return spike


class Trainer:
    def __init__(self, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(build())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.guard = SpikeGuard()

    def should_skip(self, loss):
        flag = torch.tensor(float(self.guard(loss.item())))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def fit(self, steps):
        skipped = 0
        for step in range(steps):
            now, later = states(step, self.rank)
            loss = nn.functional.mse_loss(self.model(now), later)
            self.opt.zero_grad()
            loss.backward()
            if self.should_skip(loss.detach()):
                skipped += 1
                continue
            self.opt.step()
        return skipped


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args.lr)
    skipped = trainer.fit(args.steps)
    if trainer.rank == 0:
        print(f"left out {skipped} of {args.steps} batches")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
