"""Calls that make the host wait for the device or free its cached memory; threads and cores."""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.doctor.recorders.event_log import EventLog
from paceline.doctor.recorders.patching import patch
from paceline.launcher.plan import available_cores

# methods that copy a tensor's value to the host
# methods that copy a tensor's value to the host
_READS = ("item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__")


class _HostSyncRecorder:
    """The seconds of such calls. A call inside another one is not recorded."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._inside = False

    def wrap_call(self, kind: str) -> Any:
        def make(original: Any) -> Any:
            def function(*args: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling() or not self.log.active or self._inside:
                    return original(*args, **options)
                self._inside = True
                began = self.log.clock()
                try:
                    return original(*args, **options)
                finally:
                    self._inside = False
                    at = self.log.caller()
                    if at:
                        self.log.record("wait", at=at, kind=kind, seconds=self.log.clock() - began)

            return function

        return make

    def wrap_read(self, name: str) -> Any:
        """A method that reads a tensor's value: on a device it waits for all that is queued."""

        def make(original: Any) -> Any:
            def method(tensor: Any, /, *args: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling() or tensor.device.type in ("cpu", "meta"):
                    return original(tensor, *args, **options)
                return waited(tensor, *args, **options)

            waited = self.wrap_call(f".{name}()")(original)
            return method

        return make


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
            patch(owner, name, recorder.wrap_call(kind))
    if torch.accelerator.is_available():
        for name in _READS:
            patch(torch.Tensor, name, recorder.wrap_read(name))


def machine_state() -> dict[str, Any]:
    """Of this process: threads, cores, seconds for which it was ready and not running, memory in use on each device."""
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
    """Seconds for which threads of this process were ready and not running; None where the system does not tell."""
    total = 0.0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
    return total
