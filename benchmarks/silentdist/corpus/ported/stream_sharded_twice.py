"""An iterable data set that already gives each process its part, as one writes it for DDP."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import paceline


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        for i in range(rank, self.n, world):  # fault
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, (x.sum() > 0).long()


run = paceline.start(seed=25)
model = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Stream(256), global_batch=32)
for epoch in run.epochs(2):
    for x, y in loader:
        run.backward(F.cross_entropy(model(x), y))
        run.step(optimizer)
