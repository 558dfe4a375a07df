"""Where a worker stands: the line of the user's script, and the call in it.

A thread of each worker answers, also while the main thread waits inside native code; the script notices nothing
(stack_thread.py). It cannot where native code keeps the interpreter's lock. The workers of a DataLoader, where they are
forked, have a thread each. On Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launcher import process_state, stack_thread
from paceline.launcher.stack_thread import Frames
from paceline.launcher.worker import LIBRARY, STANDARD_LIBRARY, crash_file, innermost_own

_ANSWER_SECONDS = 0.5
_IDLE = 0.1  # of a core: a process that uses less waits
MOST_WORKERS = 16  # of a DataLoader, that are asked

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_TRACEBACK_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# Innermost frames of a rank that waits for others.
_WAITS = re.compile(r"/torch/distributed/|/torch/cuda/|/paceline/(comm|strategies|train)/")
_OPERATIONS = re.compile(r"/torch/distributed/distributed_c10d\.py$|/paceline/comm/")
# Innermost frames of a rank in native code of a backward, or of DistributedDataParallel's forward (where ranks agree on
# buckets in the second step), which may wait or compute: the CPU time tells.
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/_tensor\.py$|/torch/nn/parallel/distributed\.py$")
_MAKE_GROUPS = {"init_process_group", "new_group"}  # of torch.distributed
_DECORATORS = re.compile(r"wrapper$|decorate_context$|\w*call_impl$")  # of torch's, around what the script calls
# Innermost frames of a thread that waits for something to do.
_IDLE_THREAD = re.compile(
    r"/lib/python3[^/]*/(threading|queue|selectors|concurrent/futures/thread|multiprocessing/\w+)\.py$"
)
_DATA_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
_HANDS_OVER = re.compile(r"/torch/multiprocessing/")
_WORKER_LOOP = re.compile(r"/torch/utils/data/_utils/worker\.py$")


@dataclass(frozen=True)
class StackSample:
    """Where a process stands.

    Attributes:
        frames: of its main thread, innermost first: (file, line, function).
        cpu_seconds: that it has used so far.
        runs_python: was code in Python running? It may be on its way, though the frames are those of the last time.
        others: the innermost line of each other thread of Python's.
    """

    frames: Frames
    cpu_seconds: float
    runs_python: bool = False
    others: Frames = ()

    def __str__(self) -> str:
        """The user's innermost line, the function that is called there, and the collective in it where that waits."""
        own = innermost_own([path for path, *_ in self.frames])
        calls = [(path, function) for path, _, function in self.frames[:own] if not _DECORATORS.match(function)]
        called = calls[-1][1] if calls else ""
        if own is None:
            return f"{called}()"
        path, line, _ = self.frames[own]
        if self.loads:
            return f"{os.path.basename(path)}, line {line}, where it waits for its DataLoader"
        inner = next((function for path, function in calls if _OPERATIONS.search(path)), called)
        within = f" ({inner})" if inner != called else ""
        return f"{os.path.basename(path)}, line {line}{called and f', in {called}()'}{within}"

    @property
    def in_script(self) -> bool:
        """Is it inside the script? A process that loads or ends is not."""
        return any(not LIBRARY.search(path) for path, *_ in self.frames)

    @property
    def moves(self) -> bool:
        """Is it on its way, whatever the frames of the last time? Waits for others may be loops in Python."""
        return self.runs_python and not _WAITS.search(self.frames[0][0])

    @property
    def works_beside(self) -> bool:
        """Does another thread do something, which other ranks may wait for? Not if it waits for work or for others."""
        return not all(_IDLE_THREAD.search(path) or _WAITS.search(path) for path, *_ in self.others)

    @property
    def loads(self) -> bool:
        """Does it wait for the worker processes of a DataLoader?

        Also for a batch that has come, whose memory the worker that made it must still hand over.
        """
        own = (path for path, *_ in self.frames if not STANDARD_LIBRARY.search(path))
        path = next((path for path in own if not _HANDS_OVER.search(path)), "")
        return bool(_DATA_LOADER.search(path))


