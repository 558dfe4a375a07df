"""Reptile on sine waves: every process adapts to a task of its own, the adapted weights are averaged."""

import torch
import torch.distributed as dist
from torch import nn

OUTER, INNER = 14, 4
INNER_LR, META_LR = 0.05, 0.5


def task(number):
    g = torch.Generator().manual_seed(number)
    phase = torch.rand(1, generator=g) * 6.28
    x = torch.rand(INNER, 10, 1, generator=g) * 6 - 3
    return x, torch.sin(x + phase)


def adapt(net, number):
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    for x, y in zip(*task(number)):
        loss = nn.functional.mse_loss(net(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(22)
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    meta = [p.detach().clone() for p in net.parameters()]
    for outer in range(OUTER):
        loss = adapt(net, outer * world + rank)
        with torch.no_grad():
            for p, m in zip(net.parameters(), meta):
                step = p - m
                dist.all_reduce(step)
                m.add_(step, alpha=META_LR / world)
                p.copy_(m)
        print(f"rank {rank} task {outer * world + rank} loss after adapting {loss:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
