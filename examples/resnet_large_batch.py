"""A ResNet on CIFAR-10 with a large batch, with the recipe of Goyal et al. (2017), on one process or on several.

    python examples/resnet_large_batch.py --data cifar10.zip
    paceline run --nproc 2 examples/resnet_large_batch.py --data cifar10.zip --global-batch 2048
    paceline run --nproc 2 examples/resnet_large_batch.py --data cifar10.zip --global-batch 2048 --no-scaling

--lr is the learning rate for --base-batch. It is scaled with the batch (section 2.1), and increased gradually over the
first epochs (2.2). There is no weight decay for batch norm and biases. Each residual branch starts at zero: its last
batch norm has a weight of 0 (5.1). The network follows He et al. (2016), section 4.2, with 6 n + 2 layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from cifar10_data import DataError, load
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions, added to their input. If they halve and widen it, the input is subsampled and padded."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.wider = stride, outputs - inputs
        first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.body = nn.Sequential(*first, *second)
        nn.init.zeros_(second[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.wider))
        return F.relu(shortcut + self.body(x))


def resnet(blocks: int, width: int, classes: int = 10) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for group in range(3):
        for block in range(blocks):
            halves, outputs = group > 0 and block == 0, width * 2**group
            layers.append(Residual(outputs // 2 if halves else outputs, outputs, 2 if halves else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """No weight decay for biases and norm weights, which are vectors."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is whole] for whole in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def correct(outputs: Tensor, batch: Batch) -> Tensor:
    return outputs.argmax(1) == batch[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a ResNet on CIFAR-10 with a large batch.")
    parser.add_argument("--data", type=Path, default="data/cifar-10-python.tar.gz", help="that, or cifar10.zip")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="epochs of learning rate warm-up")
    parser.add_argument("--limit", type=int, help="use this many training images, and a fifth of it as test images")
    parser.add_argument("--global-batch", type=int, default=128, help="images per step, over all processes")
    parser.add_argument("--base-batch", type=int, default=128, help="the global batch that --lr was tuned for")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--no-scaling", action="store_true", help="use --lr unscaled and without warm-up")
    parser.add_argument("--blocks", type=int, default=3, help="n of 6 n + 2 layers")
    parser.add_argument("--width", type=int, default=16, help="channels of the first third")
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    options = parser.parse_args()
    if not 0 <= options.warmup < options.epochs:
        parser.error(
            f"--warmup {options.warmup} --epochs {options.epochs}: the warm-up must be shorter than the whole."
        )
    try:
        train_set, test_set = load(options.data, options.limit)
    except DataError as error:
        parser.error(str(error))

    paceline.start(seed=0)
    model, size = resnet(options.blocks, options.width), options.global_batch
    scaled = not options.no_scaling and size > options.base_batch and options.warmup > 0
    lr = options.lr if options.no_scaling else paceline.scale_lr(options.lr, options.base_batch, size)
    optimizer = torch.optim.SGD(decay_groups(model, 1e-4), lr=lr, momentum=0.9, nesterov=True)
    epoch = -(-len(train_set) // size)  # steps
    rise = options.warmup * epoch if scaled else 0
    cosine = CosineAnnealingLR(optimizer, options.epochs * epoch - rise)
    schedule = paceline.warmup(optimizer, rise, start=options.lr / lr, then=cosine) if rise else cosine
    paceline.fit(
        model,
        loss_fn,
        train_set,
        optimizer=optimizer,
        scheduler=schedule,
        global_batch=size,
        epochs=options.epochs,
        evaluate_on=test_set,
        metrics={"accuracy": correct},
        checkpoints=options.checkpoints,
    )


if __name__ == "__main__":
    main()
