"""Redundancy reduction between two views; the correlation matrix is that of the batch of all processes."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_f
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, DIM, STEPS = 16, 10, 16
LAMBDA = 0.02


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, DIM, bias=False))

    def forward(self, a, b):
        z = self.projector(self.backbone(torch.cat([a, b])))
        return z.chunk(2)


def standardise(z, rows):
    mean = dist_f.all_reduce(z.sum(0)) / rows
    centred = z - mean
    return centred / (dist_f.all_reduce(centred.square().sum(0)) / rows + 1e-4).sqrt()


def twin_loss(za, zb):
    rows = len(za) * dist.get_world_size()
    c = dist_f.all_reduce(standardise(za, rows).T @ standardise(zb, rows)) / rows
    diagonal = torch.diagonal(c)
    off = c.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + LAMBDA * off


def views(step, rank):
    g = torch.Generator().manual_seed(2000 + 13 * step + rank)
    x = torch.randn(BATCH, 20, generator=g)
    return x + 0.2 * torch.randn(BATCH, 20, generator=g), x + 0.2 * torch.randn(BATCH, 20, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(Twins())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        loss = twin_loss(*model(*views(step, rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
