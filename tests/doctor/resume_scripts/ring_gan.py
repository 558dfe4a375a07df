"""A GAN that learns points on rings: two optimizers, noise that differs by rank, one checkpoint folder per step."""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 8


def rings(n):
    g = torch.Generator().manual_seed(2)
    angle = torch.rand(n, generator=g) * 6.2832
    radius = torch.randint(1, 3, (n,), generator=g) + 0.05 * torch.randn(n, generator=g)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


class Checkpoints:
    def __init__(self, root, everything):
        self.root, self.everything, self.rank = Path(root), everything, dist.get_rank()
        self.root.mkdir(parents=True, exist_ok=True)

    def save(self, step):
        building = self.root / ".building"
        if self.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            torch.save({name: part.state_dict() for name, part in self.everything.items()}, building / "state.pt")
        dist.barrier()
        torch.save(torch.get_rng_state(), building / f"rng{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            os.rename(building, self.root / f"{step:05d}")
        dist.barrier()

    def restore(self):
        folders = sorted(self.root.glob("[0-9]*"))
        if not folders:
            return 0, None
        for name, state in torch.load(folders[-1] / "state.pt").items():
            self.everything[name].load_state_dict(state)
        return int(folders[-1].name), torch.load(folders[-1] / f"rng{self.rank}.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    g_ddp, d_ddp = DDP(generator), DDP(critic)
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    points = TensorDataset(rings(240))
    sampler = DistributedSampler(points, seed=1)
    loader = DataLoader(points, batch_size=10, sampler=sampler)
    torch.manual_seed(100 + dist.get_rank())

    checkpoints = Checkpoints(out, {"g": generator, "d": critic, "g_opt": g_opt, "d_opt": d_opt})
    step, rng = checkpoints.restore()
    for epoch in range(step // len(loader), 2):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(step % len(loader)):
            next(batches)
        if rng is not None:
            torch.set_rng_state(rng)
            rng = None
        for (real,) in batches:
            fake = g_ddp(torch.randn(len(real), NOISE))
            d_loss = F.softplus(-d_ddp(real)).mean() + F.softplus(critic(fake.detach())).mean()
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
            g_loss = F.softplus(-critic(fake)).mean()
            g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
            step += 1
            if dist.get_rank() == 0:
                print(f"{step}: d {d_loss.item():.3f} g {g_loss.item():.3f}", flush=True)
            if step % 5 == 0:
                checkpoints.save(step)
    if os.environ.get("FINAL") and dist.get_rank() == 0:
        torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, os.environ["FINAL"])
    dist.destroy_process_group()


main()
