"""A rank that has ended, with exit code 0, while others go on.

It may be right: rank 0 exports the model, and the others have nothing left to do. It may be a fault: the others are in
a collective, or will come to one, that the rank never joins, and wait there for the process group's timeout (30
minutes). Neither its end nor the time since then tells which. The stacks of the others do:

1. NOTICE_SECONDS after the first end, say who has ended and who still runs.
2. From then on, sample the stacks of the running ranks every POLL_SECONDS. A signal makes a worker's faulthandler write
   its Python stack into a file, also while it waits inside native code; the script notices nothing.
3. A rank whose stack has not changed for STUCK_SECONDS, and is in communication, waits in vain: the run is ended.
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
from paceline.launcher.worker import STACK_SIGNAL, stack_file

NOTICE_SECONDS = 10.0
POLL_SECONDS = 2.0
STUCK_SECONDS = 30.0
_ANSWER_SECONDS = 0.5
_IDLE = 0.1  # of a core: a process that uses less waits

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# Innermost frames of a rank that waits for others.
_WAITS = re.compile(r"/torch/distributed/|/torch/cuda/|/paceline/(comm|strategies|train)/")
_OPERATIONS = re.compile(r"/torch/distributed/distributed_c10d\.py$|/paceline/comm/")
# Innermost frames of a rank in a backward, which may wait or compute: the CPU time tells.
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/_tensor\.py$")
_DECORATORS = ("wrapper", "decorate_context")  # of torch's, around what the script calls
_LIBRARY = re.compile(r"/(torch|paceline)/|/lib/python3[^/]*/(?!site-packages/)|^<frozen ")


@dataclass(frozen=True)
class StackSample:
    """Where a process stands.

    Attributes:
        frames: of its main thread, innermost first: (file, line, function).
        cpu_seconds: that it has used so far.
    """

    frames: tuple[tuple[str, int, str], ...]
    cpu_seconds: float

    def __str__(self) -> str:
        """The user's innermost line, the function that is called there, and the collective in it where that waits."""
        called = inner = ""
        for path, line, function in self.frames:
            if not _LIBRARY.search(path):
                within = f" ({inner})" if inner not in ("", called) else ""
                return f"{os.path.basename(path)}, line {line}{called and f', in {called}()'}{within}"
            if function not in _DECORATORS:
                called = function
                inner = inner or (function if _OPERATIONS.search(path) else "")
        return f"{called}()"


def sample_stacks(error_files: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, StackSample]:
    """The stack of each worker that answers, by rank. On Linux only, and once the worker has begun with its script."""
    found: dict[int, StackSample] = {}
    asked: dict[int, str] = {}
    for rank, pid in pids.items():
        path = stack_file(error_files[rank])
        if STACK_SIGNAL is None or not os.path.exists(path) or not _catches(pid, STACK_SIGNAL):
            continue
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.kill(pid, STACK_SIGNAL)
            asked[rank] = path
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, path in asked.items():
            with contextlib.suppress(OSError), open(path, errors="replace") as file:
                text = file.read()
                if text.endswith("\n") and _FRAME.search(text):
                    frames = tuple((name, int(line), function) for name, line, function in _FRAME.findall(text))
                    found[rank] = StackSample(frames, _cpu_seconds(pids[rank]))
    return found


def _catches(pid: int, signum: int) -> bool:
    """Does the process handle the signal? One that has become another program (os.execv) would be killed."""
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


class EarlyExits:
    """Watches the ranks of one machine, from the first end of a rank on.

    Args:
        error_files: of each rank of this machine.
    """

    def __init__(self, error_files: Mapping[int, str]) -> None:
        self._error_files = error_files
        self._since: float | None = None
        self._noticed = False
        self._polled = 0.0
        self._first: dict[int, tuple[StackSample, float]] = {}  # rank -> (first sample with its present frames, when)

    def poll(self, left: Sequence[int], pids: Mapping[int, int]) -> str | None:
        """What is wrong, in a sentence or two, once something is; or else None.

        Args:
            left: the ranks, of any machine, that have ended without an error.
            pids: the process of each rank of this machine that still runs.
        """
        if not left or not pids:
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < NOTICE_SECONDS or now - self._polled < POLL_SECONDS:
            return None
        self._polled = now
        if not self._noticed:
            self._noticed = True
            running = f"{name_ranks(pids)} still run{'s' if len(pids) == 1 else ''}"
            ended = f"{name_ranks(left)} ended {NOTICE_SECONDS:.0f} s ago, without an error"
            say(f"paceline: {ended}; {running}.\n")
        for rank, stand in sample_stacks(self._error_files, pids).items():
            before, when = self._first.get(rank, (None, now))
            if before is None or before.frames != stand.frames:
                self._first[rank] = stand, now
            elif now - when >= STUCK_SECONDS and is_waiting(before, stand, now - when):
                return (
                    f"{name_ranks(left)} ended without an error, and rank {rank} has waited since then at {stand}. "
                    "Do all ranks take the same number of steps, and make the same calls?"
                )
        return None


def is_waiting(before: StackSample, now: StackSample, seconds: float) -> bool:
    """Does a process wait for another one, if its frames have been the same for `seconds`?"""
    path = now.frames[0][0]
    if _WAITS.search(path):
        return True
    return bool(_MAY_WAIT.search(path)) and now.cpu_seconds - before.cpu_seconds < _IDLE * seconds
