"""One rank (tests/ranks.py): writes a checkpoint under each of some strategies, or reads all there are under each.

    run_ranks(N, "tests.matrix.worker:main", "save" or "read", FOLDER, PLAN.json)

PLAN is [[the writer's or reader's name, its spec, the writers that it reads], ...]. A reader restores a checkpoint of
each writer into a model of other weights, exports the model, and saves again: what a process holds may be a part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.world import Served

STEPS = 4


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make(spec: str, seed: int) -> tuple[paceline.Run, nn.Module, torch.optim.Optimizer, paceline.Loader]:
    run = paceline.start(seed=3, strategy=spec or None, progress="off")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, _ = run.prepare(model, optimizer, StepLR(optimizer, 3))
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 6, generator=g), torch.randn(40, 2, generator=g))
    return run, model, optimizer, run.loader(data, global_batch=7, shuffle=True)


def train(
    run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: paceline.Loader, to: int
) -> None:
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
        if run.steps == to:
            return


def save(folder: Path, name: str, spec: str) -> None:
    run, model, optimizer, loader = make(spec, seed=5)
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
        if run.steps == STEPS:
            break
    run.save(folder / name)
    run.export(folder / name / "export.safetensors", model)
    run.close()


def read(folder: Path, name: str, spec: str, writer: str) -> None:
    at = folder / f"{name} of {writer}"
    run, model, _, _ = make(spec, seed=9)
    run.restore(folder / writer)
    assert run.steps == STEPS, f"{name} reads {writer}: at step {run.steps}"
    at.mkdir(exist_ok=True)
    run.export(at / "export.safetensors", model)
    run.save(at)
    run.close()


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """A server (parameter_server) ends in `prepare`: here it goes on with the next run."""
    with contextlib.suppress(Served):
        yield


def main(what: str, folder: str, plan: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name, spec, writers in json.loads(Path(plan).read_text()):
        try:
            if what == "save":
                with serving():
                    save(Path(folder), name, spec)
            for writer in writers if what == "read" else ():
                with serving():
                    read(Path(folder), name, spec, writer)
        except Exception:
            Path(folder, f"{name}.{what}.{os.environ.get('RANK', 0)}.error").write_text(traceback.format_exc())
            raise
