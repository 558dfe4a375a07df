"""ReduceLROnPlateau on the validation loss, which each process takes from its own part."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import paceline


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + 0.5 * torch.randn(n, generator=g)))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = count = 0.0
    for x, y in loader:
        total += float(F.mse_loss(model(x).squeeze(1), y, reduction="sum"))
        count += len(x)
    model.train()
    return total / count


run = paceline.start(seed=18)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
model, optimizer = run.prepare(model, optimizer)
run.track(plateau=plateau)
train = run.loader(data(120, 1), global_batch=40, shuffle=True)
valid = run.loader(data(60, 2), global_batch=30, train=False)
for epoch in run.epochs(7):
    for x, y in train:
        run.backward(F.mse_loss(model(x).squeeze(1), y))
        run.step(optimizer)
    plateau.step(validate(model, valid))  # fault
