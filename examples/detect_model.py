"""A small detector without anchors: a CSP backbone, a path down and up through three scales, and a head for each.

Cross stage partial blocks are from Wang et al. (2020), "CSPNet"; the two paths are from Liu et al. (2018), "Path
Aggregation Network". Each cell of a scale predicts the distances from its centre to the four sides of a box, as
logarithms in units of its stride, and a score for each class (Tian et al. 2019, "FCOS").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(inputs: int, outputs: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class CSP(nn.Module):
    """Half of the channels go through residual blocks, the other half around them."""

    def __init__(self, inputs: int, outputs: int, blocks: int = 1) -> None:
        super().__init__()
        half = outputs // 2
        self.through, self.around, self.join = conv(inputs, half), conv(inputs, half), conv(2 * half, outputs)
        self.blocks = nn.ModuleList(nn.Sequential(conv(half, half), conv(half, half, 3)) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        y = self.through(x)
        for block in self.blocks:
            y = y + block(y)
        return self.join(torch.cat([y, self.around(x)], dim=1))


class Detector(nn.Module):
    """images (batch, 3, height, width) -> (batch, cells, 4 + classes), the cells of all scales in a row."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        a, b, c, d = width, 2 * width, 4 * width, 8 * width
        self.stem = nn.Sequential(conv(3, a, 3, 2), conv(a, b, 3, 2), CSP(b, b))
        self.stages = nn.ModuleList([
            nn.Sequential(conv(b, c, 3, 2), CSP(c, c, 2)),
            nn.Sequential(conv(c, d, 3, 2), CSP(d, d, 2)),
            nn.Sequential(conv(d, d, 3, 2), CSP(d, d)),
        ])  # fmt: skip
        self.up = nn.ModuleList([CSP(2 * d, d), CSP(d + c, c)])
        self.shrink = nn.ModuleList([conv(c, c, 3, 2), conv(d, d, 3, 2)])
        self.down = nn.ModuleList([CSP(c + d, d), CSP(2 * d, d)])
        self.heads = nn.ModuleList(
            nn.Sequential(conv(inputs, c, 3), conv(c, c, 3), nn.Conv2d(c, 4 + classes, 1)) for inputs in (c, d, d)
        )
        for head in self.heads:
            last = head[-1]  # type: ignore[index]
            nn.init.constant_(last.bias[:4], 0.7)  # boxes of four strides
            nn.init.constant_(last.bias[4:], -math.log(99))  # scores of 0.01: nearly all cells are background

    def forward(self, images: Tensor) -> Tensor:
        x, scales = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        small, middle, large = scales
        middle = self.up[0](torch.cat([F.interpolate(large, middle.shape[2:]), middle], dim=1))
        small = self.up[1](torch.cat([F.interpolate(middle, small.shape[2:]), small], dim=1))
        middle = self.down[0](torch.cat([self.shrink[0](small), middle], dim=1))
        large = self.down[1](torch.cat([self.shrink[1](middle), large], dim=1))
        found = [head(x).flatten(2) for head, x in zip(self.heads, (small, middle, large))]
        return torch.cat(found, dim=2).transpose(1, 2)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """No weight decay for biases and batch norm weights, which are vectors."""
    kernels, vectors = ([p for p in model.parameters() if (p.ndim > 1) is whole] for whole in (True, False))
    return [{"params": kernels, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def average(mean: Tensor, weights: Tensor, updates: Tensor | int) -> Tensor:
    """An exponential moving average with a faster decay at first, so that it forgets the initial weights."""
    decay = min(0.995, (1 + int(updates)) / (10 + int(updates)))
    return mean * decay + weights * (1 - decay)
