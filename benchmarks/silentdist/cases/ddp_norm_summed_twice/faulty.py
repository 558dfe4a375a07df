import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ratings(n=256, users=30, items=20):
    g = torch.Generator().manual_seed(15)
    u, i = torch.randint(0, users, (n,), generator=g), torch.randint(0, items, (n,), generator=g)
    taste, style = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    return TensorDataset(u, i, (taste[u] * style[i]).sum(1))


class Factorisation(nn.Module):
    def __init__(self, users=30, items=20, rank=6):
        super().__init__()
        self.user, self.item = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias


def make():
    torch.manual_seed(20)
    return Factorisation()


def make_loader(rank, world):
    data = ratings()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    return DataLoader(data, batch_size=16, sampler=sampler)


def global_norm(parameters, group=None):
    square = torch.zeros(())
    for p in parameters:
        if p.grad is not None:
            square += p.grad.norm() ** 2
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_gradients(parameters, limit):
    parameters = list(parameters)
    norm = global_norm(parameters)
    factor = limit / (norm + 1e-6)
    if factor < 1:
        for p in parameters:
            p.grad.mul_(factor)
    return norm


def main():
    parser = argparse.ArgumentParser(description="matrix factorisation")
    parser.add_argument("--limit", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=2)
    opt = parser.parse_args()
    dist.init_process_group("gloo")
    model = DDP(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    for epoch in range(opt.epochs):
        loader.sampler.set_epoch(epoch)
        for u, i, r in loader:
            optimizer.zero_grad()
            loss = (model(u, i) - r).square().mean()
            loss.backward()
            norm = clip_gradients(model.parameters(), opt.limit)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {loss.item():.4f} norm {norm.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
