"""Autoencoder of sensor windows; the wide projection is split by rows over the ranks.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WINDOW, WIDE, CODE = 20, 40, 6


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.detach().clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class RowLinear(nn.Module):
    """y = x W^T + b where every rank holds a slice of the input features."""

    def __init__(self, weight, bias, rank, size):
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(size, dim=1)[rank].clone())
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x):
        y = F.linear(x, self.weight)
        return _Reduce.apply(y) + self.bias


class ColumnLinear(nn.Module):
    def __init__(self, weight, bias, rank, size):
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(size, dim=0)[rank].clone())
        self.bias = nn.Parameter(bias.chunk(size)[rank].clone())

    def forward(self, x):
        return F.linear(_Enter.apply(x), self.weight, self.bias)


def full_layers():
    torch.manual_seed(46)
    return [nn.Linear(WINDOW, WIDE), nn.Linear(WIDE, CODE), nn.Linear(CODE, WIDE), nn.Linear(WIDE, WINDOW)]


def parallel_model(rank, size):
    parts = []
    for i, layer in enumerate(full_layers()):
        kind = RowLinear if i % 2 else ColumnLinear
        parts += [kind(layer.weight.data, layer.bias.data, rank, size), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def windows(step, n=32):
    g = torch.Generator().manual_seed(step + 700)
    t = torch.arange(WINDOW) / 4
    return torch.sin(t + 6 * torch.rand(n, 1, generator=g)) + 0.3 + 0.05 * torch.randn(n, WINDOW, generator=g)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = parallel_model(rank, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(14):
        x = windows(step)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step={step} mse={loss.item():.5f}")
    dist.destroy_process_group()
