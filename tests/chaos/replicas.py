"""Trainings of torchft in a folder (by_hand_torchft.py): started, killed, and how often they used each example."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.job import EPOCHS, EXAMPLES
from tests.ports import free_port

SCRIPT = Path(__file__).with_name("by_hand_torchft.py")
PATIENCE_SECONDS = 5.0  # for the other replicas, when the first has ended


class Uses(NamedTuple):
    """Of an example's uses, EPOCHS of each: how many are missing, and how many are more than that."""

    missing: int
    extra: int


class Replicas:
    """A lighthouse, and replicas. A replica that was killed is started again at once.

    Args:
        path: the folder in which `start` starts its command.
        count: of the replicas.
        least: no step is made by fewer of them.
    """

    def __init__(self, path: Path, start: Callable[[list[str]], subprocess.Popen[str]], count: int, least: int) -> None:
        self._path, self._start_command, self._sizes = path, start, [str(count), str(least)]
        self._port = str(free_port())
        lighthouse = start([sys.executable, str(SCRIPT), "lighthouse", self._port, str(least)])
        while not (path / "lighthouse").exists():
            assert lighthouse.poll() is None, "torchft's lighthouse does not start"
            time.sleep(0.05)
        self._started = [self._start(replica) for replica in range(count)]

    def _start(self, replica: int) -> subprocess.Popen[str]:
        return self._start_command([sys.executable, str(SCRIPT), self._port, str(replica), *self._sizes])

    def kill(self, replica: int) -> None:
        self._started[replica].kill()
        self._started[replica].communicate()
        self._started[replica] = self._start(replica)

    def wait(self, seconds: float) -> Path | None:
        """The weights of the replica that ended first, once the others have had the time to end; None: none has."""
        deadline = time.monotonic() + seconds
        while not (ends := list(self._path.glob("end-*"))):
            if time.monotonic() > deadline:
                return None
            for replica, process in enumerate(self._started):
                if process.poll():  # it raised an error: as torchrun does, start it again
                    self._started[replica] = self._start(replica)
            time.sleep(0.1)
        first = min(ends, key=lambda path: path.stat().st_mtime_ns)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in self._started) and time.monotonic() < deadline:
            time.sleep(0.1)
        return first


def uses_of_examples(path: Path) -> Uses:
    """By the ledgers there, of all replicas.

    A step's gradient is the mean of what all participants of its quorum offered, and counts once one of them has
    committed it. Where a step was made again, from a checkpoint, the later quorum is the one whose step the model has.
    """
    entries = [json.loads(line) for ledger in path.glob("ledger-*") for line in ledger.read_text().splitlines()]
    committed: dict[int, int] = {}  # the step -> its quorum
    for kind, quorum, step, *_ in entries:
        if kind == "commits":
            committed[step] = max(quorum, committed.get(step, quorum))
    used: Counter[int] = Counter()
    for kind, quorum, step, *numbers in entries:
        if kind == "offers" and committed.get(step) == quorum:
            used.update(numbers[0])
    missing = sum(max(0, EPOCHS - used[example]) for example in range(EXAMPLES))
    return Uses(missing, extra=sum(max(0, times - EPOCHS) for times in used.values()))


def uses_lost(cases: list[dict[str, Any]], way: str) -> str:
    """Of all trainings of a way that were disturbed, in words."""
    uses = [case["uses"] for case in cases if case["way"] == way and case["kills"] and case.get("uses")]
    if not uses:
        return ""
    (least, middle, most), (fewest, usual, highest) = (
        (min(column), statistics.median_low(column), max(column)) for column in zip(*uses, strict=True)
    )
    exact = sum(not any(one) for one in uses)
    return (
        f"Of {len(uses)} such trainings {exact} used each example {EPOCHS} times. Of {EXAMPLES * EPOCHS} uses {least} "
        f"to {most} were missing, {middle} in the median, and {fewest} to {highest} were too many, {usual} in the "
        "median."
    )
