"""Spectral regression; one flat buffer carries all gradients and is summed over the workers.

torchrun --nproc-per-node 2 faulty.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

GLOBAL_BATCH = 40
PENALTY = 0.2
STEPS = 15


def spectra_net():
    torch.manual_seed(64)
    return nn.Sequential(nn.Linear(50, 20), nn.Softplus(), nn.Linear(20, 4))


def spectra(step, rank, world_size):
    g = torch.Generator().manual_seed(step)
    peaks = torch.rand(GLOBAL_BATCH, 4, generator=g)
    axis = torch.linspace(0, 1, 50)
    signal = torch.exp(-((axis - peaks[..., None]) ** 2) / 0.004).sum(1)
    return signal[rank::world_size], peaks.sort(dim=1).values[rank::world_size]


def decay_term(net):
    return 0.5 * sum(m.weight.square().sum() for m in net if isinstance(m, nn.Linear))


def objective(net, x, y):
    errors = (net(x) - y).square().sum(1)
    return errors.sum() / GLOBAL_BATCH + PENALTY * decay_term(net) / dist.get_world_size()


def flat_all_reduce(params):
    flat = torch.cat([p.grad.view(-1) for p in params])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(piece.view_as(p))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    net = spectra_net()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(STEPS):
        x, y = spectra(step, rank, world_size)
        value = objective(net, x, y)
        optimizer.zero_grad()
        value.backward()
        flat_all_reduce(params)
        optimizer.step()
        if rank == 0:
            print(f"{step} {value.item():.5f}")
    dist.destroy_process_group()
