"""Models and runs whose gradients can be summed up, for tests of ddp with reducers and codecs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.strategies.checks import BATCH, X, started
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import same_bits
from paceline.comm.mesh import world_group

CODECS = ("bf16", "fp16", "powersgd:rank=2", "topk:ratio=0.1")
WIRES = [f"codec={codec}" for codec in CODECS] + [
    "codec=bf16,reducer=ring",
    "codec=fp16,reducer=hierarchical",
    "codec=powersgd:rank=1,reducer=reduce_to_one",
    "codec=topk:ratio=0.3,reducer=ring,bucket_mb=0.0005",
]


def alike(model: nn.Module) -> None:
    """The same bits on all ranks."""
    assert not same_bits.digest_mismatch(list(model.state_dict().items()), world_group())


class Linear(nn.Module):
    """A loss that is linear in all parameters, so that its gradients do not depend on them, and can be summed up: a
    matrix, a convolution in channels_last, a vector, a complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(torch.zeros(7, 6))
        self.kernel = nn.Parameter(torch.zeros(5, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.vector = nn.Parameter(torch.zeros(6))
        self.complex = nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64))
        self.mixed = [torch.randn(7, 6, generator=generator), torch.randn(5, 3, 2, 2, generator=generator)]

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        real = (self.matrix * self.mixed[0] * x[:, None]).sum((1, 2)) + (x * self.vector).sum(1)
        kernel = (self.kernel * self.mixed[1]).sum((1, 2, 3))[None] * x[:, :5]
        return real + kernel.sum(1) + (self.complex * x[:, None] * (1 + 2j)).real.sum((1, 2))


def exact(factors: list[float]) -> Linear:
    """With the sum of all global batches' gradients as its weights; of the batches, times their factors."""
    model = Linear()
    for number, factor in enumerate(factors):
        start = number * BATCH % 20
        (model(X[start : start + BATCH]).mean() * factor).backward()
    for p in model.parameters():
        p.data = p.grad.clone()  # type: ignore[union-attr]
    return model


def undelivered(run: paceline.Run) -> dict[str, Tensor]:
    """The residuals, summed over all ranks, as a checkpoint holds them."""
    found: dict[str, Tensor] = run._strategy.state_dict()["codec"]["residual"]
    return found


def balanced(run: paceline.Run, model: nn.Module, factors: list[float], tolerance: float = 2e-6) -> None:
    """0 - weights + residuals = the sum of all gradients."""
    left = undelivered(run)
    total = kept = 0.0
    for (name, p), expected in zip(model.named_parameters(), exact(factors).parameters(), strict=True):
        residual = left.get(name, torch.zeros_like(_real(p)))
        difference = -_real(p) + residual - _real(expected)
        assert difference.norm() < tolerance * len(factors) * _real(expected).norm(), (name, difference.norm())
        total, kept = total + float(_real(expected).norm()), kept + float(residual.norm())
    assert kept > 1e-4 * total / len(factors), "nothing was held back: no test"
    alike(model)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def rows() -> TensorDataset:
    return TensorDataset(X[:20])


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).mean()


def train_and_save(run: paceline.Run, model: nn.Module, loader: Any, optimizer: Any, stop: int, where: Path) -> None:
    for _ in run.epochs(100):
        for batch in loader:
            run.backward(loss_of(model, batch))
            run.step(optimizer)
            if run.steps == stop:
                run.save(where)
                return


def save_for_others() -> str:
    """Three steps with a codec on this many processes; the directory."""
    base = world_group().broadcast(tempfile.mkdtemp())
    with started(strategy="ddp:codec=topk:ratio=0.1", progress="off") as run:
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer)
        train_and_save(run, model, run.loader(rows(), global_batch=BATCH), optimizer, 3, Path(base))
    return str(base)
