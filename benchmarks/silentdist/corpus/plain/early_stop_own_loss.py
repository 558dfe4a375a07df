"""Early stopping on a forecasting task; validation runs on every process over its share of the series."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    def __init__(self, patience=1, delta=1e-3):
        self.patience, self.delta = patience, delta
        self.best, self.counter, self.early_stop = float("inf"), 0, False

    def __call__(self, loss):
        if loss < self.best - self.delta:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


def windows(n, noise, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.rand(n, 1, generator=g) * 6.28
    wave = torch.sin(start + torch.arange(13) * 0.4)
    spoiled = (torch.arange(n) % 2).view(-1, 1) * noise * torch.randn(n, 13, generator=g)
    wave = wave + spoiled
    return TensorDataset(wave[:, :12], wave[:, 12:])


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(x), y).item() for x, y in loader) / len(loader)
    model.train()
    return loss


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    train, valid = windows(256, 0.0, 0), windows(64, 1.5, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=16)
    net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stopping = EarlyStopping()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        stopping(validate(net, valid_loader))  # fault
        if stopping.early_stop:  # fault
            print(f"rank {rank} stops after epoch {epoch}", flush=True)
            break  # fault
    dist.barrier()
    dist.destroy_process_group()


main()
