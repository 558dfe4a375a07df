"""Credit scoring on tabular rows; the learning rate follows the number of workers.

torchrun --nproc-per-node 2 faulty.py --base-lr 0.04
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Backend:
    """Small wrapper so that the same script runs with one or many workers."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def model(self, module):
        return DistributedDataParallel(module) if self.size > 1 else module

    def optimizer(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= self.size
        return optimizer

    def loader(self, dataset, batch_size):
        sampler = DistributedSampler(dataset, self.size, self.rank, seed=5, drop_last=True)
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)

    def log(self, *text):
        if self.rank == 0:
            print(*text)


def applications(n=288):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 14, generator=g)
    risk = x[:, 0] * x[:, 1] - x[:, 2] + 0.5 * torch.randn(n, generator=g)
    return TensorDataset(x, (risk > 0).float())


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--base-lr", type=float, default=0.04, help="for one worker and a batch of --batch rows")
    cli.add_argument("--batch", type=int, default=12)
    cli = cli.parse_args()

    backend = Backend()
    torch.manual_seed(5)
    net = backend.model(nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 1)))
    lr = cli.base_lr * backend.size
    optimizer = backend.optimizer(torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True))
    loss_fn = nn.BCEWithLogitsLoss()

    loader = backend.loader(applications(), cli.batch)
    loader.sampler.set_epoch(0)
    for i, (x, y) in enumerate(loader):
        loss = loss_fn(net(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        backend.log("update", i, "loss", f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
