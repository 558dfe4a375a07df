"""Evaluation in the middle of the epochs; the learning rate follows the global validation loss; early stopping by it."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import paceline


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x[:, 0] * x[:, 1])


run = paceline.start(seed=10)
model = nn.Sequential(nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
run.track(plateau=plateau)
train, valid = (
    run.loader(make(180, 0), global_batch=30, shuffle=True),
    run.loader(make(51, 1), global_batch=25, train=False),
)


def validation_loss():
    model.eval()
    total = seen = 0
    with torch.no_grad():
        for x, y in valid:
            total += float(F.mse_loss(model(x).squeeze(1), y, reduction="sum"))
            seen += len(x)
    model.train()
    return run.ratio(total, seen)


best, bad = float("inf"), 0
for epoch in run.epochs(4):
    for x, y in train:
        run.backward(F.mse_loss(model(x).squeeze(1), y))
        if run.step(optimizer) and run.steps % 3 == 0:
            loss = validation_loss()
            plateau.step(loss)
            best, bad = (loss, 0) if loss < best else (best, bad + 1)
    if bad > 6:
        break
