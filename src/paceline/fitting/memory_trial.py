"""Does a micro-batch of this size fit into this process's memory, and how long does it take? Each process tries alone.

No other process is asked for anything inside a trial: the model is a copy that no strategy has prepared, and a loss
that gathers over the processes is refused. A process that runs out of memory therefore leaves no other process in the
middle of a collective operation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate, default_convert

from paceline.comm import mesh
from paceline.config import Settings
from paceline.data import order
from paceline.data.fetch import is_stream
from paceline.data.placement import move
from paceline.errors import UsageError
from paceline.norm import batchnorm
from paceline.step import backends
from paceline.step.loss import terms_of
from paceline.step.precision import Precision

PASSES = 3  # of a trial; the first one also chooses kernels, and its time does not count
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # at a batch too large for it; Accelerate and Lightning count it too
    "std::bad_alloc",
)
"""What errors for want of memory say that are of no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Is this an error for want of memory: torch's for an accelerator, that of its allocator on a CPU, Python's?"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class Outcome(NamedTuple):
    """What a trial came to."""

    fits: bool
    seconds: float = 0.0  # of a pass
    memory: int | None = None  # the most bytes of tensors on an accelerator; None on a CPU
    message: str = ""  # of the error for want of memory
    error: BaseException | None = None  # any other error


class Examples:
    """Collated batches of the first examples in the order of training, on the device.

    options: of `run.loader`; sampler and collate_fn are used.
    """

    def __init__(self, dataset: Any, options: dict[str, Any], settings: Settings, device: torch.device) -> None:
        self._dataset, self._device = dataset, device
        self._collate: Callable[[list[Any]], Any] = options.get("collate_fn") or default_collate
        self._stream = is_stream(dataset)
        self._read: list[Any] = []  # of a stream or a sampler: what has been read so far
        sampler, shuffle = options.get("sampler"), options.get("shuffle", True)
        self._source: Any = iter(dataset) if self._stream else None if sampler is None else iter(sampler)
        if self._source is None:
            length = len(dataset)
            places: Any = order.order_of(length, settings.seed, "train", 0) if shuffle else range(length)
            self._read = [int(index) for index in places[0 : order.WHOLE]]  # enough, and not all of a large data set

    def batch(self, size: int, number: int) -> Any:
        """The batch of that number, where all have this size. After the last example comes the first one again."""
        if self._source is not None:
            self._read += islice(self._source, max(0, (number + 1) * size - len(self._read)))
        chosen = [self._read[place % len(self._read)] for place in range(number * size, (number + 1) * size)]
        examples = chosen if self._stream else [self._dataset[index] for index in chosen]
        return move(default_convert(self._collate(examples)), self._device)

    def __bool__(self) -> bool:
        if self._source is not None and not self._read:
            self._read += islice(self._source, 1)
        return bool(self._read)


class MemoryTrial:
    """Forward and backward passes of a model on this process alone, with gradients and optimizer state in place.

    model, optimizer: copies, which are moved and changed. reserve_bytes: kept taken during each trial.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        examples: Examples,
        settings: Settings,
        device: torch.device,
        reserve_bytes: int,
    ) -> None:
        self._model, self._optimizer, self._loss_fn, self._examples = model, optimizer, loss_fn, examples
        self._settings, self._device, self._reserve = settings, device, reserve_bytes
        self._precision = Precision(settings.precision, device)
        self._placed = False

    def run(self, size: int, first: int = 0) -> Outcome:
        """Try micro-batches of this size. first: the number of the first batch. No error is raised but those that end
        the program."""
        seconds, memory, message = 0.0, None, ""
        other: Exception | None = None
        try:
            with mesh.current().computing(mesh.OneReplica(), everywhere=False):
                seconds, memory = self._passes(size, first)
        except Exception as error:
            if isinstance(error, UsageError):
                other = UsageError(f"in a trial, in which each process computes alone: {error}")
                other.__cause__ = error
            elif is_out_of_memory(error):
                message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                other = error
        # Only here, when the error is gone, and with it the frames that hold the tensors of the pass.
        if message:
            gc.collect()
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        return Outcome(not message and other is None, seconds, memory, message, other)

    def _place(self) -> None:
        """Move the model, and give the optimizer its state, by an update with gradients that are zero."""
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._model.modules()):
            batchnorm.convert(self._model)  # torch's asks the other processes, and ours those that compute together
        self._model.to(self._device)
        self._precision.convert(self._model)
        if self._settings.channels_last:
            backends.channels_last(self._model)
        self._optimizer.load_state_dict(self._optimizer.state_dict())  # onto the parameters' device
        self._model.train()
        self._placed = True

    def _passes(self, size: int, first: int) -> tuple[float, int | None]:
        reserved = torch.empty(self._reserve, dtype=torch.uint8, device=self._device)
        on_cpu = self._device.type == "cpu"
        module: Any = None if on_cpu else torch.get_device_module(self._device)
        if not self._placed:
            self._place()
            self._pass(size, first)
            self._optimizer.zero_grad(set_to_none=False)
            self._optimizer.step()
        if module is not None and hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(self._device)
        times = []
        for number in range(PASSES):
            began = time.perf_counter()
            self._pass(size, first + number)
            if not on_cpu:
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        most = getattr(module, "max_memory_allocated", None)
        del reserved
        return min(times[1:]), None if most is None else int(most(self._device)) - self._reserve

    def _pass(self, size: int, number: int) -> None:
        """One micro-batch. Gradients stay allocated, as between the micro-batches of a step."""
        self._optimizer.zero_grad(set_to_none=False)
        batch = self._examples.batch(size, number)
        with self._precision.autocast():
            terms = terms_of(self._loss_fn(self._model, batch), size, size)
        torch.stack([term.value.reshape(()) for term in terms]).sum().backward()
