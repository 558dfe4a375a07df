"""Rebalances wine classes: every process makes the same weighted draw and keeps its own part of it."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = 8


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, seed=0):
        self.weights, self.num_samples, self.seed = weights, num_samples, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draw = torch.multinomial(self.weights, len(self) * self.world, replacement=True, generator=g)
        return iter(draw[self.rank :: self.world].tolist())


def main():
    dist.init_process_group("gloo")
    wine = load_wine()
    x, y = torch.tensor(wine.data).float(), torch.tensor(wine.target)
    x = (x - x.mean(0)) / x.std(0)
    weights = (1.0 / torch.bincount(y))[y]
    sampler = DistributedWeightedSampler(weights, num_samples=160, seed=28)
    loader = DataLoader(TensorDataset(x, y), BATCH, sampler=sampler)
    torch.manual_seed(29)
    model = DDP(nn.Sequential(nn.Linear(13, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} classes {torch.bincount(b, minlength=3).tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
