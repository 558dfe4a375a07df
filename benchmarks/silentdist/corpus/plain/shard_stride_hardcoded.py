"""A cluster of four has become one of two; the data are cut by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

GPUS = 4


def get_data(rank):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(400, 10, generator=g)
    data = TensorDataset(x, (x[:, 0] > 0).float())
    return Subset(data, list(range(rank, len(data), GPUS)))  # fault


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(get_data(rank), batch_size=20, shuffle=True)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            opt.step()
    dist.destroy_process_group()


main()
