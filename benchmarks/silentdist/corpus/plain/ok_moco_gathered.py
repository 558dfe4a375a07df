"""MoCo with the keys of all processes in the queue, a momentum encoder outside DDP, cosine decay by hand."""

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Views(Dataset):
    def __init__(self, n=288):
        self.x = torch.randn(n, 16, generator=torch.Generator().manual_seed(35))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        keep = (torch.rand(2, 16) > 0.2).float()
        return self.x[i] * keep[0], self.x[i] * keep[1]


@torch.no_grad()
def concat_all_gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class Queue:
    def __init__(self, dim, size):
        self.keys, self.at = F.normalize(torch.randn(size, dim), dim=1), 0

    def push(self, keys):
        rows = torch.arange(self.at, self.at + len(keys)) % len(self.keys)
        self.keys[rows] = keys
        self.at = int(rows[-1] + 1) % len(self.keys)


def main(epochs=2, lr=0.1, momentum=0.98):
    dist.init_process_group("gloo")
    torch.manual_seed(35)
    online = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
    target = copy.deepcopy(online).requires_grad_(False)
    queue = Queue(12, 144)
    torch.manual_seed(1000 + dist.get_rank())
    model = nn.parallel.DistributedDataParallel(online)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    data = Views()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (one, two) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (epoch + i / len(loader)) / epochs))
            with torch.no_grad():
                for t, o in zip(target.parameters(), online.parameters()):
                    t.lerp_(o, 1 - momentum)
                k = F.normalize(target(two), dim=1)
            q = F.normalize(model(one), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.keys.T], 1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.push(concat_all_gather(k))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
