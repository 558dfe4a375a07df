"""(f) Stopped in mid-epoch and resumed, several times, on another number of processes or on the same.

Variant `other`: dropout off, compared with the plain job. Variant `exact`: dropout on and always the same number of
processes, compared bit for bit with the same job undisturbed.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from .common import Case, Result, make_optimizer, norm, result_of, state_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    import paceline

N, BATCH, EPOCHS = 41, 9, 7  # 5 steps an epoch, the last of 5 examples
MICRO = 2
VARIANTS = ("other", "exact")


class Scaled(Dataset[dict[str, Any]]):
    """Random patches (2, 4, 4), scaled at every access by a number drawn from all three generators."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.patches = torch.randn(N, 2, 4, 4, generator=g, dtype=torch.float64)
        self.labels = (self.patches.sum((1, 2, 3)) > 0).long()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        scale = (
            random.uniform(0.5, 1.0) + np.random.uniform(0.0, 0.3) + float(torch.rand((), dtype=torch.float64)) * 0.2
        )
        return {"patch": self.patches[i] * scale, "label": self.labels[i], "index": i, "scale": scale}


def build(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        norm(case, 4),
        nn.Tanh(),
        nn.Dropout(0.2 if case.variant == "exact" else 0.0),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def make_schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
    """A warm-up over a tenth of the steps, then a half cosine."""
    warm = steps // 10
    return LambdaLR(
        optimizer,
        lambda k: (k + 1) / warm if k < warm else 0.5 + 0.5 * math.cos(math.pi * (k - warm) / (steps - warm)),
    )


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["patch"]), batch["label"])


def paceline_job(run: paceline.Run, case: Case) -> Result:
    record, folder = Record(), Path(case.folder)
    loader = run.loader(Scaled(), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True, name="scaled")
    first_part = not folder.exists()
    model = build(case, case.seed + run.world.rank if first_part else 999)  # other weights, that restore replaces
    optimizer = make_optimizer(case, model.parameters())
    schedule = make_schedule(optimizer, EPOCHS * loader.steps)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.track(ema=ema)
    restored = run.restore(folder, missing_ok=True)
    assert restored != first_part, f"restore said {restored}"

    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            noise = float(torch.rand(()))
            if case.form == "closure":
                loss = run.forward_backward(loss_fn, model, batch)
            else:
                loss = loss_fn(model, batch)
                run.backward(loss)
            drawn = {"shared": {"noise": noise}, "drawn": lambda part: {"scale": part["scale"]}}
            record.note(loader, batch, losses={"loss": loss}, **drawn)
            if run.step(optimizer):
                ema.update_parameters(model)
                record.close_step(epoch)
                if run.steps in case.stops:
                    run.save(folder)
                    return result_of(model, ema, record=record, finished=False)

    state = state_of(optimizer, schedule)
    return result_of(model, ema, state=state, record=record, metrics={"steps": run.steps})


def plain_job(case: Case, steps: list[Step]) -> Result:
    data = Scaled()
    model = build(case, case.seed)
    optimizer = make_optimizer(case, model.parameters())
    schedule = make_schedule(optimizer, EPOCHS * math.ceil(N / BATCH))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []

    for epoch in legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch):
        for step in epoch:
            optimizer.zero_grad()
            ids = step.batch.ids
            scale = torch.tensor(step.batch.drawn["scale"], dtype=torch.float64)[:, None, None, None]
            loss = F.cross_entropy(model(data.patches[ids] * scale), data.labels[ids])
            loss.backward()
            optimizer.step()
            schedule.step()
            ema.update_parameters(model)
            losses.append({"loss": loss.item()})
    check_drawn(steps)

    state = state_of(optimizer, schedule)
    return result_of(model, ema, state=state, losses=losses, metrics={"steps": len(steps)})


def check_drawn(steps: list[Step]) -> None:
    """No scale and no noise of the loop comes twice, in any epoch, step, shard or micro-batch, nor after a resume."""
    scales = [scale for step in steps for scale in step.batch.drawn["scale"]]
    noises = [shared["noise"] for step in steps for yields in step.shared for shared in yields]
    assert len(set(scales)) == len(scales) == N * EPOCHS, "an example was scaled alike twice"
    assert len(set(noises)) == len(noises), "noise repeats over steps, shards or micro-batches"
