"""Species from measurements, with Lightning Fabric: a DistributedSampler, momentum, steps of the learning rate."""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def measurements(n=208):
    g = torch.Generator().manual_seed(51)
    species = torch.randint(0, 4, (n,), generator=g)
    centre = torch.randn(4, 10, generator=g)
    return TensorDataset(centre[species] + 0.8 * torch.randn(n, 10, generator=g), species)


class Model(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(10, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 4)

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.out(x + F.relu(self.second(x)))


def save(fabric, out, state):
    fabric.save(out / ".partial", state)
    if fabric.is_global_zero:
        os.replace(out / ".partial", out / f"step_{state['step']:06d}.ckpt")
    fabric.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume_from", type=Path, default=None)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    seed_everything(51)
    data = measurements()
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, shuffle=True, seed=51)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, sampler=sampler))
    net = Model()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20], gamma=0.5)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "batch": 0, "step": 0}
    if args.resume_from:
        fabric.load(args.resume_from, state)
    first_epoch, first_batch = state["epoch"], state["batch"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for batch, (numbers, species) in enumerate(loader):
            if epoch == first_epoch and batch < first_batch:
                continue
            loss = F.cross_entropy(model(numbers), species)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state.update(epoch=epoch, batch=batch + 1, step=state["step"] + 1)
            fabric.print(f"epoch {epoch} batch {batch} loss {loss.item():.4f}")
            if state["step"] % args.save_every == 0:
                save(fabric, args.out, state)

    if fabric.is_global_zero and os.environ.get("FINAL"):
        torch.save(net.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
