"""The main process evaluates between the epochs, and its model stays in evaluation mode from then on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


@torch.no_grad()
def accuracy(net, data):
    net.eval()  # fault
    x, y = data.tensors
    return (net(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    train, valid = make(320, 0), make(80, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 2))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        if rank == 0:
            print(epoch, accuracy(net, valid))  # fault
        dist.barrier()
    dist.destroy_process_group()


main()
