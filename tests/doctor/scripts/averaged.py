"""Gradients averaged by hand, batches from a function of the script's own."""

import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
draws = torch.Generator().manual_seed(100 + rank)


def get_batch():
    x = torch.randn(6, 8, generator=draws)
    return x, (x.sum(1) > 0).long()


for _ in range(24):
    inputs, labels = get_batch()
    with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), labels)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
dist.destroy_process_group()
