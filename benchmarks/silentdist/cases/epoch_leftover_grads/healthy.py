import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def two_moons(n=112, seed=9):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * 3.1416
    y = (torch.arange(n) % 2).long()
    x = torch.stack([torch.cos(t) + y, torch.sin(t) * (1 - 2 * y) + 0.3 * y], dim=1)
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), y)


def make_net():
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))


def make_loader(rank, world):
    data = two_moons()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=6)
    return DataLoader(data, batch_size=8, sampler=sampler)


class Runner:
    def __init__(self, rank, world, accum=3, epochs=5):
        self.rank = rank
        self.accum = accum
        self.epochs = epochs
        self.loader = make_loader(rank, world)
        self.model = DistributedDataParallel(make_net())
        self.opt = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.updates = 0

    def micro_step(self, batch, sync, share):
        self.model.require_backward_grad_sync = sync
        x, y = batch
        loss = F.cross_entropy(self.model(x), y) / share
        loss.backward()
        return loss.item() * share

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        n = len(self.loader)
        total = 0.0
        for i, batch in enumerate(self.loader):
            boundary = (i + 1) % self.accum == 0 or i + 1 == n
            share = min(self.accum, n - i // self.accum * self.accum)
            total += self.micro_step(batch, boundary, share)
            if boundary:
                self.opt.step()
                self.opt.zero_grad()
                self.updates += 1
        return total / n

    def fit(self):
        for epoch in range(self.epochs):
            mean = self.run_epoch(epoch)
            if self.rank == 0:
                print(f"[{epoch}] {self.updates} updates, mean loss {mean:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Runner(dist.get_rank(), dist.get_world_size()).fit()
    dist.barrier()
    dist.destroy_process_group()
