"""Digits with paceline.start: the job of horovod_before.py, which is in Horovod's idiom.

paceline run --nproc 2 examples/migrate/horovod_after.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

GLOBAL_BATCH = 60  # any number will do, on any number of processes


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: the 1,797 grey 8 x 8 images that come with scikit-learn."""
    source = load_digits()
    images, labels = torch.tensor(source.images.tolist()).unsqueeze(1) / 16, torch.tensor(source.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    run = paceline.start(seed=0)
    train_set, test_set = digits()
    train_loader = run.loader(train_set, global_batch=GLOBAL_BATCH, shuffle=True)
    test_loader = run.loader(test_set, global_batch=256, train=False)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(options.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            run.backward(loss)
            run.step(optimizer)
        right = seen = 0
        with torch.no_grad():
            for images, labels in test_loader:
                right += int((model(images).argmax(1) == labels).sum())
                seen += len(labels)
        run.print(f"epoch {epoch + 1:2}  test accuracy {run.ratio(right, seen):.4f}")  # each example once
    return model


if __name__ == "__main__":
    main()
