"""(a) An image classifier: random crops and flips in the data set, batch norm, a one-cycle schedule over
`loader.steps`, top-1 over a test set that divides by nothing.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset

from .common import Case, Result, make_optimizer, norm, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    import paceline

N, TEST, BATCH, EPOCHS = 53, 37, 16, 8  # 4 steps an epoch, the last of 5 examples
MICRO = 3
VARIANTS = ("", "workers")  # workers: the data set runs in two worker processes


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 8, 8) and their classes of 5, from a fixed linear teacher."""
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = torch.randn(count, 3, 8, 8, generator=g, dtype=torch.float64)
    return images, (images.flatten(1) @ teacher.T).argmax(1)


def crop(image: Tensor, top: int, left: int, flip: int) -> Tensor:
    padded = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
    return padded.flip(-1) if flip else padded


class Augmented(Dataset[dict[str, Any]]):
    """Draws a crop and a flip at every access, one number from each generator, and says what it drew."""

    def __init__(self) -> None:
        self.images, self.labels = make_data(N, 1)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = (random.randrange(3), int(np.random.randint(3)), int(torch.randint(2, ())))
        image = crop(self.images[i], *drawn)
        return {"image": image, "label": self.labels[i], "index": i, "crop": torch.tensor(drawn)}


def build(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        norm(case, 6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
        norm(case, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def paceline_job(run: paceline.Run, case: Case) -> Result:
    record = Record()
    workers = 2 if case.variant == "workers" else 0
    loader = run.loader(
        Augmented(), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True, num_workers=workers
    )
    test_loader = run.loader(TensorDataset(*make_data(TEST, 2)), global_batch=10, train=False)

    model = build(case, case.seed + run.world.rank)  # every process starts elsewhere; prepare takes rank 0's weights
    optimizer = make_optimizer(case, model.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * loader.steps)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)

    for epoch in run.epochs(EPOCHS):
        model.train()
        for batch in loader:
            if case.form == "closure":
                loss = run.forward_backward(loss_fn, model, batch)
            else:
                loss = F.cross_entropy(model(batch["image"]), batch["label"])
                run.backward(loss)
            record.note(loader, batch, losses={"loss": loss}, drawn=lambda part: {"crop": part["crop"]})
            if run.step(optimizer):
                record.close_step(epoch)

    model.eval()
    correct, losses = 0, []
    with torch.no_grad():
        for images, labels in test_loader:
            logits = model(images)
            correct += int((logits.argmax(1) == labels).sum())
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
    metrics = {"correct": int(run.sum(correct)), "steps": run.steps}
    return result_of(model, metrics=metrics, values={"test loss": float(run.mean(torch.cat(losses)))}, record=record)


def plain_job(case: Case, steps: list[Step]) -> Result:
    images, labels = make_data(N, 1)
    model = build(case, case.seed)
    optimizer = make_optimizer(case, model.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * math.ceil(N / BATCH))
    losses = []

    for epoch in legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch):
        for step in epoch:
            optimizer.zero_grad()
            ids, drawn = step.batch.ids, step.batch.drawn["crop"]
            crops = torch.stack([crop(images[i], *offsets) for i, offsets in zip(ids, drawn, strict=True)])
            loss = F.cross_entropy(model(crops), labels[ids])
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append({"loss": loss.item()})
    check_drawn(steps)

    model.eval()
    images, labels = make_data(TEST, 2)
    with torch.no_grad():
        logits = model(images)
    metrics = {"correct": int((logits.argmax(1) == labels).sum()), "steps": len(steps)}
    return result_of(
        model, metrics=metrics, values={"test loss": F.cross_entropy(logits, labels).item()}, losses=losses
    )


def check_drawn(steps: list[Step]) -> None:
    """Crops differ between examples, and between the epochs of one example; every value comes up."""
    crops: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(N)}
    for step in steps:
        for i, drawn in zip(step.batch.ids, step.batch.drawn["crop"], strict=True):
            crops[i].append(tuple(drawn))
    assert all(len(set(of_one)) > 1 for of_one in crops.values()), "an example is cropped alike in every epoch"
    assert len({tuple(of_one) for of_one in crops.values()}) == N, "two examples are cropped alike in all epochs"
    assert len({c for of_one in crops.values() for c in of_one}) == 3 * 3 * 2, "the generators draw alike"
