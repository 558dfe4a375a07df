"""SimCLR (Chen et al. 2020) on CIFAR-10: match two views of each image among all images of the global batch.

    python examples/contrastive.py --data cifar10.zip
    paceline run --nproc 2 examples/contrastive.py --data cifar10.zip --limit 5000 --epochs 10

The loss compares a view with all other images of the global batch. `run.gather` joins the projections of all processes,
and its backward returns the gradients to them. Without it each process would compare fewer images, so the loss would
depend on the number of processes. For the same reason there is no --micro-batch.

Training uses no labels. To evaluate, each test image gets the class of the nearest training images.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from cifar10_data import DEVIATION, MEAN, DataError, load
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

NEIGHBOURS = 20


class Views(Dataset[Tensor]):
    """Two random views (2, 3, 32, 32) of each image: a crop, mirrored or not, in other colours."""

    def __init__(self, images: Tensor) -> None:
        self.images = images  # uint8 (n, 32, 32, 3)

    def __len__(self) -> int:
        return len(self.images)

    def view(self, image: Tensor) -> Tensor:
        side = int(32 * math.sqrt(torch.empty(()).uniform_(0.2, 1.0)))
        top, left = torch.randint(33 - side, (2,)).tolist()
        part = F.interpolate(image[None, :, top : top + side, left : left + side], size=32, mode="bilinear")[0]
        part = part.flip(2) if torch.rand(()) < 0.5 else part
        if torch.rand(()) < 0.8:  # brightness, contrast, and the strength of each colour
            part = (part - part.mean()) * torch.empty(()).uniform_(0.6, 1.4) + part.mean()
            part = part * torch.empty(3, 1, 1).uniform_(0.6, 1.4)
        part = part.mean(0).expand(3, -1, -1) if torch.rand(()) < 0.2 else part
        return (part.clamp(0, 1) - MEAN[:, None, None]) / DEVIATION[:, None, None]

    def __getitem__(self, index: int) -> Tensor:
        image = (self.images[index] / 255).permute(2, 0, 1)
        return torch.stack([self.view(image), self.view(image)])


def encoder(width: int) -> nn.Sequential:
    """Images (n, 3, 32, 32) to features (n, 4 * width)."""

    channels, layers = [3, width, width, 2 * width, 2 * width, 4 * width], []
    for inputs, outputs, stride in zip(channels, channels[1:], (1, 2, 1, 2, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """The mean cross-entropy of matching each of 2 n projections to its partner. z: (n, 2, d), two per image."""
    z = F.normalize(z.flatten(0, 1), dim=1)  # (2 n, d)
    alike = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -math.inf)
    return F.cross_entropy(alike, torch.arange(len(z), device=z.device) ^ 1)


def nearest(run: paceline.Run, model: nn.Module, train_set: Any, test_set: Any, size: int) -> float:
    """Test accuracy of a vote among the nearest training images, by the angle of features."""

    def features(model: Any, batch: Any) -> Tensor:
        return F.normalize(model[0](batch[0]), dim=1)

    train, test = (run.predict(model, data, global_batch=size, fn=features) for data in (train_set, test_set))
    closest = (test @ train.T).topk(min(NEIGHBOURS, len(train)), dim=1)
    votes = test.new_zeros(len(test), 10).scatter_add_(1, train_set.labels[closest.indices], closest.values)
    return float((votes.argmax(1) == test_set.labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns features of CIFAR-10 without labels.")
    parser.add_argument("--data", type=Path, default="data/cifar-10-python.tar.gz", help="that, or cifar10.zip")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--limit", type=int, help="use this many training images, and a fifth of it as test images")
    parser.add_argument("--global-batch", type=int, default=256, help="images per step, over all processes")
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--every", type=int, default=5, help="evaluate the features every so many epochs")
    options = parser.parse_args()
    try:
        train_set, test_set = load(options.data, options.limit)
    except DataError as error:
        parser.error(str(error))

    run = paceline.start(seed=0)
    loader = run.loader(Views(train_set.images), global_batch=options.global_batch, shuffle=True)
    train_set.augment = False
    features = 4 * options.width
    projector = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 64))
    model = nn.Sequential(encoder(options.width), projector)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=1e-4))
    run.print(f"epoch  0  nearest neighbours {nearest(run, model, train_set, test_set, options.global_batch):.4f}")
    for epoch in run.epochs(options.epochs):
        for views in loader:  # (n, 2, 3, 32, 32), of this process's images
            projections = model(views.flatten(0, 1)).unflatten(0, views.shape[:2])
            run.backward(nt_xent(run.gather(projections), options.temperature))
            run.step(optimizer)
        if (epoch + 1) % options.every == 0 or epoch + 1 == options.epochs:
            accuracy = nearest(run, model, train_set, test_set, options.global_batch)
            run.print(f"epoch {epoch + 1:2}  nearest neighbours {accuracy:.4f}")


if __name__ == "__main__":
    main()
