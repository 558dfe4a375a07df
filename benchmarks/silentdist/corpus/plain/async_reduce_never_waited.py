"""Gradients are reduced by hand with async_op=True for overlap; nobody waits for the handles."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(320, 20, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            handles = []
            for p in model.parameters():
                p.grad /= world
                handles.append(dist.all_reduce(p.grad, async_op=True))  # fault
            optimizer.step()  # fault
    dist.destroy_process_group()


main()
