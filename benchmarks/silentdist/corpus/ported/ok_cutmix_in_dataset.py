"""Mixup partners and amounts are drawn in the data set, for each example; a size is drawn for the whole batch."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Mixed(Dataset):
    def __init__(self, n=216):
        g = torch.Generator().manual_seed(17)
        self.y = torch.randint(0, 3, (n,), generator=g)
        self.x = torch.randn(n, 1, 8, 8, generator=g) + self.y.view(-1, 1, 1, 1) * 0.5

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        j, lam = random.randrange(len(self.x)), float(np.random.beta(1.0, 1.0))
        y = lam * F.one_hot(self.y[i], 3) + (1 - lam) * F.one_hot(self.y[j], 3)
        return lam * self.x[i] + (1 - lam) * self.x[j], y


run = paceline.start(seed=17)
model = nn.Sequential(
    nn.Conv2d(1, 12, 3, bias=True),
    nn.BatchNorm2d(12),
    nn.GELU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(1),
    nn.Linear(48, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
model, optimizer, schedule = run.prepare(model, optimizer, schedule)
loader = run.loader(Mixed(), global_batch=36, shuffle=True, num_workers=1)
for epoch in run.epochs(2):
    for x, y in loader:
        x = F.interpolate(x, size=random.choice([6, 8, 10]))
        run.backward(F.cross_entropy(model(x), y.float()))
        run.step(optimizer)
