"""Jobs in the idiom of pytorch/examples, each against its plain original, on one process and on several."""

from __future__ import annotations

import pytest
from tests.foreign import step_jobs as jobs


@pytest.mark.ranks(1, 2, full=3)
def test_a_lazy_penalty_of_stylegan_is_its_plain_original() -> None:
    jobs.compare(jobs.stylegan, jobs.plain_stylegan, 1e-10)


@pytest.mark.ranks(1, 2, full=3)
def test_a_gan_in_a_loop_and_in_closures_is_its_plain_original() -> None:
    jobs.compare(jobs.gan, jobs.plain_gan, 1e-10)
    jobs.compare(jobs.gan_in_closures, lambda: jobs.plain_gan(watch=False), 1e-10)


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
