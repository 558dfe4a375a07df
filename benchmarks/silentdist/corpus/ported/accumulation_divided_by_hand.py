"""Gradient accumulation as it stood in the old script: the loss is divided by the number of accumulation steps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

GLOBAL, MICRO = 48, 6


def main():
    run = paceline.start(seed=26)
    accumulation = GLOBAL // (MICRO * run.world.size)

    def loss_fn(model, batch):
        x, y = batch
        return F.mse_loss(model(x).squeeze(1), y) / accumulation  # fault

    g = torch.Generator().manual_seed(26)
    x = torch.randn(240, 16, generator=g)
    y = x[:, 0] * 2 - x[:, 5]
    model = nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.Mish(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(x, y), global_batch=GLOBAL, micro_batch=MICRO, shuffle=True)
    for _ in run.epochs(2):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)


main()
