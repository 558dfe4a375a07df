"""Uneven data under the Join context of DDP; the lower rank has a batch more."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(201, 10, generator=g)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=10, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join():
            for a, b in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(a), b).backward()
                optimizer.step()
    dist.destroy_process_group()


main()
