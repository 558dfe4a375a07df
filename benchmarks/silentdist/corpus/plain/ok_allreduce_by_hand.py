"""Data parallelism by hand: weights broadcast, gradients averaged in async operations that are waited for."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 10, 2))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(288, 1, 12, generator=g)
    data = TensorDataset(x, (x.sum((1, 2)) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for work, p in zip(works, model.parameters()):
                work.wait()
                p.grad.div_(world)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


main()
