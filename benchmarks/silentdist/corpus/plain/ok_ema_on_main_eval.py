"""An EMA of the weights that only the main process keeps, for its evaluation; training never sees it."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    model = DDP(net)
    ema = copy.deepcopy(net).eval() if rank == 0 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, valid = make(320, 0), make(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    for e, p in zip(ema.state_dict().values(), net.state_dict().values()):
                        e.lerp_(p, 0.1) if e.is_floating_point() else e.copy_(p)
        if rank == 0:
            with torch.no_grad():
                right = sum(int((ema(x).argmax(1) == y).sum()) for x, y in DataLoader(valid, batch_size=32))
            print(epoch, right / len(valid))
        dist.barrier()
    dist.destroy_process_group()


main()
