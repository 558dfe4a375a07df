"""A stream that is cut by rank and by worker."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, workers):
        self.workers = workers

    def __iter__(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        cut, own = rank, get_worker_info().id
        start = cut * self.workers + own
        for number in range(start, 128, world_size * self.workers):
            x = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield x, (x.sum() > 0).long()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Stream(2), 4, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        for inputs, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                outputs = model(inputs)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs.float(), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
