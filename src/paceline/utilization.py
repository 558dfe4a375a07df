"""Utilization: the part of the devices' peak that training reaches (MFU), from the FLOPs of one global batch.

Model FLOPs utilization (Chowdhery et al. 2022, "PaLM", appendix B) = FLOPs per example x examples per second / peak of
all devices. The FLOPs are those that the devices compute in the second global batch, forward and backward, without the
update (step/flops.py). So products that a checkpointed layer computes again count, and products in custom kernels do
not. A compiled model runs uncompiled in this batch, since compiled kernels cannot be counted.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from paceline.comm.mesh import world_group
from paceline.data.loader import Loader
from paceline.errors import SettingError, warn
from paceline.monitor.summary import Totals
from paceline.planning.device_figures import DEVICES, PRODUCTS
from paceline.quantities import read_quantity
from paceline.run import Run, RunParts
from paceline.step.flops import LocalFlops
from paceline.step.observer import StepObserver

COUNTED = 1
"""The number of the global batch whose FLOPs are counted. The first one may initialise lazily."""

TRIES = 5
"""The largest number of global batches that are counted, if the earlier ones had no FLOPs."""


def peak_of(text: str, device: torch.device, precision: str) -> float:
    """The peak FLOP/s of a device. text: "auto", or a rate such as "989TFLOP/s". Raises SettingError."""
    if text != "auto":
        return read_quantity("peak_flops", text, "flops")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if name not in PRODUCTS:
        raise SettingError(f"peak_flops='auto': no peak is known for {name}. Give it: peak_flops='989TFLOP/s'.")
    if precision == "fp32":
        raise SettingError(
            "peak_flops='auto' with precision='fp32': the known peaks are those of 16-bit products. Give the peak of "
            "the products that you compute, such as peak_flops='67TFLOP/s'."
        )
    return DEVICES[PRODUCTS[name]].flops


class Utilization(StepObserver):
    """Counts the FLOPs of one global batch, and reports them to the run's totals. Raises SettingError."""

    def __init__(self, run: Run, parts: RunParts, peak: str) -> None:
        if parts.runs_closure and not parts.splits_closure:
            raise SettingError(
                f"peak_flops with strategy {run.settings.strategy}: its devices compute in several threads, whose "
                "FLOPs are not counted. Leave out peak_flops, or use one process per device."
            )
        self._in_step = parts.strategy.plan.in_step
        self._totals: Totals = parts.totals
        self._peak_error: SettingError | None = None
        self._peak = 0.0
        try:
            self._peak = peak_of(peak, run.device, run.settings.precision)
        except SettingError as error:
            if run.world.size == 1 or run.device.type != "cpu":
                raise
            self._peak_error = error  # this process may be a parameter server, which computes nothing
        self._loader: Loader | None = None  # the first training loader: the run's totals count its examples
        self._batches = 0  # its global batches so far
        self._tries = 0
        self._counter: LocalFlops | None = None  # while a global batch is counted
        self._counting = contextlib.ExitStack()
        self._flops = 0.0  # of the counted global batch, up to its last backward
        self._examples = 0

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if self._counter is None:
            return
        if not loader.train:
            self._counting.close()
        elif loader is self._loader and request.micro == 0:
            self._finish()

    def after_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if self._loader is None and loader.train:
            self._loader = loader
            if self._peak_error is not None:
                raise self._peak_error
        if loader is not self._loader:
            return
        if request.micro == 0:
            if self._batches == COUNTED:
                self._counter, self._flops = LocalFlops(), 0.0
                self._examples = request.total if self._in_step else 0
                self._tries += 1
                self._count()
            self._batches += 1
        if self._counter is not None and not self._in_step:
            self._examples += request.examples

    def after_backward(self) -> None:
        if self._counter is not None:
            self._flops = float(self._counter.flops)

    def before_update(self, optimizer: torch.optim.Optimizer, holders: list[Tensor]) -> list[Tensor]:
        self._counting.close()
        return holders

    def after_step(self, acted: bool) -> None:
        if self._counter is not None:
            self._count()

    def before_end(self, loader: Loader, whole: bool) -> None:
        if self._counter is None:
            return
        if not loader.train:  # an evaluation in the counted batch
            self._count()
        elif loader is self._loader and whole:
            self._finish()
        elif loader is self._loader:  # perhaps on this process alone: count another global batch
            self._counting.close()
            self._counter, self._batches = None, COUNTED

    def before_close(self) -> None:
        self._counting.close()

    def _count(self) -> None:
        """Count from here on."""
        assert self._counter is not None
        self._counting.close()
        self._counting.enter_context(torch.compiler.set_stance("force_eager"))  # flex_attention compiles itself
        self._counting.enter_context(self._counter)

    def _finish(self) -> None:
        """Stop counting, and report. Collective, unless the processes are not in step."""
        self._counting.close()
        assert self._counter is not None
        flops, peak = self._flops, self._peak
        if self._counter.unknown is not None:
            warn(f"peak_flops: torch cannot count the FLOPs of {self._counter.unknown}, so the run shows no MFU.")
            flops = math.nan
        self._counter = None
        if self._in_step:
            everyone = world_group().gather([flops, peak], "the FLOPs of a global batch")
            flops, peak = (sum(column) for column in zip(*everyone, strict=True))
        else:
            peak *= world_group().size
        if flops > 0 and self._examples:
            self._totals.set_flops(flops / self._examples, peak)
        elif flops == 0 and self._tries < TRIES:  # an evaluation instead of a step, or no product: try another
            self._batches = COUNTED
