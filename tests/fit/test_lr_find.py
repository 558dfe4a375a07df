"""The learning-rate range test beside a plain loop over whole batches; and what it leaves as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.fit.problem import BATCH, TRAIN, N, X, Y, equal, loss_fn, near, net, started, unchanged, weighted
from torch import nn

import paceline
from paceline.data.randomness import permutation
from paceline.errors import SettingError, UsageError
from paceline.fitting.lr_finder import LearningRates

pytestmark = pytest.mark.timeout(240)
STEPS, LOW, HIGH = 40, 1e-4, 30.0


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def by_hand() -> tuple[list[float], list[float], list[float]]:
    """Rates, losses, and the mean of the losses with weights 0.98 ** age: until it is 4 times its least."""
    model = net()
    optimizer = sgd(model)
    rates, losses, smoothed = [], [], []
    for epoch in range(STEPS):
        for rows in torch.from_numpy(permutation(N, 0, "train", epoch)).split(BATCH):
            rate = LOW * (HIGH / LOW) ** (len(rates) / (STEPS - 1))
            optimizer.param_groups[0]["lr"] = rate
            loss = loss_fn(model, [X[rows], Y[rows]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            weights = [0.98**age for age in range(len(losses), -1, -1)]
            mean = sum(w * x for w, x in zip(weights, [*losses, value], strict=True)) / sum(weights)
            if len(losses) > 1 and mean > 4 * min(smoothed):
                return rates, losses, smoothed
            rates, losses, smoothed = [*rates, rate], [*losses, value], [*smoothed, mean]
            if len(rates) == STEPS:
                return rates, losses, smoothed
    raise AssertionError


def find(model: nn.Module, optimizer: Any, **options: Any) -> LearningRates:
    given: dict[str, Any] = {"min_lr": LOW, "max_lr": HIGH, "steps": STEPS, "settings": {"device": "cpu"}, **options}
    return paceline.lr_find(model, given.pop("loss", loss_fn), TRAIN, optimizer=optimizer, global_batch=BATCH, **given)


@pytest.mark.ranks(1, conformance=2)
def test_the_losses_are_those_of_a_plain_loop() -> None:
    rates, losses, smoothed = by_hand()
    assert len(rates) > 20
    for options in ({}, {"micro_batch": 2}):
        model = net()
        found = find(model, sgd(model), **options)
        near(torch.tensor(found.lrs), torch.tensor(rates), 1e-6)
        near(torch.tensor(found.losses), torch.tensor(losses), 1e-4)
        near(torch.tensor(found.smoothed), torch.tensor(smoothed), 1e-4)
    slopes = {rates[i]: smoothed[i + 1] - smoothed[i - 1] for i in range(10, len(rates) - 1)}
    assert found.suggestion == pytest.approx(min(slopes, key=lambda rate: slopes[rate]))


@pytest.mark.ranks(1, conformance=2)
def test_all_stays_as_it_was() -> None:
    model = net(dropout=0.3)
    optimizer = sgd(model)
    loss_fn(model, [X, Y]).backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with unchanged(model, optimizer):
        find(model, optimizer)
    assert [scheduler.last_epoch, scheduler.optimizer is optimizer] == [0, True]

    def trained() -> nn.Module:
        with started() as run:
            other = net()
            paceline.fit(other, weighted, TRAIN, optimizer=sgd(other), global_batch=BATCH, epochs=1, run=run)
            return other

    first = trained()
    find(model, optimizer, loss=weighted)
    equal(trained(), first)


@pytest.mark.ranks(conformance=2)
def test_under_fsdp() -> None:
    _, losses, _ = by_hand()
    model = net()
    found = find(model, sgd(model), settings={"device": "cpu", "strategy": "fsdp"})
    near(torch.tensor(found.losses), torch.tensor(losses), 1e-4)


def test_a_schedule_that_warms_up_from_zero() -> None:
    model = net()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    near(torch.tensor(find(model, optimizer).losses), torch.tensor(by_hand()[1]), 1e-4)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_a_suggestion_needs_a_fall() -> None:
    rates = [10.0**-i for i in range(14)]
    assert LearningRates(rates, [], [1.0] * 14).suggestion is None
    assert LearningRates(rates[:5], [], [5.0, 4, 3, 2, 1]).suggestion is None
    assert LearningRates(rates, [], [0.0] * 10 + [9, 8, 1, 0]).suggestion == rates[11]


def test_what_cannot_be() -> None:
    model = net()
    optimizer = sgd(model)
    for options in ({"min_lr": 0}, {"min_lr": 1.0, "max_lr": 0.1}, {"max_lr": math.inf}, {"steps": 1}):
        with pytest.raises(SettingError, match="lr_find"):
            find(model, optimizer, **options)
    with pytest.raises(SettingError, match=r"the first of the optimizer's 1 parameter groups has lr=0"):
        find(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with started(), pytest.raises(UsageError, match=r"Call it before paceline\.start"):
        find(model, optimizer)
    exploding = find(model, optimizer, loss=lambda m, b: loss_fn(m, b) * math.inf)
    assert exploding.lrs == []
