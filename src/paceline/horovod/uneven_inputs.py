"""hvd.join: a process that has fewer batches than others takes part in their sums with zeros until they have ended."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.horovod import hvd_collectives, hvd_world, named_operations
from paceline.horovod.gradient_reducer import GradientReducer, reducers


def join(device: Any = -1) -> int:
    """Return when all processes have called it, and take part in the others' steps, sums and barriers until then.

    As in Horovod an average divides by all processes, also by those that have joined and add zeros: it is then no mean
    over the examples. The weights of a process that has joined stay behind: broadcast those of the rank that is
    returned.

    Args:
        device: Horovod's, which is not looked at: zeros lie where the tensors do.

    Returns:
        the rank that came last.

    Raises:
        UsageError: between a backward and its step; with sparse gradients; or what the others do needs all processes.
    """
    hvd_world.members()
    for reducer in reducers:
        if reducer.under_way:
            raise UsageError(f"hvd.join() came between a backward and the step of {reducer.label}. Step first.")
        if reducer.gathers:
            raise UsageError(
                f"hvd.join(): {reducer.label} has sparse gradients, which need all processes. Give it "
                "sparse_as_dense=True, or all processes equally many batches (DistributedSampler does)."
            )
    threads = [_Stand(reducer) for reducer in reducers]
    for thread in threads:
        thread.start()
    last = named_operations.take_part(hvd_collectives.stand_in)
    for thread in threads:
        thread.join()
        if thread.error is not None:
            raise thread.error
    return last


class _Stand(threading.Thread):
    """Stands in for this process in the steps of one optimizer, whose process group is its own."""

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(daemon=True, name=f"paceline-join-{reducer.label}")
        self.error: BaseException | None = None
        self._reducer = reducer
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            self._reducer.stand_in()
        except BaseException as error:  # raised by join(), in the script's thread
            self.error = error
