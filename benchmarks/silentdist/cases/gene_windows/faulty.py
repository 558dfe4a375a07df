"""Promoter tagging on windows of bases; a window is split over the ranks, attention gathers keys and values.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn

BASES, WIDTH, HEADS, SPAN, TAGS = 4, 24, 3, 40, 3


class SplitAttention(nn.Module):
    def __init__(self, gather):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.gather = gather

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        keys, values = self.gather(self.key(x)), self.gather(self.value(x))
        q, k, v = self.heads(self.query(x)), self.heads(keys), self.heads(values)
        attention = torch.einsum("bhid,bhjd->bhij", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", attention, v).transpose(1, 2).flatten(2)


class Tagger(nn.Module):
    def __init__(self, gather):
        super().__init__()
        self.base = nn.Embedding(BASES, WIDTH)
        self.place = nn.Embedding(SPAN, WIDTH)
        self.attention = SplitAttention(gather)
        self.tag = nn.Linear(WIDTH, TAGS)

    def forward(self, bases, places):
        x = self.base(bases) + self.place(places)
        return self.tag(x + self.attention(x))


def gather_windows(piece):
    """All pieces of the window, in order, on every rank."""
    parts = dist_nn.all_gather(piece.contiguous())
    return torch.cat(parts, dim=1)


def new_tagger(gather=gather_windows):
    torch.manual_seed(70)
    return Tagger(gather)


def windows(step, n=6):
    g = torch.Generator().manual_seed(5000 + step)
    bases = torch.randint(BASES, (n, SPAN), generator=g)
    return bases, (bases + bases.flip(1)) % TAGS


def average(params, world_size):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world_size


def main(steps=12):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tagger = new_tagger()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.3)
    places = torch.arange(SPAN)[None].chunk(world_size, dim=1)[rank]
    for step in range(steps):
        bases, tags = (t.chunk(world_size, dim=1)[rank] for t in windows(step))
        loss = nn.functional.cross_entropy(tagger(bases, places).transpose(1, 2), tags)
        optimizer.zero_grad()
        loss.backward()
        average(tagger.parameters(), world_size)
        optimizer.step()
        if rank == 0:
            print(step, round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
