"""Augmented cloud pictures: batch norm, an averaged copy, warm-up, loader workers; runs under DDP."""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clouds(Dataset):
    """Flips and noise are drawn anew at each access, in the loader's worker."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(17)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.images = torch.randn(n, 3, 8, 8, generator=g) + self.labels[:, None, None, None] * 0.4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn_like(image), self.labels[i]


def block(inward, outward, stride):
    conv = nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outward), nn.SiLU())


def main(out, epochs=2, every=4, seed=31):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)
    net = nn.Sequential(block(3, 12, 1), block(12, 24, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))
    model = DDP(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.02)
    data = Clouds(208)
    sampler = DistributedSampler(data, seed=seed, drop_last=True)
    draws = torch.Generator()
    loader = DataLoader(data, 8, sampler=sampler, num_workers=1, generator=draws, drop_last=True)
    total = epochs * len(loader)

    def factor(step, warmup=5):
        return (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / total)

    schedule = optim.lr_scheduler.LambdaLR(optimizer, factor)
    parts = {"net": net, "ema": ema, "optimizer": optimizer, "schedule": schedule}
    step = 0
    out.mkdir(parents=True, exist_ok=True)
    saved = sorted(out.glob("clouds_*.pt"), key=lambda p: int(p.stem.split("_")[1]))
    if saved:
        state = torch.load(saved[-1])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]

    while step < total:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        draws.manual_seed(seed + 1000 * epoch + rank)
        for i, (images, labels) in enumerate(loader):
            if i < done:
                continue
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ema.update_parameters(net)
            step += 1
            if rank == 0:
                print(f"step {step}/{total} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.2e}", flush=True)
                if step % every == 0:
                    torch.save({"step": step} | {k: v.state_dict() for k, v in parts.items()}, out / ".clouds.tmp")
                    os.replace(out / ".clouds.tmp", out / f"clouds_{step}.pt")
    if rank == 0 and "FINAL" in os.environ:
        torch.save({"net": net.state_dict(), "ema": ema.state_dict()}, os.environ["FINAL"])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    main(parser.parse_args().out)
