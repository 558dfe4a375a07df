"""A script whose model has a million parameters, and Adam: what `paceline verify` keeps of it on the disk."""

from __future__ import annotations

import torch
from torch import nn

import paceline

run = paceline.start(device="cpu")
model = nn.Sequential(nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 64))
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
data = torch.utils.data.TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
for (x,) in run.loader(data, global_batch=8):
    run.forward_backward(lambda m, b: nn.functional.mse_loss(m(b), b), model, x)
    run.step(optimizer)
