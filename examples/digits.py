"""Handwritten digits: a small convolutional network, on one process or on several.

    python examples/digits.py
    paceline run --nproc 2 examples/digits.py --epochs 4 --out digits.safetensors

The data are the 1,797 grey 8 x 8 images that come with scikit-learn. Everything below is written for one device.

The activations are smooth (SiLU) so that you can compare the weights of two runs. Adding the same numbers in another
order changes the last bit, and a ReLU with an input that close to zero turns this bit into another gradient. With ReLU
the models are equally good, but after 180 steps their weights differ by 7e-2; with SiLU they differ by 4e-7.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import paceline

Batch = tuple[Tensor, Tensor]
TEST_EXAMPLES = 297


def digits(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: (image (1, 8, 8) from 0 to 1, label). data: an .npz with images and target, or None."""
    if data and not data.is_file():
        raise SystemExit(f"{data} is not there. Without --data the digits that come with scikit-learn are used.")
    source = np.load(data) if data else load_digits()
    images = torch.tensor(source["images"], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(source["target"], dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-TEST_EXAMPLES], order[-TEST_EXAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def block(channels_in: int, channels_out: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)  # batch norm would remove a bias
    return [conv, nn.BatchNorm2d(channels_out), nn.SiLU()]


def network(width: int = 32) -> nn.Module:
    body = [*block(1, width), *block(width, 2 * width), nn.AvgPool2d(2), *block(2 * width, 2 * width)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--data", type=Path, help="an .npz file with images and target (default: scikit-learn's)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=100, help="examples per step, over all processes")
    parser.add_argument("--out", type=Path, help="write the weights to this file, and the results to a .json beside it")
    options = parser.parse_args()

    run = paceline.start(seed=0)
    train_set, test_set = digits(options.data)
    train = run.loader(train_set, global_batch=options.global_batch, shuffle=True)
    test = run.loader(test_set, global_batch=512, train=False)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, options.epochs * train.steps)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        right = seen = 0
        for images, labels in test:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
        model.train()
        return run.ratio(right, seen)  # exact: every test example counts once, on any number of processes

    started, score = time.perf_counter(), 0.0
    for epoch in run.epochs(options.epochs):
        for batch in train:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
        score = accuracy()
        run.print(f"epoch {epoch + 1:2}  test accuracy {score:.4f}")  # Paceline prints the loss itself
    seconds = time.perf_counter() - started

    if options.out:
        run.export(options.out)
        if run.main:
            result = {"processes": run.world.size, "accuracy": score, "seconds": round(seconds, 3)}
            options.out.with_suffix(".json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
