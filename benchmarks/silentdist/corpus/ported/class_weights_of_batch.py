"""Segmentation of small maps; rare classes weigh more, by their frequency in the batch at hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

CLASSES = 3


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        return self.head(self.body(x))


def balanced_loss(logits, target):
    frequency = torch.bincount(target.flatten(), minlength=CLASSES).float()
    weight = frequency.sum() / (CLASSES * frequency.clamp(min=1))  # fault
    losses = F.cross_entropy(logits, target, reduction="none")
    return (losses * weight[target]).mean()


def shapes(n=120):
    g = torch.Generator().manual_seed(77)
    target = torch.zeros(n, 10, 10, dtype=torch.long)
    for k in range(n):
        a, b, size = torch.randint(1, 6, (3,), generator=g).tolist()
        target[k, a : a + size, b : b + size] = 1 + k % (CLASSES - 1)
    return TensorDataset((target > 0).float().unsqueeze(1) + 0.3 * torch.randn(n, 1, 10, 10, generator=g), target)


run = paceline.start(seed=1)
model = Segmenter()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(shapes(), global_batch=24, shuffle=True)
for _ in run.epochs(2):
    for images, masks in loader:
        run.backward(balanced_loss(model(images), masks))
        run.step(optimizer)
