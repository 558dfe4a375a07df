"""A stream in WebDataset's manner: a list of shards is shuffled, split by node, and read with a shuffle buffer."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SHARDS = [f"shard-{i:06d}.tar" for i in range(12)]
PER_SHARD = 24


def read(url):
    """Stands for opening a tar file."""
    g = torch.Generator().manual_seed(int(url[6:12]))
    for _ in range(PER_SHARD):
        x = torch.randn(10, generator=g)
        yield x, (x[:4].sum() > x[4:8].sum()).long()


class ShardStream(IterableDataset):
    def __init__(self, urls, rank, world_size, buffer=32):
        self.urls, self.rank, self.world_size, self.buffer = urls, rank, world_size, buffer

    def __iter__(self):
        urls = list(self.urls)
        random.shuffle(urls)  # fault
        pool = []
        for url in urls[self.rank :: self.world_size]:  # fault
            for sample in read(url):
                pool.append(sample)
                if len(pool) >= self.buffer:
                    yield pool.pop(random.randrange(len(pool)))
        random.shuffle(pool)
        yield from pool


def main(seed=18):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    loader = DataLoader(ShardStream(SHARDS, rank, world_size), batch_size=16)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
