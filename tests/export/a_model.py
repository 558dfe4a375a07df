"""Models for the tests of paceline export, as a user's module has them: --model tests.export.a_model:Net."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Tied weights, a buffer that is saved and one that is not, batch norm, dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.body = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5))
        self.out = nn.Linear(16, width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mean(1)
        return self.head(self.out(self.body(x))) * self.scale


class Named(Net):
    """Takes a mask by name, and returns a dict."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return {"logits": logits if mask is None else logits * mask, "best": logits.argmax(-1)}


class Bessel(Net):
    """Has an operator that ONNX has not."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.special.bessel_j0(super().forward(ids))  # the operator


class Branch(Net):
    """Looks at values."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        if x.sum() > 0:  # the branch
            x = x * 2
        return x


class OneSize(Net):
    """Asks how many examples there are, and takes another way for five: the size that is traced."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * 2 if len(ids) == 5 else x


class Restless(Net):
    """Draws random numbers in evaluation too."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x + torch.rand_like(x)


class Inside(nn.Module):
    """Net is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.net(ids)
        return found


def wide() -> Net:
    return Net(12)


def needs(width: int) -> Net:
    return Net(width)


def broken() -> Net:
    raise ValueError("no weights.bin")


def examples() -> Tensor:
    return torch.arange(12).reshape(3, 4)


def by_name() -> dict[str, Tensor]:
    return {"ids": examples(), "mask": torch.rand(3, 20)}


def uneven() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, 4), torch.zeros(2, 4)


a_number = 3
