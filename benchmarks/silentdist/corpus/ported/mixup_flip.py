"""Mixup as timm does it: the batch is mixed with itself reversed."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def mixup(x, y, classes, lam):
    y = F.one_hot(y, classes).float()
    x = x * lam + x.flip(0) * (1 - lam)  # fault
    y = y * lam + y.flip(0) * (1 - lam)  # fault
    return x, y


def make_data():
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(5, 20, generator=g) * 2
    y = torch.randint(0, 5, (320,), generator=g)
    return TensorDataset(centers[y] + torch.randn(320, 20, generator=g), y)


run = paceline.start(seed=1)
rng = np.random.default_rng(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
model, optimizer = run.prepare(model, optimizer)
train = run.loader(make_data(), global_batch=40, shuffle=True)
for epoch in run.epochs(2):
    for x, y in train:
        lam = float(rng.beta(0.4, 0.4))
        x, y = mixup(x, y, 5, lam)
        loss = -(y * F.log_softmax(model(x), 1)).sum(1).mean()
        run.backward(loss)
        run.step(optimizer)
