"""A surface fitted to points, with Lightning Fabric: accumulation, batch norm, dropout, a loader from any position."""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class FromHere(Sampler):
    """Rank's share of the pass that `place` (in examples of this rank) lies in, from there to its end."""

    def __init__(self, size, rank, world, seed):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.place = 0

    def __iter__(self):
        share = self.size // self.world
        this_pass, start = divmod(self.place, share)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + this_pass))
        return iter(order[self.rank * share : (self.rank + 1) * share][start:].tolist())

    def __len__(self):
        return self.size // self.world


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))
        self.height = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, xy):
        return self.height(self.lift(xy)).squeeze(1)


class Fit:
    def __init__(self, out, seed=70, batch=8, accumulate=2, updates=24):
        self.out, self.seed, self.batch, self.accumulate, self.updates = out, seed, batch, accumulate, updates
        self.fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
        self.fabric.launch()
        self.fabric.seed_everything(seed)
        xy = torch.rand(352, 2) * 4 - 2
        data = TensorDataset(xy, torch.sin(3 * xy[:, 0]) * xy[:, 1])
        self.sampler = FromHere(len(data), self.fabric.global_rank, self.fabric.world_size, seed)
        loader = DataLoader(data, batch, sampler=self.sampler, drop_last=True, num_workers=1)
        self.loader = self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        net = Surface()
        self.model, self.optimizer = self.fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
        self.scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, total_iters=updates, power=1.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "update": 0}

    def resume(self):
        names = [name for name in os.listdir(self.out) if name.endswith(".ckpt")] if os.path.isdir(self.out) else []
        if names:
            self.fabric.load(os.path.join(self.out, max(names)), self.state)

    def save(self):
        path = os.path.join(self.out, f"{self.state['update']:04d}.ckpt")
        self.fabric.save(path + ".tmp", self.state)
        if self.fabric.is_global_zero:
            os.replace(path + ".tmp", path)

    def run(self):
        micro = self.state["update"] * self.accumulate
        while self.state["update"] < self.updates:
            self.sampler.place = micro * self.batch
            for xy, height in self.loader:
                torch.manual_seed(self.seed + 10_000 * self.fabric.global_rank + micro)
                micro += 1
                complete = micro % self.accumulate == 0
                with self.fabric.no_backward_sync(self.model, enabled=not complete):
                    loss = nn.functional.mse_loss(self.model(xy), height)
                    self.fabric.backward(loss / self.accumulate)
                if not complete:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.state["update"] += 1
                self.fabric.print(f"update {self.state['update']}: {loss.item():.4f}")
                if self.state["update"] % 4 == 0:
                    self.save()
                if self.state["update"] == self.updates:
                    break


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
fit = Fit(parser.parse_args().out)
fit.resume()
fit.run()
if fit.fabric.is_global_zero and os.environ.get("FINAL"):
    torch.save(fit.model.state_dict(), os.environ["FINAL"])
