"""random_split draws another validation set on each process: every rank trains on what others validate with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2024 + rank)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(400, 10, generator=g)
    full = TensorDataset(x, x[:, :4].argmax(1))
    train, valid = random_split(full, [300, 100])  # fault
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=15, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=50, sampler=range(rank, len(valid), dist.get_world_size()))
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for a, b in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for a, b in valid_loader:
                total += torch.tensor([(model(a).argmax(1) == b).sum(), len(b)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"{epoch}: {total[0] / total[1]:.3f}")
    dist.destroy_process_group()


main()
