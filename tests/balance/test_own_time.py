"""A process's own time in a step, by a clock that the test sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.balance.own_time import OwnTime, seconds


class SetClock(OwnTime):
    """A clock that shows what the test has set."""

    moment = 0.0

    def now(self) -> float:
        return self.moment


def a_clock(*, within_backward: bool = False) -> SetClock:
    return SetClock(torch.device("cpu"), within_backward=within_backward)


class At(torch.autograd.Function):
    """Sets the clock when the backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: SetClock, moment: float) -> Tensor:
        ctx.clock, ctx.moment = clock, moment
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.moment = ctx.moment
        return gradients[0], None, None


def backward(clock: SetClock, parameters: list[nn.Parameter], moments: list[float], end: float) -> None:
    """A backward that reaches these parameters at these moments, and then waits for others until `end`."""
    x = torch.ones(1)
    for parameter, moment in reversed(list(zip(parameters, moments, strict=True))):
        x = At.apply(x * parameter, clock, moment)  # type: ignore[no-untyped-call]
    clock.begin_backward(parameters)
    x.sum().backward()
    clock.moment = end
    clock.end_backward()


def test_time_counts_from_the_fetch_to_the_last_gradient_without_waits() -> None:
    clock = a_clock()
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    for start in (0.0, 100.0):  # the first backward finds the last parameter, the second knows it
        clock.begin(fetched=start + 2, waited=2)  # 2 s for data
        clock.moment = start + 5
        clock.wait(True)
        clock.moment = start + 9  # 4 s of waiting
        clock.wait(False)
        backward(clock, weights, [start + 10, start + 11, start + 12], end=start + 50)
        clock.moment = start + 60  # the update
        found = clock.end()
        assert found is not None
        assert seconds(found) == 5 + 3
    clock.close()


def test_a_wait_after_the_last_gradient_does_not_count() -> None:
    clock = a_clock()
    weight = nn.Parameter(torch.ones(1))
    clock.begin(fetched=0.0, waited=0.0)
    x = At.apply(torch.ones(1) * weight, clock, 3.0)  # type: ignore[no-untyped-call]
    clock.begin_backward([weight])
    x.sum().backward()
    clock.moment = 4.0
    clock.wait(True)
    clock.moment = 8.0
    clock.wait(False)
    clock.moment = 9.0
    clock.end_backward()
    assert clock.end() == [(0.0, 3.0)]


def test_micro_batches_and_further_losses_add_up() -> None:
    clock = a_clock()
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    clock.begin(fetched=0.0, waited=0.0)
    backward(clock, weights, [1, 2], end=3)  # 2 s
    clock.begin(fetched=5.0, waited=1.0)  # the second micro-batch of the open step
    backward(clock, weights[:1], [7], end=8)  # 4 s since the end of the first backward
    assert seconds(clock.end() or []) == 6


def test_within_the_backward_everything_but_the_waits_counts() -> None:
    clock = a_clock(within_backward=True)
    clock.begin(fetched=0.0, waited=0.0)
    clock.moment = 2.0
    clock.begin_backward([])
    clock.moment = 3.0
    clock.wait(True)
    clock.moment = 6.0
    clock.wait(False)
    clock.moment = 7.0
    clock.end_backward()
    assert seconds(clock.end() or []) == 4


def test_a_step_whose_last_gradient_is_missing_is_not_measured() -> None:
    clock = a_clock()
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for used, known in ((weights, True), (weights[:1], False), (weights, True)):
        clock.begin(fetched=clock.moment, waited=0.0)
        backward(clock, used, [clock.moment + 1 + place for place in range(len(used))], end=clock.moment + 9)
        assert (clock.end() is not None) is known


def test_nothing_counts_outside_of_a_step() -> None:
    clock = a_clock()
    clock.wait(True)
    clock.wait(False)
    clock.begin_backward([])
    clock.end_backward()
    assert clock.end() is None
