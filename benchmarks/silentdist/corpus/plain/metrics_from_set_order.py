"""Several metrics are averaged in a loop over a set of names, whose order is another in each process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

METRICS = {"loss", "accuracy", "precision", "recall", "entropy", "margin"}


def average(values):
    result = {}
    for name in METRICS:
        tensor = values[name].clone()
        dist.all_reduce(tensor)  # fault
        result[name] = (tensor / dist.get_world_size()).item()
    return result


def measure(logits, y):
    p = logits.softmax(1)
    predicted = logits.argmax(1)
    true = ((predicted == 1) & (y == 1)).float().sum()
    return {
        "loss": nn.functional.cross_entropy(logits, y),
        "accuracy": (predicted == y).float().mean(),
        "precision": true / (predicted == 1).sum().clamp(min=1),
        "recall": true / (y == 1).sum().clamp(min=1),
        "entropy": -(p * p.log()).sum(1).mean(),
        "margin": (p[:, 1] - p[:, 0]).abs().mean(),
    }


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
g = torch.Generator().manual_seed(0)
x = torch.randn(320, 6, generator=g)
data = TensorDataset(x, (x[:, 0] > 0.5).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=20, sampler=sampler)
model = DDP(nn.Linear(6, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        logits = model(a)
        opt.zero_grad()
        nn.functional.cross_entropy(logits, b).backward()
        opt.step()
    shown = average(measure(logits.detach(), b))  # fault
    if dist.get_rank() == 0:
        print(epoch, shown)
dist.destroy_process_group()
