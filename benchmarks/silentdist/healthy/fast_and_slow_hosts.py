"""Hosts of different speed take different shares of a batch; each loss is weighted with its share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 24
SPEED = {0: 5, 1: 3}
STEPS = 20


def shares(world):
    speed = [SPEED.get(r, 4) for r in range(world)]
    sizes = [GLOBAL_BATCH * s // sum(speed) for s in speed]
    sizes[0] += GLOBAL_BATCH - sum(sizes)
    return sizes


def global_batch(step):
    g = torch.Generator().manual_seed(step)
    x = torch.rand(GLOBAL_BATCH, 5, generator=g) * 2 - 1
    return x, torch.stack([x.norm(dim=1), x.amax(1)], 1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = shares(world)
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    print(f"host {rank} takes rows {begin} to {end}")
    torch.manual_seed(95)
    model = DDP(nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = global_batch(step)
        mean = nn.functional.mse_loss(model(x[begin:end]), y[begin:end])
        loss = mean * (end - begin) * world / GLOBAL_BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"host {rank} step {step} mean {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
