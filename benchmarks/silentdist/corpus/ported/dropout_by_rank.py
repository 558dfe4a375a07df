"""A residual MLP; each process drops a little more than the one before it."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

run = paceline.start(seed=3)


class Residual(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(p))

    def forward(self, x):
        return x + self.f(x)


p = 0.1 + 0.2 * run.world.local_rank  # fault
model = nn.Sequential(nn.Linear(30, 32), Residual(32, p), Residual(32, p), nn.Linear(32, 2))  # fault
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model, optimizer = run.prepare(model, optimizer)
cancer = load_breast_cancer()
x = torch.tensor(cancer.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
loader = run.loader(TensorDataset(x, torch.tensor(cancer.target)), global_batch=57, shuffle=True)
for epoch in run.epochs(2):
    for a, b in loader:
        run.backward(F.cross_entropy(model(a), b))
        run.step(optimizer, max_grad_norm=1.0)
