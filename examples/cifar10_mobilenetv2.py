"""MobileNetV2 on CIFAR-10, trained by `paceline.fit`, on one process or on several.

    python examples/cifar10_mobilenetv2.py --data cifar-10-python.tar.gz
    paceline run --nproc 2 examples/cifar10_mobilenetv2.py --data cifar10.zip --epochs 100 --checkpoints checkpoints/
    paceline run --nproc 2 examples/cifar10_mobilenetv2.py --optimizer adam --lr 1e-3 --weights pretrained.safetensors

The network follows Sandler et al. (2018), table 2, with two changes for images of 32 x 32 pixels: the first convolution
and the second group do not halve the image. Batch norm is over the global batch, so the model does not depend on the
number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from cifar10_data import DataError, load
from pretrained import WeightsError, load_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline

Batch = tuple[Tensor, Tensor]
GROUPS = (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
"""Expansion, channels, blocks, stride of the first block."""


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6()]


class InvertedResidual(nn.Module):
    """Widen by `expansion`, apply a depthwise convolution, and narrow again, without an activation at the end."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        widen = convolution(inputs, inner, 1) if expansion > 1 else []
        self.body = nn.Sequential(
            *widen, *convolution(inner, inner, 3, stride, groups=inner), *convolution(inner, outputs, 1)[:-1]
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v2(width: float = 1.0, classes: int = 10) -> nn.Sequential:
    def channels(count: int) -> int:  # a multiple of 8
        return max(8, int(count * width + 4) // 8 * 8)

    inputs, last = channels(32), channels(1280) if width > 1 else 1280
    layers = convolution(3, inputs, 3)
    for expansion, outputs, blocks, stride in GROUPS:
        for block in range(blocks):
            layers.append(InvertedResidual(inputs, channels(outputs), stride if block == 0 else 1, expansion))
            inputs = channels(outputs)
    layers += [*convolution(inputs, last, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*layers)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def correct(outputs: Tensor, batch: Batch) -> Tensor:
    return outputs.argmax(1) == batch[1]  # one entry per image: the mean over all processes is exact


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains MobileNetV2 on CIFAR-10.")
    parser.add_argument("--data", type=Path, default="data/cifar-10-python.tar.gz", help="that, or cifar10.zip")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--limit", type=int, help="use this many training images, and a fifth of it as test images")
    parser.add_argument("--global-batch", type=int, default=128, help="images per step, over all processes")
    parser.add_argument("--width", type=float, default=1.0, help="multiplier of the channels")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--lr", type=float, help="default: 0.05 for sgd, 1e-3 for adam")
    parser.add_argument("--weights", type=Path, help="a file with a state dict to start from; its head may differ")
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    options = parser.parse_args()
    run = paceline.start(seed=0)
    model = mobilenet_v2(options.width)
    try:
        train_set, test_set = load(options.data, options.limit)
        skipped = load_weights(model, options.weights) if options.weights else []
    except (DataError, WeightsError) as error:
        parser.error(str(error))
    for line in skipped:
        run.print(f"skipped: {line}")
    if options.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), options.lr or 1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), options.lr or 0.05, 0.9, weight_decay=4e-5, nesterov=True)
    steps = options.epochs * -(-len(train_set) // options.global_batch)
    paceline.fit(
        model,
        loss_fn,
        train_set,
        optimizer=optimizer,
        scheduler=CosineAnnealingLR(optimizer, steps),
        global_batch=options.global_batch,
        epochs=options.epochs,
        evaluate_on=test_set,
        metrics={"accuracy": correct},
        checkpoints=options.checkpoints,
    )


if __name__ == "__main__":
    main()
