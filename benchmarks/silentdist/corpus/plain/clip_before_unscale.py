"""A loss scaler, and clipping of the gradients while they are still scaled."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(7 + dist.get_rank())
g = torch.Generator().manual_seed(7)
x = torch.randn(320, 10, generator=g)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=20, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(a).float(), b)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
