"""scale_lr and warmup beside the formulas of Goyal et al. 2017, and through a restart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import paceline
from paceline.errors import SettingError, UsageError


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sgd(*lrs: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], momentum=0.9)


def rates(optimizer: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler, updates: int) -> list[list[float]]:
    """The learning rate of each group at each update."""
    found = []
    for _ in range(updates):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_the_rules() -> None:
    assert paceline.scale_lr(0.1, 256, 8192) == 0.1 * 32
    assert paceline.scale_lr(0.1, 256, 64) == 0.1 / 4
    assert paceline.scale_lr(1e-3, 256, 4096, rule="sqrt") == 1e-3 * 4
    assert paceline.scale_lr(1e-3, 100, 200, "sqrt") == pytest.approx(1e-3 * math.sqrt(2), rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.1, 256, 0), "batch=0"),
        ((0.1, 0, 256), "base_batch=0"),
        ((0.1, 256, 2.5), "batch=2.5"),
        ((0.0, 256, 512), "base_lr=0.0"),
        ((float("nan"), 256, 512), "base_lr=nan"),
        (("0.1", 256, 512), "base_lr='0.1'"),
        ((0.1, 256, 512, "liner"), "Did you mean 'linear'"),
    ],
)
def test_nonsense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        paceline.scale_lr(*arguments)


def test_a_warm_up_follows_the_formula_at_each_step() -> None:
    optimizer = sgd(3.2, 0.5)
    found = rates(optimizer, paceline.warmup(optimizer, 5, start=1 / 32), 9)
    for t, values in enumerate(found):
        factor = 1 / 32 + (1 - 1 / 32) * min(t / 5, 1)
        assert values == pytest.approx([3.2 * factor, 0.5 * factor], rel=1e-15), t
    assert found[5] == [3.2, 0.5], "exactly the rate that was given, once the warm-up is over"


SCHEDULES = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "step": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[2.0, 1.0], total_steps=12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_another_schedule_follows_from_its_own_beginning(name: str) -> None:
    """Bit for bit what it does without a warm-up, `steps` updates later; before that, its first rate is approached."""
    alone, warmed = sgd(1.0, 0.25), sgd(1.0, 0.25)
    expected = rates(alone, SCHEDULES[name](alone), 10)
    found = rates(warmed, paceline.warmup(warmed, 4, start=0.0, then=SCHEDULES[name](warmed)), 14)
    assert found[4:] == expected
    for t in range(4):
        assert found[t] == pytest.approx([lr * t / 4 for lr in expected[0]], rel=1e-15)


def test_a_learning_rate_that_is_a_tensor() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    schedule = paceline.warmup(optimizer, 2, start=0.5)
    found = []
    for _ in range(4):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    assert found == pytest.approx([0.25, 0.375, 0.5, 0.5])


def test_warm_ups_that_cannot_be() -> None:
    optimizer = sgd(1.0)
    for arguments, message in (
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": 5, "start": 1.5}, "start=1.5"),
        ({"steps": 5, "then": lr_scheduler.StepLR(sgd(1.0), 1)}, "another optimizer"),
        ({"steps": 5, "then": lr_scheduler.ReduceLROnPlateau(optimizer)}, "metric"),
        ({"steps": 5, "then": 3}, "then=int"),
    ):
        with pytest.raises(SettingError, match=message):
            paceline.warmup(optimizer, **arguments)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="optimizer=list"):
        paceline.warmup([], 5)  # type: ignore[arg-type]


def test_a_schedule_that_is_moved_twice_is_noticed() -> None:
    optimizer = sgd(1.0)
    then = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    schedule = paceline.warmup(optimizer, 5, then=then)
    optimizer.step()
    then.step()
    with pytest.raises(UsageError, match="something else changes it"):
        schedule.step()


@pytest.mark.parametrize("stop", [2, 3, 6])
def test_it_goes_on_after_a_restart_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    """Through run.prepare, run.save and run.restore, stopped in the warm-up, at its end, and after it."""

    def train(steps: int, *, saved_at: int = -1, restored: bool = False) -> tuple[list[float], list[torch.Tensor]]:
        run = paceline.start(seed=3, device="cpu")
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        then = lr_scheduler.CosineAnnealingLR(optimizer, 7)
        schedule = paceline.warmup(optimizer, 3, start=0.1, then=then)
        model, optimizer, schedule = run.prepare(model, optimizer, schedule)
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        loader = run.loader(data, global_batch=4)
        if restored:
            run.restore(tmp_path)
        used: list[float] = []
        for batch in loader:
            used.append(optimizer.param_groups[0]["lr"])
            run.forward_backward(lambda model, batch: model(batch).square().mean(), model, batch)
            run.step(optimizer)
            if run.steps == saved_at:
                run.save(tmp_path)
            if run.steps == steps:
                break
        weights = [p.detach().clone() for p in model.parameters()]
        run.close()
        return used, weights

    whole, weights = train(10)
    first, _ = train(stop, saved_at=stop)
    second, resumed = train(10, restored=True)
    assert first + second == whole
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))


def test_a_saved_schedule_of_another_form_is_refused() -> None:
    optimizer = sgd(1.0)
    state = paceline.warmup(optimizer, 3).state_dict()
    with pytest.raises(UsageError, match="made without then="):
        paceline.warmup(optimizer, 3, then=lr_scheduler.StepLR(optimizer, 1)).load_state_dict(state)