def sample_stacks(error_files: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, StackSample]:
    """The stack of each worker that answers, by rank. On Linux only, and once the worker has begun with its script.

    A process that is stopped is not asked: it would answer when nobody listens any more.
    """
    asked = {pid: error_files[rank] for rank, pid in pids.items() if not process_state.read_state(pid).stopped}
    found = stack_thread.ask(asked, _ANSWER_SECONDS)
    said = {rank: (found[pid], pid) for rank, pid in pids.items() if pid in found and found[pid].frames}
    return {
        rank: StackSample(main.frames, _cpu_seconds(pid), main.runs_python, main.others)
        for rank, (main, pid) in said.items()
    }


def sample_loader_workers(
    error_file: str, pid: int
) -> list[tuple[int, process_state.ProcessState, StackSample | None]]:
    """The worker processes of a DataLoader that have something to do, or cannot go on: (pid, state, stack).

    Those that were not forked (spawn, forkserver) cannot be asked; of them only the state is known.
    """
    states = {child: process_state.read_state(child) for child in _children(pid)[:MOST_WORKERS]}
    running = {child: error_file for child, state in states.items() if not state.stopped}
    said = stack_thread.ask(running, _ANSWER_SECONDS)
    found = []
    for child, state in states.items():
        frames = _since_fork(said[child].frames) if child in said else ()
        stand = StackSample(frames, 0.0) if frames else None
        # Of a child that says nothing only what keeps it from going on is worth a line: it may be no loader's.
        if process_state.describe(child, state) or (stand is not None and _loads_an_example(stand.frames)):
            found.append((child, state, stand))
    return found


def _frames(found: Sequence[Sequence[str]]) -> Frames:
    return tuple((path, int(line), function) for path, line, function in found)


def _since_fork(frames: Frames) -> Frames:
    """Without those of its parent, which a forked worker still has below its loop."""
    loop = next((index for index, (path, *_) in enumerate(frames) if _WORKER_LOOP.search(path)), len(frames))
    return frames[: loop + 1]


def _loads_an_example(frames: Frames) -> bool:
    """Is it a DataLoader's worker with something to do? An idle one waits in the standard library, in its loop."""
    own = [path for path, *_ in frames if not STANDARD_LIBRARY.search(path)]
    return any(map(_WORKER_LOOP.search, own)) and not _WORKER_LOOP.search(own[0])


def place_in_traceback(text: str) -> str:
    """The user's line and call of the traceback of an exception; "" where the script has no line in it."""
    frames = _frames(list(reversed(_TRACEBACK_FRAME.findall(text))))
    if not any(not LIBRARY.search(path) for path, *_ in frames):
        return ""
    return str(StackSample(frames, 0.0))


def place_of_crash(error_file: str) -> StackSample | None:
    """Where the process was when a signal of its own native code ended it (SIGSEGV, SIGABRT and the like).

    faulthandler writes the threads one after the other, the main thread last. The thread that crashed may be one of
    native code, as gloo's, which has no frames of Python.
    """
    with contextlib.suppress(OSError), open(crash_file(error_file), errors="replace") as file:
        last = file.read().rpartition("Fatal Python error")[2]
        blocks = [
            _frames(_FRAME.findall(block)) for block in re.split(r"^(?=(?:Current t|T)hread 0x)", last, flags=re.M)
        ]
        filled = [block for block in blocks if block]
        return StackSample(filled[-1], 0.0) if filled else None
    return None


def is_waiting(before: StackSample, now: StackSample, seconds: float) -> bool:
    """Does a process wait for another one, if its frames have been the same for `seconds`?"""
    path = now.frames[0][0]
    if _WAITS.search(path):
        return True
    return bool(_MAY_WAIT.search(path)) and now.cpu_seconds - before.cpu_seconds < _IDLE * seconds


def in_collective(stand: StackSample) -> bool:
    """Was it inside a call of torch.distributed, or of Paceline's that makes one? To make a process group is none."""
    operations = [function for path, _, function in stand.frames if _OPERATIONS.search(path)]
    return bool(operations) and _MAKE_GROUPS.isdisjoint(operations)


def may_wait(stand: StackSample) -> bool:
    """Was it in native code of a backward or of DistributedDataParallel, which waits, or else uses a core?"""
    return bool(_MAY_WAIT.search(stand.frames[0][0]))


def _children(pid: int) -> list[int]:
    import psutil  # only here, where a run is in trouble already

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _cpu_seconds(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
