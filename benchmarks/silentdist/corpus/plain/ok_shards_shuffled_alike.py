"""A stream of shards: all processes shuffle the list alike, split it by process and by worker, and buffer on their own."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, count, per_shard, rank, size, seed):
        self.count, self.per_shard, self.rank, self.size, self.seed = count, per_shard, rank, size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.count))
        random.Random(f"{self.seed}-{self.epoch}").shuffle(order)
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = order[self.rank :: self.size][part::parts]
        local = random.Random(f"{self.seed}-{self.epoch}-{self.rank}-{part}")
        buffer = []
        for shard in mine:
            g = torch.Generator().manual_seed(shard)
            for _ in range(self.per_shard):
                x = torch.randn(7, generator=g)
                buffer.append((x, x[:2].sum().tanh()))
                if len(buffer) > 20:
                    yield buffer.pop(local.randrange(len(buffer)))
        local.shuffle(buffer)
        yield from buffer


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(36)
    stream = Shards(count=16, per_shard=20, rank=rank, size=size, seed=36)
    loader = DataLoader(stream, batch_size=16, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        stream.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
