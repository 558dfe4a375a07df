"""hvd.join: a process with fewer batches contributes zeros to the other processes' sums until they finish."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.horovod import hvd_collectives, hvd_world, named_operations
from paceline.horovod.gradient_reducer import GradientReducer, reducers


def join(device: Any = -1) -> int:
    """Take part in the other processes' steps, sums and barriers until all processes have called join.

    As in Horovod, joined processes add zeros, but an average still divides by the number of all processes. So it is not
    a mean over the examples. A joined process does not update its weights: broadcast the weights of the returned rank.

    Args:
        device: ignored; for compatibility with Horovod. Zeros are created on the tensors' device.

    Returns:
        The last rank to call join.

    Raises:
        UsageError: join was called between a backward and its step; gradients are sparse; or another process makes a
            call that needs all processes.
    """
    hvd_world.members()
    for reducer in reducers:
        if reducer.under_way:
            raise UsageError(
                f"hvd.join() was called between a backward and the step of {reducer.label}. Call its step() first."
            )
        if reducer.gathers:
            raise UsageError(
                f"hvd.join(): {reducer.label} has sparse gradients, which need all processes. Set "
                "sparse_as_dense=True, or give all processes the same number of batches (with DistributedSampler)."
            )
    threads = [_StandIn(reducer) for reducer in reducers]
    for thread in threads:
        thread.start()
    last = named_operations.take_part(hvd_collectives.stand_in)
    for thread in threads:
        thread.join()
        if thread.error is not None:
            raise thread.error
    return last


class _StandIn(threading.Thread):
    """Contributes zeros to the steps of one optimizer, in the optimizer's process group."""

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
