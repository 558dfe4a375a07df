"""Who is called slow: by made-up times of a step."""

from __future__ import annotations

import random

import pytest

from paceline.timeline.span_file import Phase
from paceline.timeline.stragglers import Ranks, Straggler, report, stragglers

STEPS = 40
Made = dict[Phase, float]


def ranks(*each: Made, noise: float = 0.0, in_step: bool = True, alike: bool = True, on_host: bool = False) -> Ranks:
    """Each rank's milliseconds in each phase, the same in every step but for noise (a part of each)."""
    draw = random.Random(0)
    steps = {
        rank: {
            (0, step): {phase: made.get(phase, 0.0) * (1 + noise * draw.uniform(-1, 1)) for phase in Phase}
            for step in range(STEPS)
        }
        for rank, made in enumerate(each)
    }
    return Ranks(steps, in_step, alike, on_host)


def step(
    data: float = 1, forward: float = 5, backward: float = 10, communication: float = 1, update: float = 2
) -> Made:
    values = {Phase.DATA: data, Phase.FORWARD: forward, Phase.BACKWARD: backward, Phase.UPDATE: update}
    return {**values, Phase.COMMUNICATION: communication}


def named(found: list[Straggler]) -> list[tuple[int, Phase]]:
    return [(one.rank, one.phase) for one in found]


def test_a_rank_for_which_the_others_wait_in_their_exchanges() -> None:
    fast, slow = step(communication=21), step(data=21)
    found = stragglers(ranks(fast, slow, fast))
    assert named(found) == [(1, Phase.DATA)]
    assert found[0].delay_ms == pytest.approx(20)
    assert found[0].waited_ms == pytest.approx(20)


def test_a_rank_for_which_the_others_wait_unseen() -> None:
    """Where the exchange is a part of torch's own backward, the fast rank's backward is longer: it is not slow."""
    fast, slow = step(backward=30, communication=0), step(data=21, communication=0)
    assert named(stragglers(ranks(fast, slow))) == [(1, Phase.DATA)]


def test_a_slow_forward_and_backward_are_both_named() -> None:
    fast, slow = step(communication=16), step(forward=10, backward=20)
    assert sorted(named(stragglers(ranks(fast, slow)))) == [(1, Phase.FORWARD), (1, Phase.BACKWARD)]


def test_an_update_belongs_to_the_wait_of_the_next_step() -> None:
    fast, slow = step(communication=11), step(update=12)
    assert named(stragglers(ranks(fast, slow))) == [(1, Phase.UPDATE)]


def test_one_that_makes_up_for_it_before_the_exchange_is_not_named() -> None:
    """Rank 1 has the slower data and rank 0 the slower forward: nobody waits in the exchange."""
    assert stragglers(ranks(step(forward=25), step(data=21))) == []


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.4])
def test_equal_ranks(noise: float) -> None:
    assert stragglers(ranks(*[step()] * 4, noise=noise)) == []


def test_a_difference_below_the_noise_is_not_named() -> None:
    assert stragglers(ranks(step(communication=2.5), step(data=2.5))) == []  # 1.5 of 20.5 ms
    tiny = step(0.1, 0.1, 0.1, 0.1, 0.1)
    assert stragglers(ranks({**tiny, Phase.COMMUNICATION: 0.4}, {**tiny, Phase.DATA: 0.4})) == []  # 0.3 ms


def test_a_rank_that_is_late_now_and_then_is_not_named() -> None:
    made = ranks(step(communication=21), step())
    for number, phases in enumerate(made.steps[1].values()):
        phases[Phase.DATA] += 20 * (number % 2)
    assert stragglers(made) == []


def test_replicas_that_train_apart() -> None:
    found = stragglers(ranks(step(), step(backward=30), in_step=False))
    assert named(found) == [(1, Phase.BACKWARD)]
    assert found[0].waited_ms is None
    assert stragglers(ranks(step(), step(), in_step=False, noise=0.1)) == []


def test_the_report_in_words() -> None:
    first, second = report(ranks(step(communication=21), step(data=21)))
    assert first.startswith(
        "median times per step: data 21.00 ms on rank 1 (11.00 ms over all ranks), forward 5.00 ms on rank"
    )
    assert second == (
        "rank 1 was slower than the others in data, by 20.0 ms in a step of 39.0 ms; the others waited 20.0 ms for it "
        "in each step"
    )
    assert report(ranks(step(), step()))[1:] == ["no rank was slower than the others"]
    assert report(ranks(step()))[0].startswith(
        "median times per step: data 1.00 ms, forward 5.00 ms, backward 10.00 ms"
    )
    assert len(report(ranks(step()))) == 1  # a rank alone is compared with nobody
    assert "so they are not compared" in report(ranks(step(), step(data=50), alike=False))[1]
    assert "measured on the hosts" in report(ranks(step(), step(), on_host=True))[-1]
    assert report(Ranks({}, True, True, False)) == []


def test_too_few_steps() -> None:
    made = ranks(step(communication=21), step(data=21))
    few = {rank: dict(list(steps.items())[:4]) for rank, steps in made.steps.items()}
    assert "too few to compare" in report(made._replace(steps=few))[1]
