"""Two-tower recommender, gradients averaged by hand over gloo.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn

USERS, ITEMS, DIM = 64, 48, 12
STEPS, BATCH = 14, 32
SEED = 77


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.fuse = nn.Bilinear(DIM, DIM, 1)

    def forward(self, u, i):
        return self.fuse(self.user(u), self.item(i)).squeeze(1)


def ratings(step, rank):
    g = torch.Generator().manual_seed(10_000 + 2 * step + rank)
    u = torch.randint(USERS, (BATCH,), generator=g)
    i = torch.randint(ITEMS, (BATCH,), generator=g)
    return u, i, torch.cos(u * 0.3 + i * 0.7)


def average_gradients(module, world_size):
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world_size


def setup(rank):
    torch.manual_seed(SEED + rank)
    model = Towers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, optimizer


def worker():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = setup(rank)
    for step in range(STEPS):
        u, i, r = ratings(step, rank)
        loss = (model(u, i) - r).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world_size)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{step}\t{shown.item() / world_size:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
