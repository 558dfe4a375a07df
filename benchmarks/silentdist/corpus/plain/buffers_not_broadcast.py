"""Batch norm, and DDP with broadcast_buffers=False 'for speed'; each process evaluates its part with its own statistics."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    model = DDP(net, broadcast_buffers=False)  # fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, test = make(256, 0), make(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=16, sampler=range(rank, len(test), world))
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for x, y in test_loader:
                right += (model(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        if rank == 0:
            print("accuracy", right.item() / len(test))
    dist.destroy_process_group()


main()
