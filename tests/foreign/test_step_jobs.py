"""Jobs in the idiom of pytorch/examples, each against its plain original."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.foreign import step_jobs as jobs
from tests.ranks import checks_in, run_ranks


@pytest.mark.parametrize("check", checks_in(vars(jobs)), ids=lambda check: check.__name__)
def test_on_one_process(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.conformance)])
def test_on_several(size: int) -> None:
    for failed in run_ranks(size, "tests.foreign.step_jobs:run_all", deadline=120):
        assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize(
    ("strategy", "reproducible"),
    [
        ("data_parallel:devices=cpu,cpu,cpu", None),
        ("mirrored:devices=cpu,cpu,cpu", None),
        ("central_storage:devices=cpu,cpu", None),
        ("data_parallel:devices=cpu,cpu", 4),
        ("single", 3),
    ],
)
def test_two_closures_share_a_fake_batch_under_several_replicas(strategy: str, reproducible: int | None) -> None:
    jobs.compare(
        jobs.gan_in_closures, lambda: jobs.plain_gan(watch=False), 1e-10, strategy=strategy, reproducible=reproducible
    )
