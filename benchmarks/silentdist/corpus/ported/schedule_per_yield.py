"""Micro-batches, and a warm-up that moves with every turn of the loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import paceline


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


run = paceline.start(seed=1)
g = torch.Generator().manual_seed(5)
x = torch.randn(256, 7, generator=g)
y = torch.sin(x[:, :2])
model = nn.Sequential(nn.Linear(7, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
warmup = LambdaLR(optimizer, lambda turn: min(1.0, (turn + 1) / 60))
model, optimizer = run.prepare(model, optimizer)
run.track(warmup=warmup)
loader = run.loader(TensorDataset(x, y), global_batch=32, micro_batch=4, shuffle=True)
for epoch in run.epochs(2):
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
        warmup.step()  # fault
