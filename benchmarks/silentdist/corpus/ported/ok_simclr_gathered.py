"""SimCLR with the embeddings of all processes, each process's rows against all columns."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

run = paceline.start(seed=2)


class Pairs(Dataset):
    def __init__(self, n=192):
        self.x = torch.randn(n, 24, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(24), self.x[i] + 0.1 * torch.randn(24)


def clip_loss(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    every_a, every_b = run.gather(a), run.gather(b)
    logits = every_a @ every_b.T / 0.3
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Pairs(), global_batch=32, shuffle=True)
for epoch in run.epochs(2):
    for a, b in loader:
        run.backward(clip_loss(model(a), model(b)))
        run.step(optimizer)
