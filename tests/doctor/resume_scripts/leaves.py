"""Leaves by their outline with Accelerate: batch norm, dropout, one-cycle rates for two groups of weights."""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def outlines(n=224, points=32):
    g = torch.Generator().manual_seed(61)
    kinds = torch.randint(0, 5, (n,), generator=g)
    angle = torch.linspace(0, 6.28, points)
    shape = 1 + 0.3 * torch.sin((kinds[:, None] + 2) * angle)
    return TensorDataset((shape + 0.1 * torch.randn(n, points, generator=g))[:, None], kinds)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveMaxPool1d(4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(128, 5))

    def forward(self, x):
        return self.head(self.body(x))


class Run:
    def __init__(self, args):
        self.args = args
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(args.seed)
        net = Net()
        groups = [{"params": net.body.parameters(), "lr": 0.02}, {"params": net.head.parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
        self.order = torch.Generator()
        loader = DataLoader(outlines(), args.batch, shuffle=True, generator=self.order)
        steps = args.epochs * len(loader)  # of all processes together, as the prepared schedule counts
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.05], total_steps=steps)
        prepared = self.accelerator.prepare(net, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.step = 0
        torch.manual_seed(args.seed + 1 + self.accelerator.process_index)

    def save(self):
        folder = self.args.out / ".incomplete"
        self.accelerator.save_state(str(folder))
        if self.accelerator.is_main_process:
            (folder / "progress.json").write_text(json.dumps({"step": self.step}))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder.rename(self.args.out / f"step{self.step:03d}")
        self.accelerator.wait_for_everyone()

    def load(self):
        found = sorted(p for p in self.args.out.iterdir() if p.name.startswith("step"))
        if found:
            self.accelerator.load_state(str(found[-1]))
            self.step = json.loads((found[-1] / "progress.json").read_text())["step"]

    def fit(self):
        length = len(self.loader)
        for epoch in range(self.step // length, self.args.epochs):
            self.order.manual_seed(1000 + epoch)
            self.model.train()
            for images, kinds in self.accelerator.skip_first_batches(self.loader, self.step - epoch * length):
                loss = nn.functional.cross_entropy(self.model(images), kinds)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.step += 1
                self.accelerator.print(f"epoch {epoch}, step {self.step}: loss {loss.item():.4f}", flush=True)
                if self.step % self.args.save_every == 0:
                    self.save()


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--save-every", type=int, default=4)
parser.add_argument("--seed", type=int, default=9)
run = Run(parser.parse_args())
run.args.out.mkdir(parents=True, exist_ok=True)
if run.args.resume:
    run.load()
run.fit()
if run.accelerator.is_main_process and os.environ.get("FINAL"):
    torch.save(run.accelerator.unwrap_model(run.model).state_dict(), os.environ["FINAL"])
run.accelerator.end_training()
