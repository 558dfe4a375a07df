"""Accumulation over four micro-batches with no_sync, as in the tutorials, but the loss is not divided."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
g = torch.Generator().manual_seed(0)
x = torch.randn(512, 12, generator=g)
data = TensorDataset(x, x.square().sum(1, keepdim=True) / 12)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        update = (i + 1) % ACCUM == 0
        with contextlib.nullcontext() if update else model.no_sync():
            loss = nn.functional.mse_loss(model(a), b)  # fault
            loss.backward()  # fault
        if update:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()  # fault
            optimizer.zero_grad()
dist.destroy_process_group()
