"""The kernel's view of a process, from /proc (Linux): whether it runs, is stopped, waits for a disk, or swaps.

A process that is stopped or waits in the kernel cannot report its stack. Reading /proc does not disturb the process.
On other systems, the state is unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

RUNNING = "R"  # or waiting for a core
STOPPED = "T"  # by SIGSTOP, SIGTSTP (Ctrl-Z) or similar
TRACED = "t"  # by a debugger
IN_KERNEL = "D"  # uninterruptible: no signal reaches it, not even SIGKILL
_GONE = "ZX"

SWAPPING_FAULTS = 20.0  # a process that reads more pages per second from a disk counts as swapping


@dataclass(frozen=True)
class ProcessState:
    """One sample of a process.

    Attributes:
        code: the letter of /proc/PID/stat; "" if unknown.
        major_faults: pages read from a disk so far.
        swapped_bytes: bytes of its memory in swap space.
        wait_channel: the kernel function that the process waits in; "" if unknown.
    """

    code: str = ""
    major_faults: int = 0
    swapped_bytes: int = 0
    wait_channel: str = ""

    @property
    def stopped(self) -> bool:
        return self.code in (STOPPED, TRACED)

    @property
    def gone(self) -> bool:
        return self.code != "" and self.code in _GONE


def read_state(pid: int) -> ProcessState:
    """Sample the state of a process."""
    stat = _read(f"/proc/{pid}/stat")
    code, faults = parse_stat(stat) if stat else ("", 0)
    swapped = 0
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmSwap:"):
            swapped = 1024 * int(line.split()[1])
    channel = _read(f"/proc/{pid}/wchan").strip() if code == IN_KERNEL else ""
    return ProcessState(code, faults, swapped, "" if channel == "0" else channel)


def parse_stat(text: str) -> tuple[str, int]:
    """Parse /proc/PID/stat into (state, major faults). An earlier field, the program's name, may contain spaces."""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[9])


def describe(pid: int, state: ProcessState, before: ProcessState | None = None, seconds: float = 0.0) -> str:
    """Describe what blocks the process, such as "is stopped by a signal ..."; "" if nothing does.

    Args:
        before: a sample taken `seconds` ago.
    """
    if state.code == STOPPED:
        return f"is stopped by a signal; `kill -CONT {pid}` resumes it"
    if state.code == TRACED:
        return f"is stopped by a debugger (process {pid})"
    if state.gone:
        return f"has ended (process {pid})"
    if state.code == IN_KERNEL:
        channel = f", in {state.wait_channel}" if state.wait_channel else ""
        return f"waits in the kernel for a disk or a device{channel} (process {pid})"
    if before is not None and seconds > 0 and state.swapped_bytes:
        rate = (state.major_faults - before.major_faults) / seconds
        if rate >= SWAPPING_FAULTS:
            gib = state.swapped_bytes / 2**30
            return f"is swapping: {gib:.1f} GiB of process {pid} are in swap space, {rate:.0f} page faults per second"
    return ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def has_variable(pid: int, entries: Sequence[bytes]) -> bool:
    """Return whether the process was started with one of these environment variables (NAME=VALUE)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return not set(entries).isdisjoint(file.read().split(b"\0"))
    except OSError:  # it belongs to another user, or has ended
        return False


def name_of(pid: int) -> str:
    """Return the name of the process's program; "" if it has ended."""
    return _read(f"/proc/{pid}/comm").strip()


def all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
