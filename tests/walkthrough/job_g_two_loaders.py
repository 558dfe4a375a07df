"""(g) Two loaders zipped, each with its own global batch and backward call; a validation pass between two steps; a
`break` in mid-epoch.
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

FEW, MANY, TEST, EPOCHS = 31, 70, 13, 10
BATCH_FEW, BATCH_MANY = 8, 12  # 4 steps with labels, the last of 7; 6 steps without, of which zip takes 4
MICRO = 2  # with labels; 3 without: as many micro-batches of each, which is what zip needs
VARIANTS = ("",)
TAKEN = [2 if epoch % 2 else 4 for epoch in range(EPOCHS)]  # steps of an epoch; the odd ones are left early
Batch = dict[str, Tensor]


class Points(Dataset[dict[str, Any]]):
    """Points (6,) of two classes."""

    def __init__(self, count: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 6, generator=g, dtype=torch.float64)
        self.labels = (self.points[:, 0] * self.points[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"point": self.points[i], "label": self.labels[i], "index": i}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["point"]), batch["label"])


def agreement_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A point and the same point moved a little should be judged alike, and not without opinion."""
    here, there = model(batch["point"]), model(batch["point"] + 0.1)
    return F.mse_loss(here, there) - 0.05 * here.softmax(1).square().mean()


def paceline_job(run: paceline.Run, case: Case) -> Result:
    record = Record()
    micro_few, micro_many = micro_batches(case)
    few = run.loader(Points(FEW, 1), global_batch=BATCH_FEW, micro_batch=micro_few, shuffle=True, name="few")
    many = run.loader(Points(MANY, 2), global_batch=BATCH_MANY, micro_batch=micro_many, shuffle=True, name="many")
    test = run.loader(Points(TEST, 3), global_batch=5, train=False)
    model = build(case.seed + run.world.rank)
    model, optimizer = run.prepare(model, make_optimizer(case, model.parameters()))

    correct: list[int] = []
    for epoch in run.epochs(EPOCHS):
        pairs = zip(few, many) if case.form == "closure" else ((f, m) for m, f in zip(many, few))
        steps_here = 0  # (m first: a batch of `many` is fetched and dropped at the end of the epoch)
        for batch_few, batch_many in pairs:
            assert few.epoch == many.epoch == epoch
            if case.form == "closure":
                loss = run.forward_backward(label_loss, model, batch_few, of=few)
                agreement = run.forward_backward(agreement_loss, model, batch_many, of=many)
            else:
                loss = label_loss(model, batch_few)
                run.backward(loss, of=few)
                agreement = agreement_loss(model, batch_many)
                run.backward(agreement, of=many)
            record.note(few, batch_few, stream="few", losses={"label": loss})
            record.note(many, batch_many, stream="many", losses={"agreement": agreement})
            if run.step(optimizer):
                record.close_step(epoch)
                steps_here += 1
                if run.steps % 3 == 0:
                    correct.append(validate(run, model, test))
                if steps_here == TAKEN[epoch] and epoch % 2:
                    break

    metrics = {f"correct in pass {k}": count for k, count in enumerate(correct)} | {"steps": run.steps}
    return result_of(model, metrics=metrics, record=record)


def validate(run: paceline.Run, model: nn.Module, test: Any) -> int:
    """How many of the test set are right; draws random numbers, which must not disturb the training."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(b["point"]).argmax(1) == b["label"]).sum()) + 0 * int(torch.rand(3).sum()) for b in test)
    model.train()
    return int(run.sum(right))


def micro_batches(case: Case) -> tuple[int | None, int | None]:
    return case.micro_batch, case.micro_batch and case.micro_batch * BATCH_MANY // BATCH_FEW


def plain_job(case: Case, steps: list[Step]) -> Result:
    few, many, test = Points(FEW, 1), Points(MANY, 2), Points(TEST, 3)
    model = build(case.seed)
    optimizer = make_optimizer(case, model.parameters())
    losses, correct = [], []

    micro_few, micro_many = micro_batches(case)
    for stream, n, size, micro in (("few", FEW, BATCH_FEW, micro_few), ("many", MANY, BATCH_MANY, micro_many)):
        legal_epochs(steps, n=n, global_batch=size, epochs=EPOCHS, micro_batch=micro, stream=stream, taken=TAKEN)
    for number, step in enumerate(steps, start=1):
        ids, more_ids = step.batches["few"].ids, step.batches["many"].ids
        optimizer.zero_grad()
        loss = label_loss(model, {"point": few.points[ids], "label": few.labels[ids]})
        agreement = agreement_loss(model, {"point": many.points[more_ids]})
        (loss + agreement).backward()
        optimizer.step()
        losses.append({"label": loss.item(), "agreement": agreement.item()})
        if number % 3 == 0:
            with torch.no_grad():
                correct.append(int((model(test.points).argmax(1) == test.labels).sum()))

    metrics = {f"correct in pass {k}": count for k, count in enumerate(correct)} | {"steps": len(steps)}
    return result_of(model, metrics=metrics, losses=losses)
