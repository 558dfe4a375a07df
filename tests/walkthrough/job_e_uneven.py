"""(e) A shard-uneven world: global batches that leave shards empty, a data set smaller than the world; with batch norm
and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from .common import Case, Result, make_optimizer, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    import paceline

MICRO = 1
VARIANTS = ("small", "small_bn", "tiny", "tiny_bn")
Batch = dict[str, Tensor]


def shape(case: Case) -> tuple[int, int, int]:
    """Length of the data set, global batch, epochs: batches of 3, 3 and 1; or one of 2, which is all there is."""
    return (2, 8, 30) if case.variant.startswith("tiny") else (7, 3, 10)


class Patches(Dataset[dict[str, Any]]):
    """n random patches (2, 4, 4), with a number each to learn."""

    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(1)
        self.patches = torch.randn(n, 2, 4, 4, generator=g, dtype=torch.float64)
        self.targets = torch.randn(n, 1, generator=g, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"patch": self.patches[i], "target": self.targets[i], "index": i}


def build(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    batch_norm = case.variant.endswith("bn")
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=not batch_norm),
        nn.BatchNorm2d(4) if batch_norm else nn.GroupNorm(2, 4),  # a layer for each of three stages
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 1),
    )


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["patch"]), batch["target"])


def paceline_job(run: paceline.Run, case: Case) -> Result:
    n, global_batch, epochs = shape(case)
    record = Record()
    loader = run.loader(Patches(n), global_batch=global_batch, micro_batch=case.micro_batch, shuffle=True)
    model = build(case, case.seed + run.world.rank)
    model, optimizer = run.prepare(model, make_optimizer(case, model.parameters()))

    step_means = []
    for epoch in run.epochs(epochs):
        for batch in loader:
            if case.form == "closure":
                loss = run.forward_backward(loss_fn, model, batch)
            else:
                loss = loss_fn(model, batch)  # NaN where the shard is empty, as in PyTorch; it reaches nothing
                run.backward(loss)
            if case.micro_batch is None:
                step_means.append(float(run.mean(loss.detach())))  # by examples: an empty shard counts 0
            record.note(loader, batch, losses={"loss": loss})
            if run.step(optimizer):
                record.close_step(epoch)

    model.eval()
    seen, above = 0, 0
    errors = []
    with torch.no_grad():
        for batch in run.loader(Patches(2), global_batch=1, train=False):
            output = model(batch["patch"])
            seen += len(output)
            above += int((output > batch["target"]).sum())
            errors.append((output - batch["target"]).abs().flatten())
    metrics = {"seen": int(run.sum(seen)), "above": int(run.sum(above)), "steps": run.steps}
    gathered = run.gather(torch.cat(errors))  # (2,): examples in the order of ranks
    values = {"mean error": float(run.mean(torch.cat(errors))), "sum of errors": float(gathered.sum())}
    if step_means:
        values["mean loss"] = sum(step_means) / len(step_means)
    return result_of(model, metrics=metrics, values=values, record=record)


def plain_job(case: Case, steps: list[Step]) -> Result:
    n, global_batch, epochs = shape(case)
    data = Patches(n)
    model = build(case, case.seed)
    optimizer = make_optimizer(case, model.parameters())
    losses = []

    for epoch in legal_epochs(steps, n=n, global_batch=global_batch, epochs=epochs, micro_batch=case.micro_batch):
        for step in epoch:
            optimizer.zero_grad()
            loss = F.mse_loss(model(data.patches[step.batch.ids]), data.targets[step.batch.ids])
            loss.backward()
            optimizer.step()
            losses.append({"loss": loss.item()})

    model.eval()
    test = Patches(2)
    with torch.no_grad():
        output = model(test.patches)
    errors = (output - test.targets).abs()
    metrics = {"seen": 2, "above": int((output > test.targets).sum()), "steps": len(steps)}
    values = {"mean error": errors.mean().item(), "sum of errors": errors.sum().item()}
    if case.micro_batch is None:
        values["mean loss"] = sum(loss["loss"] for loss in losses) / len(losses)
    return result_of(model, metrics=metrics, values=values, losses=losses)
