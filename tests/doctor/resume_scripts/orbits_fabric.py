"""Orbits from three observations, with Lightning Fabric: warm-up, then a linear decay of the learning rate."""

import argparse
import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

EPOCHS, BATCH, WARMUP = 2, 8, 6


def observations(n=192):
    g = torch.Generator().manual_seed(40)
    axis, phase = torch.rand(n, 1, generator=g) + 0.5, torch.rand(n, 1, generator=g) * 6.28
    times = torch.tensor([[0.0, 0.4, 0.9]])
    speed = axis**-1.5
    seen = torch.cat([axis * torch.cos(phase + speed * times), axis * torch.sin(phase + speed * times)], 1)
    return seen, torch.cat([axis, phase.cos(), phase.sin()], 1)


def batches(fabric, size, epoch):
    order = torch.randperm(size, generator=torch.Generator().manual_seed(4000 + epoch))
    return order[fabric.global_rank :: fabric.world_size].split(BATCH)


def latest(out):
    return max(out.glob("orbits-*.ckpt"), key=lambda path: int(path.stem.split("-")[1]), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(40)
    seen, orbit = observations()
    per_epoch = len(seen) // fabric.world_size // BATCH
    total = EPOCHS * per_epoch

    def factor(step):
        return (step + 1) / WARMUP if step < WARMUP else (total - step) / (total - WARMUP)

    net = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 3))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=4e-3))

    args.out.mkdir(parents=True, exist_ok=True)
    step, path = 0, latest(args.out) if args.resume else None
    if path:
        step = fabric.load(path, {"model": model, "optimizer": optimizer})["step"]
        scheduler = LambdaLR(optimizer, factor, last_epoch=step)
    else:
        scheduler = LambdaLR(optimizer, factor)

    while step < total:
        epoch, done = divmod(step, per_epoch)
        for rows in batches(fabric, len(seen), epoch)[done:]:
            loss = nn.functional.l1_loss(model(seen[rows]), orbit[rows])
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=2.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            fabric.print(f"step {step} loss {loss.item():.4f}")
            if step % 5 == 0:
                fabric.save(args.out / ".next", {"model": model, "optimizer": optimizer, "step": step})
                if fabric.is_global_zero:
                    os.replace(args.out / ".next", args.out / f"orbits-{step}.ckpt")
    if fabric.is_global_zero and os.environ.get("FINAL"):
        torch.save(net.state_dict(), os.environ["FINAL"])
    fabric.barrier()


if __name__ == "__main__":
    main()
