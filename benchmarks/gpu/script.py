"""A user's script, for verify and compare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    run = paceline.start(seed=3, tf32=False, progress="off")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                          nn.Linear(16 * 64, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.prepare(model, optimizer)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(200, 3, 8, 8, generator=g), torch.randint(10, (200,), generator=g))
    loader = run.loader(data, global_batch=20, shuffle=True)
    for _ in run.epochs(3):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)


if __name__ == "__main__":
    main()
