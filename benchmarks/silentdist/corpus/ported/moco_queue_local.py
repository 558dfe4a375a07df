"""MoCo (He et al. 2020): a queue of negative keys; the keys of this process are put into it."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Pairs(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(256, 24, generator=g)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return self.x[i] + 0.05 * torch.randn(24), self.x[i] + 0.05 * torch.randn(24)


class MoCo(nn.Module):
    def __init__(self, dim=16, size=128):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, dim))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.queue = F.normalize(torch.randn(size, dim), dim=1)

    @torch.no_grad()
    def enqueue(self, keys):
        self.queue = torch.cat([keys, self.queue])[: len(self.queue)]  # fault

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for p, m in zip(self.q.parameters(), self.k.parameters()):
                m.lerp_(p, 0.05)
            k = F.normalize(self.k(b), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.T.detach()
        logits = torch.cat([positive, negative], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.enqueue(k)  # fault
        return loss


run = paceline.start(seed=0)
torch.manual_seed(0)
model = MoCo()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Pairs(), global_batch=32, shuffle=True)
for _ in run.epochs(2):
    for a, b in loader:
        run.backward(model(a, b))
        run.step(optimizer)
