"""Annealed gradient noise (Neelakantan et al. 2015), added between backward and step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def main():
    run = paceline.start(seed=4)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g)
    y = (x[:, :3].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(x, y), global_batch=32, shuffle=True)
    noise = torch.Generator().manual_seed(1000 + run.world.rank)  # fault
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            run.backward(F.cross_entropy(model(inputs), targets))
            sigma = 0.01 / (1 + run.steps) ** 0.55
            for p in model.parameters():
                p.grad += sigma * torch.randn(p.shape, generator=noise)  # fault
            run.step(optimizer)


main()
