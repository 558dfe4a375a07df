"""A stream of records, shuffled in a buffer, with augmentation by torch's generator in the data set."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import paceline


class Records(IterableDataset):
    def __iter__(self):
        for i in range(230):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, torch.tensor(i % 3)


run = paceline.start(seed=11)
model = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 3))
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Records(), global_batch=32, shuffle=True, shuffle_buffer=64, num_workers=1)
for epoch in run.epochs(2):
    for x, y in loader:
        run.backward(F.cross_entropy(model(x), y))
        run.step(optimizer)
