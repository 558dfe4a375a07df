"""An image classifier: image_before.py in plain PyTorch, on one device; image_after.py on any number of devices."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: the 1,797 grey 8 x 8 images that come with scikit-learn."""
    source = load_digits()
    images = torch.tensor(source.images.tolist()).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(source.target))
    train, test = random_split(whole, [1500, 297], torch.Generator().manual_seed(0))
    return TensorDataset(*whole[train.indices]), TensorDataset(*whole[test.indices])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device) -> float:
    model.eval()
    right = seen = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        right += int((model(images).argmax(1) == labels).sum())
        seen += len(labels)
    model.train()
    return right / seen


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    run = paceline.start(seed=0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)

    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_loader = run.prepare(model, optimizer, train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    for epoch in range(options.epochs):
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            run.backward(loss)
            run.step(optimizer)
        scheduler.step()
        print(f"epoch {epoch + 1:2}  test accuracy {accuracy(model, test_loader, device):.4f}")
    return model


if __name__ == "__main__":
    main()
