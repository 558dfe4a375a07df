"""The laboratory for slow links (benchmarks/lab.py): its cables are what was asked for, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import lab
from benchmarks.lab import Link
from tests.system.needed import need

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

HELD = """
import sys
from benchmarks.lab import Link, lab
with lab(3, Link(mbit=100, delay_ms=1)) as made:
    made.start(0, "sleep", "1000")
    print(*made.namespaces, flush=True)
    sys.stdin.read()
    if sys.argv[1] == "error":
        raise KeyError("of the block")
"""


@pytest.fixture(autouse=True)
def _needed() -> None:
    need("iproute2 gcc util-linux", *lab.NEEDED)


def left(namespaces: list[str]) -> list[str]:
    """The processes of this machine that are in one of these networks. A network without any is gone."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.readlink(process / "ns/net") in namespaces:
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue
    return found


def test_rate_and_delay_are_those_that_were_asked_for() -> None:
    with lab.lab(2, Link(mbit=20, delay_ms=10)) as made:
        before = made.sent_bytes()
        found = made.check(seconds=2.0)
        sent = made.sent_bytes()
        assert left(made.namespaces)  # as long as it is there
    for mbit in found["mbit"]:
        assert 0.85 * 20 <= mbit <= 1.02 * 20, found  # frames have headers: 95% of the bits are the sender's
    assert 20.0 <= found["round_trip_ms"] <= 30.0, found
    assert all(now - then > 20e6 / 8 for now, then in zip(sent, before)), (before, sent)
    assert not left(made.namespaces)


def test_unshaped_cables_are_faster_and_do_not_wait() -> None:
    with lab.lab(2) as made:
        found = made.check(seconds=1.0)
    assert min(found["mbit"]) > 200, found
    assert found["round_trip_ms"] < 5.0, found


# When both have printed: the first that fails ends the other.
BOTH_FAIL = """
import os, sys, time
print("rank", os.environ["RANK"], os.uname().nodename, flush=True)
files = [f"{__file__}.{rank}" for rank in range(2)]
open(files[int(os.environ["RANK"])], "w").close()
while not all(map(os.path.exists, files)): time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("script", "seconds", "told"),
    [
        (BOTH_FAIL, 60.0, "rank 1 host1"),
        ("import time; print('waits', flush=True); time.sleep(1000)", 8.0, "none after 8 s"),
    ],
)
def test_a_program_that_fails_or_hangs_is_told_with_what_it_printed(
    tmp_path: Path, script: str, seconds: float, told: str
) -> None:
    (tmp_path / "job.py").write_text(script)
    with lab.lab(2) as made:
        with pytest.raises(RuntimeError, match=told):
            made.run(str(tmp_path / "job.py"), seconds=seconds)
        assert not left(made.namespaces)


@pytest.mark.parametrize("how", ["end", "error", "interrupt", "kill"])
def test_nothing_is_left_however_it_ends(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    namespaces = process.stdout.readline().split()
    assert len(namespaces) == 4
    deadline = time.monotonic() + 10.0
    while not any("sleep\x001000" in words for words in left(namespaces)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how in ("interrupt", "kill"):
        process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10.0
    while left(namespaces) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(namespaces)
