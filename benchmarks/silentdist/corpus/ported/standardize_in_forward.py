"""A network that standardizes its input by the statistics of the batch, written by hand."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Standardize(nn.Module):
    def forward(self, x):
        return (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True, unbiased=False) + 1e-5)  # fault


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Standardize(), nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


g = torch.Generator().manual_seed(99)
x = torch.randn(300, 6, generator=g) * torch.tensor([1.0, 2, 5, 10, 0.1, 3]) + 4
y = x[:, 0] - 0.3 * x[:, 1] + 0.1 * x[:, 2] * x[:, 5]

run = paceline.start()
model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
train = run.loader(TensorDataset(x, y), global_batch=50, shuffle=True)
for epoch in run.epochs(3):
    for a, b in train:
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(a), b))
        run.step(optimizer)
