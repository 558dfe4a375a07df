"""Lightning Fabric with accumulation by no_backward_sync, a gathered evaluation and a saved checkpoint."""

import os
import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 8, 8, generator=g)
    return TensorDataset(x, x.flatten(1)[:, :5].argmax(1))


def main():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    train = fabric.setup_dataloaders(DataLoader(make(320, 0), batch_size=10, shuffle=True))
    valid = fabric.setup_dataloaders(DataLoader(make(80, 1), batch_size=20))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(2):
        model.train()
        for i, (images, labels) in enumerate(train):
            accumulating = i % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(nn.functional.cross_entropy(model(images), labels) / 2)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for images, labels in valid:
                right += (model(images).argmax(1) == labels).sum()
        right = fabric.all_reduce(right, reduce_op="sum")
        fabric.print(epoch, right.item() / 80)
    fabric.save(os.path.join(tempfile.gettempdir(), "corpus_fabric.ckpt"), {"model": model})


if __name__ == "__main__":
    main()
