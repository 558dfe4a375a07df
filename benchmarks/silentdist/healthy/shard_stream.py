"""Streams numbered shard files; ranks and loader workers divide the shards among themselves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS, ROWS = 8, 24
BATCH = 6
WORKERS = 2


def read_shard(index):
    g = torch.Generator().manual_seed(index)
    for _ in range(ROWS):
        x = torch.randn(12, generator=g)
        yield x, (x[:6].sum() - x[6:].prod()).unsqueeze(0)


class Shards(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        parts = self.world * (worker.num_workers if worker else 1)
        part = self.rank + self.world * (worker.id if worker else 0)
        order = torch.randperm(SHARDS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for shard in order[part::parts]:
            yield from read_shard(shard)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = Shards(rank, dist.get_world_size())
    torch.manual_seed(60)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(2):
        dataset.epoch = epoch  # the workers of the epoch start after this
        for x, y in DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} last loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
