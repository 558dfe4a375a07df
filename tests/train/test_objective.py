"""An optimizer that evaluates the loss itself: on one process here, on several the same checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.ranks import checks_in, run_ranks
from tests.train import objective_checks as checks


@pytest.mark.parametrize("check", checks_in(vars(checks)), ids=lambda check: check.__name__)
def test_on_one_process(check: Callable[[], None]) -> None:
    check()


def test_on_two() -> None:
    for failed in run_ranks(2, "tests.train.objective_checks:run_some", deadline=90):
        assert not failed, "\n".join(failed.values())


@pytest.mark.conformance
@pytest.mark.parametrize("size", [2, 3])
def test_all_on_several(size: int) -> None:
    for failed in run_ranks(size, "tests.train.objective_checks:run_all", deadline=240):
        assert not failed, "\n".join(failed.values())
