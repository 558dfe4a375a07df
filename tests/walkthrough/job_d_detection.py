"""(d) Multi-scale training: an image size per step from Python's `random`, alike on all shards; an EMA of the weights
and a best score, both tracked; evaluation by gathering detections, lists of uneven length.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from .common import Case, Result, make_optimizer, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    import paceline

N, TEST, BATCH, EPOCHS = 27, 11, 6, 7  # 5 steps an epoch, the last of 3 examples
MICRO = 2
VARIANTS = ("",)
SIZES = (8, 10, 12)
Batch = dict[str, Tensor]


class Scenes(Dataset[dict[str, Any]]):
    """Noisy images (1, 8, 8) with 1 to 3 bright spots, and the map (1, 8, 8) that is 1 at the spots."""

    def __init__(self, count: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.maps = torch.zeros(count, 1, 8, 8, dtype=torch.float64)
        for i in range(count):
            for _ in range(1 + i % 3):
                y, x = torch.randint(8, (2,), generator=g)
                self.maps[i, 0, y, x] = 1.0
        self.images = self.maps * 2 + 0.5 * torch.randn(count, 1, 8, 8, generator=g, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.images[i], "map": self.maps[i], "index": i}


class Best:
    """The highest score so far and its epoch."""

    def __init__(self) -> None:
        self.score, self.epoch = -1, -1

    def offer(self, score: int, epoch: int) -> None:
        if score > self.score:
            self.score, self.epoch = score, epoch

    def state_dict(self) -> dict[str, int]:
        return {"score": self.score, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.score, self.epoch = state["score"], state["epoch"]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 1, 3, padding=1))


def loss_at(model: nn.Module, batch: Batch, size: int) -> Tensor:
    images = F.interpolate(batch["image"], size=size, mode="bilinear")
    maps = F.interpolate(batch["map"], size=size, mode="bilinear")
    return F.mse_loss(model(images), maps)


def detect(model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
    """For each image its spots: places that are above 0.3 and above their neighbours."""
    maps = model(batch["image"])
    peaks = (maps > 0.3) & (maps == F.max_pool2d(maps, 3, stride=1, padding=1))
    return [
        {"image": int(i), "spots": peak[0].nonzero(), "found": int((peak & (truth > 0)).sum())}
        for i, peak, truth in zip(batch["index"], peaks, batch["map"], strict=True)
    ]


def paceline_job(run: paceline.Run, case: Case) -> Result:
    record = Record()
    loader = run.loader(Scenes(N, 1), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True, name="scenes")
    test_loader = run.loader(Scenes(TEST, 2), global_batch=4, train=False)
    model = build(case.seed + run.world.rank)
    model, optimizer = run.prepare(model, make_optimizer(case, model.parameters()))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # a deep copy of the prepared model
    best = Best()
    run.track(ema=ema, best=best)

    detections: list[dict[str, Any]] = []
    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            size = random.choice(SIZES)
            if case.form == "closure":
                loss = run.forward_backward(partial(loss_at, size=size), model, batch)
            else:
                loss = loss_at(model, batch, size)
                run.backward(loss)
            record.note(loader, batch, shared={"size": size}, losses={"loss": loss})
            if run.step(optimizer):
                ema.update_parameters(model)
                record.close_step(epoch)

        with torch.no_grad():
            mine = [found for batch in test_loader for found in detect(ema, batch)]
        detections = run.gather(mine)  # of all processes
        best.offer(score_of(detections), epoch)

    return result_of(model, ema, metrics=metrics_of(detections, best), record=record)


def score_of(detections: list[dict[str, Any]]) -> int:
    """Right spots less wrong ones; each test image must be there once."""
    assert sorted(d["image"] for d in detections) == list(range(TEST)), "an image is missing or came twice"
    return sum(2 * d["found"] - len(d["spots"]) for d in detections)


def metrics_of(detections: list[dict[str, Any]], best: Best) -> dict[str, int]:
    spots = {f"spots in {d['image']}": len(d["spots"]) for d in detections}
    return {"score": score_of(detections), "best score": best.score, "best epoch": best.epoch} | spots


def plain_job(case: Case, steps: list[Step]) -> Result:
    data, test = Scenes(N, 1), Scenes(TEST, 2)
    model = build(case.seed)
    optimizer = make_optimizer(case, model.parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    best, losses = Best(), []

    detections: list[dict[str, Any]] = []
    epochs = legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch)
    for number, epoch in enumerate(epochs):
        for step in epoch:
            optimizer.zero_grad()
            batch = {"image": data.images[step.batch.ids], "map": data.maps[step.batch.ids]}
            loss = loss_at(model, batch, size_of(step))
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            losses.append({"loss": loss.item()})
        with torch.no_grad():
            detections = detect(ema, {"image": test.images, "map": test.maps, "index": torch.arange(TEST)})
        best.offer(score_of(detections), number)
    assert len({size_of(step) for step in steps}) == len(SIZES), "some sizes never come"

    return result_of(model, ema, metrics=metrics_of(detections, best), losses=losses)


def size_of(step: Step) -> int:
    """The image size of a step, which every process drew for itself, and again for every micro-batch."""
    sizes = {shared["size"] for yields in step.shared for shared in yields}
    assert len(sizes) == 1, f"one step was trained at several sizes: {sizes}"
    return int(sizes.pop())
