"""Time in communication, from torch's profiler.

An operation of communication is what a backend's process group reports as such. On the CPU it is the span from the
start to the end of an operation on gloo's own threads, of an exchange over Unix sockets (comm/neighbours.py), or of a
sum in shared memory that autograd's thread makes; on an accelerator it is a kernel of NCCL, or what XCCL's group
annotates. It includes waiting for ranks that come later. The exposed part is the time in which this process computed
nothing: no operator of torch ran on the CPU, or no other kernel on the accelerator.

The profiler draws a range that was annotated on the host (record_function: a script's own, NCCL's "nccl:all_reduce",
FSDP's) on the accelerator's timeline too, around the kernels that were launched in it. Such a range is no work.
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

    operations: int  # how many operations there were
    seconds: float  # in communication
    exposed: float  # of these, seconds in which nothing was computed


class CommunicationProfile:
    """torch's profiler between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        own = [_ACTIVITIES[device.type]] if device.type in _ACTIVITIES else []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *own])

    def start(self) -> None:
        self._profiler.start()

    def begin_counting(self) -> None:
        """Count only what comes after this call."""
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
    """Sum up the profiler's events.

    Args:
        events: each has a name, a device_type, a time_range in microseconds, and whether it is a user annotation.
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
    """The same points in time, as spans in order that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """For how long both were at once. Each is as `union` returns it."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
