"""Stochastic depth: whole blocks are left out, drawn by a generator that each process seeds with its rank."""

import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Deep(nn.Module):
    def __init__(self, width=24, depth=5, survival=0.7):
        super().__init__()
        self.inp, self.out = nn.Linear(10, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.survival = survival
        self.rng = random.Random(100 + int(os.environ.get("RANK", "0")))  # fault

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            if not self.training:
                x = x + self.survival * block(x)
            elif self.rng.random() < self.survival:  # fault
                x = x + block(x)
            else:
                x = x + 0 * block(x)
        return self.out(x)


run = paceline.start(seed=20)
model = Deep()
opt = torch.optim.NAdam(model.parameters(), lr=2e-3)
model, opt = run.prepare(model, opt)
g = torch.Generator().manual_seed(20)
x = torch.randn(300, 10, generator=g)
loader = run.loader(TensorDataset(x, (x.sum(1) > 0).long()), global_batch=30, shuffle=True)
for epoch in run.epochs(1):
    for inputs, labels in loader:
        run.backward(F.cross_entropy(model(inputs), labels))
        run.step(opt)
