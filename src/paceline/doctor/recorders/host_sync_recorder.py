"""Calls that make the host wait for the device or free its cached memory; threads and cores."""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from typing import Any

import torch

from paceline.launcher.plan import available_cores
from paceline.observe.event_log import EventLog

# methods that copy a tensor to the host
_READS = ("item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__")


class _HostSyncRecorder:
    """Records the seconds that these calls take. A call inside another recorded call is not recorded."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._inside = False

    def around_call(self, kind: str, /, *_: Any, **__: Any) -> Generator[None, Any, None]:
        if self._inside:
            return
        self._inside = True
        began = self.log.clock()
        try:
            yield
        finally:
            self._inside = False
            at = self.log.stack.caller()
            if at:
                self.log.record("wait", at=at, kind=kind, seconds=self.log.clock() - began)

    def around_read(self, name: str, tensor: Any, /, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """Record a method that reads a tensor's value. If the tensor is on a device, it waits for all queued work."""
        if tensor.device.type not in ("cpu", "meta"):
            yield from self.around_call(f".{name}()")


def install(log: EventLog) -> None:
    recorder = _HostSyncRecorder(log)
    for owner, name, kind in (
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cpu, "synchronize", "torch.cpu.synchronize"),
        (torch.accelerator, "synchronize", "torch.accelerator.synchronize"),
        (torch.cuda, "empty_cache", "torch.cuda.empty_cache"),
        (getattr(torch.accelerator, "memory", None), "empty_cache", "torch.accelerator.empty_cache"),
    ):
        if owner is not None and hasattr(owner, name):
            log.patches.around(owner, name, partial(recorder.around_call, kind))
    if torch.accelerator.is_available():
        for name in _READS:
            log.patches.around(torch.Tensor, name, partial(recorder.around_read, name))


def machine_state() -> dict[str, Any]:
    """Threads and cores of this process, seconds spent ready but not running, memory in use on each device."""
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "cores": available_cores(),
        "queued": _run_queue_seconds(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used = [torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count())]
        found["devices"] = used
    return found


def _run_queue_seconds() -> float | None:
    """Seconds that threads of this process were ready but not running; None if the system does not report them."""
    total = 0.0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
    return total
