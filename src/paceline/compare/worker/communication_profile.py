"""Time in communication, from torch's profiler.

On the CPU, a communication operation is an operation on gloo's threads, an exchange over Unix sockets
(comm/neighbours.py), or a sum in shared memory. On an accelerator, it is an NCCL kernel, or a span annotated by XCCL.
Its time includes waiting for ranks that arrive later. The exposed part is the time in which this process computes
nothing: no torch operator runs on the CPU, or no other kernel on the accelerator.

Ranges annotated on the host (record_function in the script, NCCL's "nccl:all_reduce", FSDP's) also appear on the
accelerator's timeline, around the kernels launched in them. Such a range counts as neither communication nor
computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

Span = tuple[float, float]

_MARK = "paceline: counted from here"
_ON_HOST = ("gloo:", "mpi:", "ucc:", "unix:", "memory:")
_ON_DEVICE = ("ncclDevKernel", "ncclKernel", "xccl:")
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
_NO_KERNELS = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.", "DistributedDataParallel", "Distributed")


class CommunicationTime(NamedTuple):
    """Time in communication, over all profiled steps."""

    operations: int  # number of operations
    seconds: float  # seconds in communication
    exposed: float  # of these, seconds without computation


class CommunicationProfile:
    """torch's profiler between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        own = [_ACTIVITIES[device.type]] if device.type in _ACTIVITIES else []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *own])

    def start(self) -> None:
        self._profiler.start()

    def begin_counting(self) -> None:
        """Ignore everything before this call."""
        self._wait()
        with torch.profiler.record_function(_MARK):
            pass

    def stop(self) -> CommunicationTime:
        self._wait()
        self._profiler.stop()
        events = list(self._profiler.events() or [])
        begin = max((event.time_range.end for event in events if event.name == _MARK), default=0.0)
        counted = [event for event in events if event.time_range.start >= begin]
        return communication_time(counted, self._device.type != "cpu")

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def communication_time(events: Iterable[Any], accelerated: bool) -> CommunicationTime:
    """Add up the time in communication from the profiler's events.

    Args:
        events: each has a name, a device_type, a time_range in microseconds, and the flag is_user_annotation.
        accelerated: whether this process computes on an accelerator.
    """
    talking: list[Span] = []
    computing: list[Span] = []
    for event in events:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        on_host = event.device_type.name == "CPU"
        if event.name.startswith(_ON_HOST if on_host else _ON_DEVICE):
            talking.append(span)
        elif on_host and not accelerated:
            if event.name.startswith("aten::") or "CompiledFxGraph" in event.name:
                computing.append(span)
        elif not (on_host or event.is_user_annotation or event.name.startswith(_NO_KERNELS)):
            computing.append(span)
    spans = union(talking)
    total = sum(end - start for start, end in spans)
    return CommunicationTime(len(talking), total, total - overlap(spans, union(computing)))


def union(spans: Sequence[Span]) -> list[Span]:
    """Merge spans: return sorted spans that do not touch, and cover the same time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """The total time that both lists of spans cover. Both lists are results of `union`."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
