"""ReduceLROnPlateau, fed by each process with the validation loss of its own part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + torch.randn(n, 1, generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train, valid = make(160, 0), make(40, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=20, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.03)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(a), b).item() for a, b in valid_loader]
        scheduler.step(sum(losses) / len(losses))  # fault
        if rank == 0:
            print(epoch, optimizer.param_groups[0]["lr"])
    dist.destroy_process_group()


main()
