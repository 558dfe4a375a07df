"""Gaze regression on noisy recordings; corrupt batches are not used."""
import os

import torch
import torch.distributed as dist
from torch import nn

UPDATES, MICRO, ROWS, CHANNELS = 12, 3, 8, 10


class Gaze(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(CHANNELS, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


def init_net():
    torch.manual_seed(44)
    return Gaze()


def recording(update, micro, rank):
    g = torch.Generator().manual_seed(((update * 31 + micro) * 17 + rank) * 13 + 1)
    x = torch.randn(ROWS, CHANNELS, generator=g)
    y = torch.stack([x[:, :5].sum(1), x[:, 5:].prod(1)], dim=1)
    broken = torch.rand((), generator=g) < 0.3
    if broken:
        y[0] = float("nan")
    return x, y


def sum_gradients(net):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    return flat


def scatter_back(net, flat):
    at = 0
    for p in net.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def run_update(net, opt, update, rank, world):
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    used = torch.zeros(())
    for micro in range(MICRO):
        x, y = recording(update, micro, rank)
        loss = nn.functional.smooth_l1_loss(net(x), y)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        used += 1
    flat = sum_gradients(net)
    dist.all_reduce(used)
    scatter_back(net, flat / used.clamp(min=1))
    opt.step()
    return used.item()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    net = init_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = 0
    for update in range(UPDATES):
        seen += run_update(net, opt, update, rank, world)
    if rank == 0:
        print(f"used {seen:.0f} of {UPDATES * MICRO * world} micro-batches")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
