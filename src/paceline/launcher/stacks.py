"""Sample where a worker is: the line of the user's script, and the call in it. Linux only.

A thread of each worker answers, even while the main thread waits in native code. The script does not notice
(stack_thread.py). There is no answer while native code holds the GIL. Forked DataLoader workers have such a thread too.
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

_ANSWER_SECONDS = 2.0  # time limit for answers: on a busy machine, a rank may not run for a second
_IDLE = 0.1  # cores; a process that uses less is waiting
MOST_WORKERS = 16  # number of workers to sample per DataLoader

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_TRACEBACK_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# Innermost frames of a rank that waits for others.
_WAITS = re.compile(r"/torch/distributed/|/torch/cuda/|/paceline/(comm|data|strategies|step|norm|state|metrics)/")
_OPERATIONS = re.compile(r"/torch/distributed/distributed_c10d\.py$|/paceline/comm/")
# Innermost frames of a rank in native code of a backward, or of DistributedDataParallel's forward (where ranks agree on
# buckets in the second step). The rank may wait or compute; its CPU time shows which.
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/_tensor\.py$|/torch/nn/parallel/distributed\.py$")
_MAKE_GROUPS = {"init_process_group", "new_group"}  # of torch.distributed
_DECORATORS = re.compile(r"wrapper$|decorate_context$|\w*call_impl$")  # torch's wrappers of the called function
# Innermost frames of a thread that waits for work.
_IDLE_THREAD = re.compile(
    r"/lib/python3[^/]*/(threading|queue|selectors|concurrent/futures/thread|multiprocessing/\w+)\.py$"
)
_DATA_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
_HANDS_OVER = re.compile(r"/torch/multiprocessing/")
_WORKER_LOOP = re.compile(r"/torch/utils/data/_utils/worker\.py$")


@dataclass(frozen=True)
class StackSample:
    """One sample of a process.

    Attributes:
        frames: frames of its main thread, innermost first: (file, line, function).
        cpu_seconds: processor time used so far.
        runs_python: whether Python code was running. Then the process may make progress even if its frames are
            unchanged.
        others: the innermost line of each other Python thread.
    """

    frames: Frames
    cpu_seconds: float
    runs_python: bool = False
    others: Frames = ()

    def __str__(self) -> str:
        """Format the user's innermost line, the function that it calls, and the collective inside, if any."""
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
        """Whether the process is inside the script. While it starts or exits, it is not."""
        return any(not LIBRARY.search(path) for path, *_ in self.frames)

    @property
    def moves(self) -> bool:
        """Whether Python code runs that makes progress. A Python loop that waits for other ranks does not count."""
        return self.runs_python and not _WAITS.search(self.frames[0][0])

    @property
    def works_beside(self) -> bool:
        """Whether another thread is busy, so that other ranks may wait for it."""
        return not all(_IDLE_THREAD.search(path) or _WAITS.search(path) for path, *_ in self.others)

    @property
    def loads(self) -> bool:
        """Whether the process waits for DataLoader workers.

        It may also wait for the shared memory of a batch that has arrived, which the worker must still pass.
        """
        own = (path for path, *_ in self.frames if not STANDARD_LIBRARY.search(path))
        path = next((path for path in own if not _HANDS_OVER.search(path)), "")
        return bool(_DATA_LOADER.search(path))


def sample_stacks(error_files: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, StackSample]:
    """Sample the stack of each worker. Return rank -> sample, for each worker that answers.

    Workers answer on Linux, once they have started the script. Stopped processes are not asked, because they would
    answer too late.
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
    """Return the DataLoader workers that are busy or stuck: (pid, state, stack).

    Workers that were not forked (spawn, forkserver) cannot be sampled, so only their state is known.
    """
    states = {child: process_state.read_state(child) for child in _children(pid)[:MOST_WORKERS]}
    running = {child: error_file for child, state in states.items() if not state.stopped}
    said = stack_thread.ask(running, _ANSWER_SECONDS)
    found = []
    for child, state in states.items():
        frames = _since_fork(said[child].frames) if child in said else ()
        sample = StackSample(frames, 0.0) if frames else None
        # A child without an answer may not belong to a loader, so it is reported only if something blocks it.
        if process_state.describe(child, state) or (sample is not None and _loads_an_example(sample.frames)):
            found.append((child, state, sample))
    return found


def _frames(found: Sequence[Sequence[str]]) -> Frames:
    return tuple((path, int(line), function) for path, line, function in found)


def _since_fork(frames: Frames) -> Frames:
    """Remove the parent's frames, which a forked DataLoader worker still has below its loop."""
    loop = next((index for index, (path, *_) in enumerate(frames) if _WORKER_LOOP.search(path)), len(frames))
    return frames[: loop + 1]


def _loads_an_example(frames: Frames) -> bool:
    """Return whether a DataLoader worker is busy. An idle worker's loop waits in the standard library."""
    own = [path for path, *_ in frames if not STANDARD_LIBRARY.search(path)]
    return any(map(_WORKER_LOOP.search, own)) and not _WORKER_LOOP.search(own[0])


def place_in_traceback(text: str) -> str:
    """Return the user's line and call in a traceback; "" if the traceback has no line of the script."""
    frames = _frames(list(reversed(_TRACEBACK_FRAME.findall(text))))
    if not any(not LIBRARY.search(path) for path, *_ in frames):
        return ""
    return str(StackSample(frames, 0.0))


def place_of_crash(error_file: str) -> StackSample | None:
    """Return where the main thread was when native code crashed (SIGSEGV, SIGABRT and similar), or None.

    faulthandler writes one thread after another, the main thread last. The thread that crashed may be a native thread,
    such as gloo's, which has no Python frames.
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
    """Return whether a process waits for another process. Its frames have not changed for `seconds`."""
    path = now.frames[0][0]
    if _WAITS.search(path):
        return True
    return bool(_MAY_WAIT.search(path)) and now.cpu_seconds - before.cpu_seconds < _IDLE * seconds


def in_collective(sample: StackSample) -> bool:
    """Return whether the process was in a collective of torch.distributed or Paceline, except for creating a group."""
    operations = [function for path, _, function in sample.frames if _OPERATIONS.search(path)]
    return bool(operations) and _MAKE_GROUPS.isdisjoint(operations)


def may_wait(sample: StackSample) -> bool:
    """Return whether the process was in native code of a backward or DistributedDataParallel, which may wait."""
    return bool(_MAY_WAIT.search(sample.frames[0][0]))


def _children(pid: int) -> list[int]:
    import psutil  # imported late: only a run in trouble needs it

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
