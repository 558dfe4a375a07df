"""Tests police themselves: one that leaves something behind fails, with the name of what it left, and is cleaned up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
from tests.leaks import left_behind, snapshots

pytest_plugins = ["pytester", "tests.ranks_marker"]

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: tests of Ctrl-C would
# wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Elsewhere every run tries new examples; where a landing depends on it, the same ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = snapshots()
    yield
    faults = left_behind(before)
    if faults:
        pytest.fail("the test left behind: " + "; ".join(faults), pytrace=False)


def pytest_sessionfinish() -> None:
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].end_teams()
