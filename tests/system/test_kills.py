"""Ranks and launchers are killed at random moments: nothing hangs, is lost, or is left (tests/chaos, `make chaos`)."""

from __future__ import annotations

import random

import pytest
from tests.chaos.__main__ import WAYS, Case, Undisturbed, run_case

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

# Numbers of cases whose first start has two processes, as run_case draws it for most ways: more kills in less time.
NUMBERS = [number for number in range(100, 200) if random.Random(number).choice([2, 3, 4]) == 2]
CASES = [(way, NUMBERS[len(WAYS) * turn + place]) for turn in range(2) for place, way in enumerate(WAYS)]
_made: list[Case] = []


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return Undisturbed()


@pytest.mark.parametrize(("way", "number"), CASES, ids=[f"{way}-{number}" for way, number in CASES])
def test_a_training_ends_as_if_nobody_had_disturbed_it(way: str, number: int, undisturbed: Undisturbed) -> None:
    case = run_case(way, number, undisturbed)
    _made.append(case)
    assert not case.wrong, case


def test_something_was_killed_in_each_training() -> None:
    if len(_made) < len(CASES):
        pytest.skip("looks at all trainings of this file, and only some were made")
    assert all(case.kills for case in _made)
    assert sum(len(case.kills) for case in _made) >= 30, [case.kills for case in _made]
