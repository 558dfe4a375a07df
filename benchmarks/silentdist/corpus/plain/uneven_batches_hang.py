"""Data cut by hand in uneven pieces: one process has a batch more than the other, and waits for it."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(201, 10, generator=g)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    part = Subset(data, range(rank, len(data), world))  # fault
    loader = DataLoader(part, batch_size=10, shuffle=True)  # fault
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for a, b in loader:  # fault
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()  # fault
            optimizer.step()
        print(rank, epoch)
        dist.barrier()
    dist.destroy_process_group()


main()
