"""The job of all scripts in this folder: a small network on the 1,797 digits that come with scikit-learn.

Weights are drawn from a seed of their own, so that all scripts start alike. The training set has 1,500 examples, which
batches of 60 divide, and 60 is divided by 2, 3 and 4 processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split


def options(batch: int = 60) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=batch, help="per process, or global: as the tool counts")
    parser.add_argument("--devices", type=int, default=1, help="where the script itself chooses how many")
    parser.add_argument("--out", type=Path, default="model.out", help="the trained weights")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of (image (1, 8, 8) from 0 to 1, label)."""
    source = load_digits()
    images = torch.tensor(source.images.tolist()).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(source.target))
    train, test = random_split(whole, [1500, 297], torch.Generator().manual_seed(0))
    return TensorDataset(*whole[train.indices]), TensorDataset(*whole[test.indices])


def groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def network(norm: Callable[[int], nn.Module] = groups) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), norm(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), norm(32), nn.SiLU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
