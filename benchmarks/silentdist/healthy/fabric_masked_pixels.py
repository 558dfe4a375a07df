"""Fabric: masked autoencoder on digits; the error is a mean over the hidden pixels of all processes."""

import torch
import torch.nn as nn
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

BATCH = 16
DEVICES = 2


class MaskedDigits(Dataset):
    """Every digit hides another share of its pixels, always the same ones."""

    def __init__(self, size=512):
        self.pixels = torch.tensor(load_digits().data[:size]).float() / 16

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        share = torch.rand(1, generator=g) * 0.8 + 0.05
        return self.pixels[i], torch.rand(64, generator=g) < share


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blank = nn.Parameter(torch.zeros(64))
        self.net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, pixels, hidden):
        return self.net(torch.where(hidden, self.blank, pixels))


def main():
    fabric = Fabric(accelerator="cpu", devices=DEVICES, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(9)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(MaskedDigits(), BATCH))
    for epoch in range(2):
        for pixels, hidden in loader:
            error = ((model(pixels, hidden) - pixels) ** 2 * hidden).sum()
            count = fabric.all_reduce(hidden.sum().float(), reduce_op="sum")
            loss = error / (count / fabric.world_size)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch} loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item():.4f}")


if __name__ == "__main__":
    main()
