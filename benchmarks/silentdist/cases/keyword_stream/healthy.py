"""Keyword spotting from a stream of recordings with Lightning Fabric.

torchrun --nproc-per-node 2 faulty.py
"""
import math

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

KEYWORDS = 6
FRAMES = 40


class Recordings(IterableDataset):
    """Generates the recordings of one tape in order; long tapes never fit in memory."""

    def __init__(self, length, tape=5, rank=0, world_size=1):
        self.length = length
        self.tape = tape
        self.rank, self.world_size = rank, world_size

    def recording(self, index):
        g = torch.Generator().manual_seed(self.tape * 100_000 + index)
        word = int(torch.randint(KEYWORDS, (), generator=g))
        t = torch.linspace(0, 1, FRAMES)
        tone = torch.sin(2 * math.pi * (word + 1) * t + 3 * torch.rand((), generator=g))
        mel = torch.stack([tone, tone.abs(), tone.square()]) + 0.3 * torch.randn(3, FRAMES, generator=g)
        return mel, word

    def __iter__(self):
        for index in range(self.rank, self.length, self.world_size):
            yield self.recording(index)


class Spotter(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.encoder = nn.GRU(3, width, batch_first=True)
        self.out = nn.Linear(width, KEYWORDS)

    def forward(self, mel):
        hidden, _ = self.encoder(mel.transpose(1, 2))
        return self.out(hidden.mean(1))


def train(fabric, steps=10, batch_size=8):
    fabric.seed_everything(3, verbose=False)
    total = steps * batch_size * fabric.world_size
    stream = Recordings(total, rank=fabric.global_rank, world_size=fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(stream, batch_size=batch_size, drop_last=True))
    model = Spotter()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    criterion = nn.CrossEntropyLoss()

    for step, (mel, word) in enumerate(loader):
        if step == steps:
            break
        optimizer.zero_grad()
        loss = criterion(model(mel), word)
        fabric.backward(loss)
        optimizer.step()
        fabric.print(f"step {step:02d} | loss {loss.item():.4f}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train(fabric)
