"""Lightning Fabric: its own loaders, accumulation, clipping, reduced metrics."""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    seed_everything(1)
    x = torch.randn(68, 8)
    y = (x.sum(1) > 0).long()
    train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=4, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, opt = fabric.setup(model, opt)
    train, test = fabric.setup_dataloaders(train, test)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    for epoch in range(3):
        model.train()
        for i, (a, b) in enumerate(train):
            last = (i + 1) % 2 == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.cross_entropy(model(a), b)
                fabric.backward(loss / 2)
            if last:
                fabric.clip_gradients(model, opt, max_norm=1.0)
                opt.step()
                opt.zero_grad()
        sched.step()
        model.eval()
        right = torch.zeros(())
        n = torch.zeros(())
        with torch.no_grad():
            for a, b in test:
                right += (model(a).argmax(1) == b).sum()
                n += len(b)
        right, n = fabric.all_reduce(right, reduce_op="sum"), fabric.all_reduce(n, reduce_op="sum")
        fabric.print(f"epoch {epoch} accuracy {right / n:.3f}")


main()
