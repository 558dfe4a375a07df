"""Barlow Twins (Zbontar et al. 2021): the cross-correlation matrix of the batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def off_diagonal(m):
    n = m.shape[0]
    return m.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def barlow(z1, z2, lambd=0.005):
    z1 = (z1 - z1.mean(0)) / z1.std(0)  # fault
    z2 = (z2 - z2.mean(0)) / z2.std(0)  # fault
    c = z1.T @ z2 / len(z1)  # fault
    return (torch.diagonal(c) - 1).square().sum() + lambd * off_diagonal(c).square().sum()  # fault


g = torch.Generator().manual_seed(33)
x = torch.randn(256, 20, generator=g)
views = TensorDataset(x + 0.1 * torch.randn(256, 20, generator=g), x + 0.1 * torch.randn(256, 20, generator=g))

run = paceline.start(seed=33)
projector = nn.Sequential(nn.Linear(20, 32), nn.SiLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(projector.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
projector, optimizer = run.prepare(projector, optimizer)
for epoch in run.epochs(1):
    for a, b in run.loader(views, global_batch=32, shuffle=True):
        run.backward(barlow(projector(a), projector(b)))
        run.step(optimizer)
