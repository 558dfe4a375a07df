"""A trial that finds out whether a micro-batch fits into this process's memory, and how long it takes.

Each process tries alone: the model is a copy that no strategy has prepared, and a loss that communicates raises an
error. So if a process runs out of memory, no other process is left waiting in a collective.
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

PASSES = 3  # per trial; the first pass also selects kernels, so its time does not count
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # if a batch is too large; Accelerate and Lightning count it too
    "std::bad_alloc",
)
"""Messages of out-of-memory errors that have no separate class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Is this an out-of-memory error of an accelerator, of torch's CPU allocator or of Python?"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class Outcome(NamedTuple):
    """The result of a trial."""

    fits: bool
    seconds: float = 0.0  # per pass
    memory: int | None = None  # peak bytes of tensors on an accelerator; None on a CPU
    message: str = ""  # of an out-of-memory error
    error: BaseException | None = None  # any other error


class Examples:
    """Collated batches of the first examples in the order of training, on the device.

    options: of `run.loader`; only sampler, shuffle and collate_fn are used.
    """

    def __init__(self, dataset: Any, options: dict[str, Any], settings: Settings, device: torch.device) -> None:
        self._dataset, self._device = dataset, device
        self._collate: Callable[[list[Any]], Any] = options.get("collate_fn") or default_collate
        self._stream = is_stream(dataset)
        self._read: list[Any] = []  # examples of a stream, or indices from a sampler, read so far
        sampler, shuffle = options.get("sampler"), options.get("shuffle", True)
        self._source: Any = iter(dataset) if self._stream else None if sampler is None else iter(sampler)
        if self._source is None:
            length = len(dataset)
            places: Any = order.order_of(length, settings.seed, "train", 0) if shuffle else range(length)
            self._read = [int(index) for index in places[0 : order.WHOLE]]  # enough, also of a larger data set

    def batch(self, size: int, number: int) -> Any:
        """Return batch `number` of a series of batches of this size. After the last example, the series starts again
        with the first example."""
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
    """Forward and backward passes of a model on this process alone, with gradients and optimizer state allocated.

    model, optimizer: copies, which the trial moves and changes. reserve_bytes: bytes that each trial leaves unused.
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
        """Try micro-batches of this size. An exception of the trial is part of the outcome; only KeyboardInterrupt and
        SystemExit are raised. first: number of the first batch."""
        seconds, memory, message = 0.0, None, ""
        other: Exception | None = None
        try:
            with mesh.current().computing(mesh.ALONE, on_all_members=False):
                seconds, memory = self._passes(size, first)
        except Exception as error:
            if isinstance(error, UsageError):
                other = UsageError(f"in a trial, where each process computes alone: {error}")
                other.__cause__ = error
            elif is_out_of_memory(error):
                message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                other = error
        # Free memory here: in the except block, the error still references the frames with the tensors of the pass.
        if message:
            gc.collect()
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        return Outcome(not message and other is None, seconds, memory, message, other)

    def _place(self) -> None:
        """Move the model, and create the optimizer's state by an update with zero gradients."""
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._model.modules()):
            batchnorm.convert(self._model)  # torch's SyncBatchNorm would wait for the other processes
        self._model.to(self._device)
        self._precision.convert(self._model)
        if self._settings.channels_last:
            backends.channels_last(self._model)
        self._optimizer.load_state_dict(self._optimizer.state_dict())  # moves the state to the parameters' device
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
        """Compute one micro-batch. Gradients stay allocated, as between the micro-batches of a step."""
        self._optimizer.zero_grad(set_to_none=False)
        batch = self._examples.batch(size, number)
        with self._precision.autocast():
            terms = terms_of(self._loss_fn(self._model, batch), size, size)
        torch.stack([term.value.reshape(()) for term in terms]).sum().backward()
