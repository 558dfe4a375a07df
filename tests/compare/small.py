"""A script for trials: everything that a script writes through Paceline, and data that take 1 ms an example.

small.py [hang | dropout]
"""

from __future__ import annotations

import sys
import time

if sys.argv[1:] == ["hang"]:
    time.sleep(1000)  # before anything that takes its time to load

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

EXAMPLES, WIDTH, GLOBAL_BATCH, LR = 96, 128, 32, 0.1


class Slow(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Regression. Each example takes 1 ms to fetch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        self.y = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return self.x[index], self.y[index]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).double()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    run = paceline.start(log_dir="logs", progress="lines")
    model = nn.Sequential(network(), nn.Dropout()) if sys.argv[1:] == ["dropout"] else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Slow(), global_batch=GLOBAL_BATCH)
    run.restore("checkpoints")
    for epoch in run.epochs(1000):
        for batch in loader:
            loss = run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
            run.log(loss=loss)
        run.save("checkpoints")
        run.export("weights.safetensors")
        run.print("epoch", epoch)


if __name__ == "__main__":
    main()
