"""(h) A gradient penalty (backward through a backward), parameters frozen at first, later trained, at last frozen
again, and a regulariser that is no mean over examples.

Variants: `separate`: three backward calls, each with its own count; `within`: everything in one loss; `bn`: in one
loss, through batch norm, which must be differentiable twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

from .common import Case, Result, make_optimizer, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    from paceline import Run

N, BATCH, EPOCHS = 22, 5, 7  # 5 steps an epoch, the last of 2 examples
MICRO = 2
VARIANTS = ("separate", "within", "bn")
Batch = dict[str, Tensor]


class Patches(Dataset[dict[str, Any]]):
    """Random patches (2, 4, 4), with a number each to learn."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.patches = torch.randn(N, 2, 4, 4, generator=g, dtype=torch.float64)
        self.targets = torch.randn(N, 1, generator=g, dtype=torch.float64)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"patch": self.patches[i], "target": self.targets[i], "index": i}


class Scorer(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(64, 1)

    def features(self, patch: Tensor) -> Tensor:
        return self.norm(self.stem(patch)).tanh().flatten(1)

    def forward(self, patch: Tensor) -> Tensor:
        return self.head(self.features(patch))


def build(case: Case, seed: int) -> Scorer:
    torch.manual_seed(seed)
    return Scorer(case.variant == "bn")


def freeze(model: Scorer, epoch: int) -> None:
    """The stem learns from the third epoch on; the head does not learn in the last."""
    model.stem.requires_grad_(epoch >= 2)
    model.head.requires_grad_(epoch < EPOCHS - 1)


def task_loss(model: Scorer, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["patch"]), batch["target"])


def penalty_loss(model: Scorer, batch: Batch) -> Tensor:
    """The squared slope of the features, a mean over the examples; calls another method than forward."""
    patch = batch["patch"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.features(patch).square().sum(), patch, create_graph=True)
    return 0.01 * slope.square().flatten(1).sum(1).mean()


def weight_decay(model: Scorer) -> Tensor:
    return torch.stack([0.01 * p.square().sum() for p in model.parameters()]).sum()


def decay_total(model: Scorer, batch: Batch) -> paceline.Total:
    return paceline.Total(weight_decay(model), 1)  # the same on all shards: a mean over them


def joint_loss(model: Scorer, batch: Batch) -> Tensor:
    """One loss: the task, the slope of the output, and the weights, which a mean over examples leaves as they are."""
    patch = batch["patch"].detach().requires_grad_()
    output = model(patch)
    (slope,) = torch.autograd.grad(output.sum(), patch, create_graph=True)
    penalty = 0.1 * slope.square().flatten(1).sum(1).mean()
    return F.mse_loss(output, batch["target"]) + penalty + weight_decay(model)


def paceline_job(run: Run, case: Case) -> Result:
    record = Record()
    loader = run.loader(Patches(), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True)
    model = build(case, case.seed + run.world.rank)
    model, optimizer = run.prepare(model, make_optimizer(case, model.parameters()))

    for epoch in run.epochs(EPOCHS):
        freeze(model, epoch)
        for batch in loader:
            penalty = None
            if case.variant != "separate":
                if case.form == "closure":
                    loss = run.forward_backward(joint_loss, model, batch)
                else:
                    loss = joint_loss(model, batch)
                    run.backward(loss)
            elif case.form == "closure":
                loss = run.forward_backward(task_loss, model, batch)
                penalty = run.forward_backward(penalty_loss, model, batch)
                run.forward_backward(decay_total, model, batch)
            else:
                loss = task_loss(model, batch)
                run.backward(loss)
                penalty = penalty_loss(model, batch)
                run.backward(penalty)
                run.backward(weight_decay(model), count=1)
            losses = {"loss": loss} | ({"penalty": penalty} if penalty is not None else {})
            record.note(loader, batch, losses=losses)
            if run.step(optimizer):
                record.close_step(epoch)

    return result_of(model, record=record, metrics={"steps": run.steps})


def plain_job(case: Case, steps: list[Step]) -> Result:
    data = Patches()
    model = build(case, case.seed)
    optimizer = make_optimizer(case, model.parameters())
    losses = []

    epochs = legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch)
    for number, epoch in enumerate(epochs):
        freeze(model, number)
        for step in epoch:
            optimizer.zero_grad()
            batch = {"patch": data.patches[step.batch.ids], "target": data.targets[step.batch.ids]}
            if case.variant == "separate":
                loss, penalty = task_loss(model, batch), penalty_loss(model, batch)
                (loss + penalty + weight_decay(model)).backward()
                losses.append({"loss": loss.item(), "penalty": penalty.item()})
            else:
                loss = joint_loss(model, batch)
                loss.backward()
                losses.append({"loss": loss.item()})
            optimizer.step()

    return result_of(model, losses=losses, metrics={"steps": len(steps)})
