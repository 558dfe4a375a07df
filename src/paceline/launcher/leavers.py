"""A rank that has ended, with exit code 0, while others go on.

It may be right: rank 0 exports the model, the others have nothing left to do. It may be a fault: the others are in a
collective, or come to one, that the rank will never join, and wait there for as long as the process group's timeout (30
minutes). Neither its end nor the time since then tells which. Where the others stand does:

1. NOTICE_SECONDS after the first end, say who has left and who still runs.
2. From then on, every LOOK_SECONDS, ask the running ranks where they stand. A signal makes a worker's faulthandler
   write its Python stack into a file, also while it waits inside native code; the script notices nothing.
3. A rank that has not moved for STUCK_SECONDS, and stands in communication, waits in vain: the run is ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launcher.output import say
from paceline.launcher.report import name_ranks
from paceline.launcher.worker import STAND_SIGNAL, stand_file

NOTICE_SECONDS = 10.0
LOOK_SECONDS = 2.0
STUCK_SECONDS = 30.0
_ANSWER_SECONDS = 0.5
_IDLE = 0.1  # of a core: below, a process waits

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# Innermost Python frames of a rank that waits for others. In a backward, a busy CPU says that it computes.
_WAITS = re.compile(r"/torch/distributed/|/torch/cuda/|/paceline/(comm|strategies|train)/")
_OPERATIONS = re.compile(r"/torch/distributed/distributed_c10d\.py$|/paceline/comm/")
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/_tensor\.py$")
_DECORATORS = ("wrapper", "decorate_context")  # of torch's, around what the script calls
_LIBRARY = re.compile(r"/(torch|paceline)/|/lib/python3[^/]*/(?!site-packages/)|^<frozen ")


@dataclass(frozen=True)
class Stand:
    """Where a process stands.

    Attributes:
        frames: of its main thread, innermost first: (file, line, function).
        cpu_seconds: that it has used so far.
    """

    frames: tuple[tuple[str, int, str], ...]
    cpu_seconds: float

    def __str__(self) -> str:
        """The innermost line of the user's, the call in it, and the operation where that waits."""
        called = inner = ""
        for path, line, function in self.frames:
            if not _LIBRARY.search(path):
                within = f" ({inner})" if inner not in ("", called) else ""
                return f"{os.path.basename(path)}, line {line}{called and f', in {called}()'}{within}"
            if function not in _DECORATORS:
                called = function
                inner = inner or (function if _OPERATIONS.search(path) else "")
        return f"{called}()"


def stands(error_files: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, Stand]:
    """Where the workers stand, by rank, of those that answer: on Linux, once the worker has begun with its script."""
    found: dict[int, Stand] = {}
    asked: dict[int, str] = {}
    for rank, pid in pids.items():
        path = stand_file(error_files[rank])
        if STAND_SIGNAL is None or not os.path.exists(path) or not _catches(pid, STAND_SIGNAL):
            continue
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.kill(pid, STAND_SIGNAL)
            asked[rank] = path
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, path in asked.items():
            with contextlib.suppress(OSError), open(path, errors="replace") as file:
                text = file.read()
                if text.endswith("\n") and _FRAME.search(text):
                    frames = tuple((name, int(line), function) for name, line, function in _FRAME.findall(text))
                    found[rank] = Stand(frames, _cpu_seconds(pids[rank]))
    return found


def _catches(pid: int, signum: int) -> bool:
    """Has the process a handler for the signal? One that has become another program (os.execv) has none, and would be
    killed by it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _cpu_seconds(pid: int) -> float:
    import psutil  # only here, where a run is in trouble already

    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


class Leavers:
    """Looks at the ranks of one machine, from the first end of a rank on.

    Args:
        error_files: of each rank of this machine.
    """

    def __init__(self, error_files: Mapping[int, str]) -> None:
        self._error_files = error_files
        self._since: float | None = None
        self._noticed = False
        self._looked = 0.0
        self._first: dict[int, tuple[Stand, float]] = {}  # rank -> where it was first seen to stand, and when

    def look(self, left: Sequence[int], pids: Mapping[int, int]) -> str | None:
        """What is wrong, in a sentence or two, once something is.

        Args:
            left: the ranks, of any machine, that have ended without an error.
            pids: the process of each rank of this machine that still runs.
        """
        if not left or not pids:
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < NOTICE_SECONDS or now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        if not self._noticed:
            self._noticed = True
            running = f"{name_ranks(pids)} still run{'s' if len(pids) == 1 else ''}"
            ended = f"{name_ranks(left)} ended {NOTICE_SECONDS:.0f} s ago, without an error"
            say(f"paceline: {ended}; {running}.\n")
        for rank, stand in stands(self._error_files, pids).items():
            before, when = self._first.get(rank, (None, now))
            if before is None or before.frames != stand.frames:
                self._first[rank] = stand, now
            elif now - when >= STUCK_SECONDS and waits(before, stand, now - when):
                return (
                    f"{name_ranks(left)} ended without an error, and rank {rank} has waited since then at {stand}. "
                    "Do all ranks take the same number of steps, and make the same calls?"
                )
        return None


def waits(before: Stand, now: Stand, seconds: float) -> bool:
    """Does a process that stands where it stood `seconds` ago wait for another?"""
    path = now.frames[0][0]
    if _WAITS.search(path):
        return True
    return bool(_MAY_WAIT.search(path)) and now.cpu_seconds - before.cpu_seconds < _IDLE * seconds
