from __future__ import annotations

from tests.ranks import run_ranks


def test_misuse_on_two_processes() -> None:
    for failed in run_ranks(2, "tests.strategies.misuse_checks:run_all", deadline=90):
        assert not failed, "\n".join(failed.values())
