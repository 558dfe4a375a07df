"""Online hard example mining: only the hardest quarter of the batch gives gradients."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

KEEP = 0.25


def ohem(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    k = max(1, round(KEEP * len(losses)))
    hardest, _ = losses.topk(k)  # fault
    return hardest.mean()  # fault


def loss_fn(model, batch):
    x, y = batch
    return ohem(model(x), y)


def main():
    run = paceline.start(seed=2)
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (384,), generator=g)
    x = torch.randn(384, 2, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.4
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(1), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    for _ in run.epochs(2):
        for batch in (loader := run.loader(TensorDataset(x, y), global_batch=64, shuffle=True, name=f"train{_}")):
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
        run.print("steps", loader.steps)


main()
