"""A regression without DDP: the script reduces its gradients itself, and clips them."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Shards(Sampler):
    """The same permutation on all ranks, of which each takes its part."""

    def __init__(self, size, rank, world_size):
        self.size, self.rank, self.world_size = size, rank, world_size
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        each = self.size // self.world_size
        self.epoch += 1
        return iter(order[self.rank * each : (self.rank + 1) * each].tolist())

    def __len__(self):
        return self.size // self.world_size


def average_gradients(model, world_size):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


def main():
    bf16 = "--bf16" in sys.argv
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(180, 6, generator=generator)
    y = x.sum(1, keepdim=True).sin()
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=10, sampler=Shards(len(data), rank, world_size))

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for epoch in range(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            loss.backward()
            average_gradients(model, world_size)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / world_size:.4f}")


main()
