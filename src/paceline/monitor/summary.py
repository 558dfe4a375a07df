"""The lines that a run prints about itself: its setup at the start, and a summary at the end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.config import Settings
from paceline.data.loader import Loader
from paceline.step.step import Stepper
from paceline.strategies import default
from paceline.torch_private.core import BatchNormBase
from paceline.world import World

RATE_SECONDS = 10.0  # period for counting examples/s


@dataclass(frozen=True)
class Facts:
    """The setup of a run when training begins."""

    world: World
    settings: Settings
    device: str  # name of the device
    backend: str  # backend of torch.distributed; "" with one process
    carrier: str  # "shared memory" if gradients use it; "" if the backend sends them
    strategy: str  # with its options
    global_batch: int  # in examples
    shards: int  # per global batch
    micro_batches: int  # per shard
    filled: int | None  # examples in the first global batch, if training begins at the start of an epoch; else None
    batch_norm: bool  # does a model have batch norm?
    threads: int  # CPU threads of this process

    def as_config(self) -> dict[str, str | int | float | bool]:
        """The settings and the world as a flat dict, for trackers. None becomes "default"."""
        settings = {
            field.name: getattr(self.settings, field.name)
            for field in dataclasses.fields(self.settings)
            if field.name not in ("log_dir", "trackers", "progress", "log_every", "trace")
        }
        values = {
            **settings,
            "strategy": self.strategy,
            "device": self.device,
            "processes": self.world.size,
            "machines": self.world.nodes,
            "global_batch": self.global_batch,
            "micro_batches": self.micro_batches,
            "torch": str(torch.__version__),
        }
        plain = (str, int, float, bool)
        return {k: "default" if v is None else v if isinstance(v, plain) else str(v) for k, v in values.items()}


def facts(
    world: World,
    settings: Settings,
    device: torch.device,
    stepper: Stepper,
    models: Sequence[nn.Module],
    loader: Loader,
) -> Facts:
    """Collect the facts. Call it after the loader's first yield."""
    request = loader.current
    assert request is not None
    plan = stepper.strategy.plan
    return Facts(
        world=world,
        settings=settings,
        device=_device_name(device),
        backend=_backend(device) if world.size > 1 else "",
        carrier=stepper.strategy.carrier(),
        strategy=str(settings.strategy or default(world.size)),
        global_batch=loader.global_batch or request.total,
        filled=request.total if request.step == 0 and plan.in_step else None,
        shards=plan.shards,
        micro_batches=request.micro_batches,
        batch_norm=any(isinstance(module, BatchNormBase) for model in models for module in model.modules()),
        threads=torch.get_num_threads(),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _backend(device: torch.device) -> str:
    if not torch.distributed.is_initialized():
        return ""
    pairs = [item.split(":") for item in str(torch.distributed.get_backend_config()).split(",")]
    return next((backend for kind, backend in pairs if kind == device.type), pairs[0][-1])


def at_start(facts: Facts) -> list[str]:
    """Return the three or four lines that a run prints at its start."""
    world, settings = facts.world, facts.settings
    where = (
        f"{_count(world.size, 'process', 'es')} on {_count(world.nodes, 'machine')}" if world.size > 1 else "1 process"
    )
    through = f" through {facts.backend}" if facts.backend else ""
    through += f" and {facts.carrier}" if facts.carrier else ""
    lines = [
        f"{where}, {facts.device}{through}, strategy {facts.strategy}, {_count(facts.threads, 'thread')} per process",
        _batch(facts),
        _numerics(facts),
    ]
    costs = [text for applies, text in _COSTS if applies(settings)]
    return lines + ([f"set: {'; '.join(costs)}"] if costs else [])


_COSTS = (
    (lambda s: s.deterministic, "deterministic=true (slower kernels)"),
    (lambda s: s.reproducible is not None, "reproducible (slower kernels, no overlap of backward and reduction)"),
    (lambda s: s.tf32, "tf32=true (float32 products with 10 bits of mantissa)"),
    (lambda s: s.channels_last, "channels_last=true"),
    (lambda s: s.cudnn_benchmark, "cudnn_benchmark=true (seconds of tuning per new shape, kernels may differ)"),
    (lambda s: s.compile, "compile=true (the first steps are slow)"),
    (lambda s: s.nonfinite == "skip", "nonfinite='skip' (each step waits for the device)"),
)  # fmt: skip


def _batch(facts: Facts) -> str:
    total, shards, micros = facts.global_batch, facts.shards, facts.micro_batches
    low, high = total // shards, -(-total // shards)
    each = f"{high}" if low == high else f"{low} or {high}"
    text = f"global batch {total} = {_count(shards, 'shard')} of {each}" if shards > 1 else f"global batch {total}"
    if micros > 1:
        low, high = low // micros, -(-high // micros)
        text += f", in {micros} micro-batches of {high if low == high else f'{low} to {high}'}"
    if facts.filled is not None and facts.filled < total:
        text += f" (the data set has only {facts.filled} examples)"
    return text + ("; the learning rate is not scaled" if shards > 1 else "")


def _numerics(facts: Facts) -> str:
    settings = facts.settings
    parts = [f"precision {settings.precision}", f"seed {settings.seed}"]
    if facts.batch_norm and facts.shards > 1:
        whole = settings.batch_norm == "global"
        parts.insert(
            0, f"batch norm over {'the global batch' if whole else 'each shard: results depend on the shard count'}"
        )
    return ", ".join(parts)


class Totals:
    """Counts of a run, for its summary line."""

    def __init__(self) -> None:
        self.examples = 0  # of global batches, over all processes
        self.seconds = 0.0  # total duration of passes over the training data
        self.checkpoints, self.checkpoint_seconds = 0, 0.0  # number of checkpoints, and the time to write them
        self._peak_rate: float | None = None  # examples per second at the peak FLOP/s of all devices; None: unknown
        # loader -> its `waited` (seconds) when its last pass began or ended
        self._loaders: dict[Loader, float] = {}
        self._began: float | None = None  # start of the current pass
        self._samples: deque[tuple[float, int]] = deque()  # (time, examples), for the rate

    def begin(self, loader: Loader, now: float) -> None:
        """Start a pass. now: the time at which its first batch arrived. Waiting for this batch belongs to the pass."""
        before = self._loaders.get(loader, 0.0)
        self._began = now - (loader.waited - before)
        self._loaders[loader] = loader.waited
        self._samples.clear()
        self._samples.append((now, self.examples))

    def end(self, now: float) -> None:
        for loader in self._loaders:
            self._loaders[loader] = loader.waited
        if self._began is not None:
            self.seconds += now - self._began
            self._began = None

    def saved(self, seconds: float) -> None:
        self.checkpoints += 1
        self.checkpoint_seconds += seconds

    def set_flops(self, per_example: float, peak: float) -> None:
        """Set the FLOPs of an example, and the peak FLOP/s of all devices, for `utilization`."""
        self._peak_rate = peak / per_example

    def utilization(self, rate: float | None) -> float | None:
        """The part of the peak FLOP/s at this rate, in examples per second; None if unknown."""
        return None if rate is None or self._peak_rate is None else rate / self._peak_rate

    def waited(self) -> float:
        """Seconds that this process has waited for data."""
        return sum(loader.waited for loader in self._loaders)

    def rate(self) -> float | None:
        """Examples per second, over about the last RATE_SECONDS of this pass."""
        if self._began is None or not self._samples:
            return None
        now = time.perf_counter()
        if now - self._samples[-1][0] >= 0.5:
            self._samples.append((now, self.examples))
            while len(self._samples) > 2 and now - self._samples[1][0] > RATE_SECONDS:
                self._samples.popleft()
        began, before = self._samples[0]
        return (self.examples - before) / (now - began) if now - began > 0.2 else None


def at_end(totals: Totals, steps: int, world: World) -> str:
    """The summary line at the end of a run."""
    totals.end(time.perf_counter())
    seconds = max(totals.seconds, 1e-9)
    waiting, rate = 100 * min(totals.waited() / seconds, 1.0), totals.examples / seconds
    used = totals.utilization(rate)
    text = (
        f"{_count(steps, 'step')} in {duration(seconds)}, {amount(rate)} examples/s, "
        f"{'' if used is None else f'{100 * used:.1f}% of the peak FLOP/s (MFU), '}"
        f"{waiting:.0f}% of it waiting for data{' (rank 0)' if world.size > 1 else ''}"
    )
    if totals.checkpoints:
        text += f"; {_count(totals.checkpoints, 'checkpoint')} in {duration(totals.checkpoint_seconds)}"
    return text


def logged(step: int, values: Mapping[str, float]) -> str:
    """Return the line to print for a `run.log` outside of the loop."""
    return "  ".join([f"step {step}", *(f"{key} {number(value)}" for key, value in values.items())])


def number(value: float) -> str:
    """Format a number with four significant digits. Integers below a million are not rounded."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
