"""The probe: it measures a run and ends its script.

A step is one global batch. It begins with the first micro-batch that a training loader yields after an update, and ends
with the last `run.step` for this batch. The phases of a trial:

1. The first `warmup` steps are not timed.
2. The other steps, up to `steps`, are timed. The losses of all steps in phases 1 and 2 are recorded.
3. PROFILED_STEPS more steps run under torch's profiler, which measures the time in communication. The first of these
   steps is not counted, because ranks wait in it until the profiler has started on every rank.
4. Each rank writes its record. Then TrialEnded, a SystemExit, ends the script: `finally` blocks and exit functions run.

The time of a step starts at the end of the previous step. If an epoch ends or an evaluation runs in between, it starts
when the step's data are requested. On an accelerator the start and the end are events in its stream. They are read at
the end of the trial, so that measuring adds no wait for the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import generators
from paceline.compare.worker.communication_profile import CommunicationProfile, CommunicationTime
from paceline.compare.worker.resources import Traffic, peak_memory, traffic
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.monitor.window import LOSS, Window
from paceline.run import Run, RunParts
from paceline.step.observer import StepObserver
from paceline.trials.spec import BATCH_NORM_PER_SHARD, DRAWS, NOT_IN_STEP, PROFILED_STEPS, TrialEnded, TrialSpec

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class _Step:
    """One step."""

    epoch: int
    number: int  # the number of the step in its epoch
    total: int  # examples of the global batch
    began: Any  # when it began: seconds, or an event of the accelerator
    waited_before: float  # seconds that all training loaders had waited at the end of the previous step
    unseen: float  # seconds waited for this step's data before `began`
    window: Window  # the losses of the step
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # (shard, micro-batch, examples) of each yield
    ended: Any = None  # when it ended, in the form of `began`
    waited: float = 0.0  # seconds that all training loaders had waited at its end


class Probe(StepObserver):
    """Observes a run from its start to its end."""

    def __init__(self, run: Run, parts: RunParts, spec: TrialSpec) -> None:
        self._run, self._parts, self._spec = run, parts, spec
        self._accelerated = run.device.type != "cpu"
        self._loaders: list[Loader] = []
        self._steps: list[_Step] = []  # complete steps
        self._current: _Step | None = None
        self._counted_loader: Loader | None = None  # the loader that counts the examples of the current step
        self._disturbed = True  # whether an evaluation, a save or a new phase came after the last step
        self._traffic: list[Traffic | None] = []  # at the start and at the end of timing
        self._memory: tuple[int, str] | None = None
        self._profile: CommunicationProfile | None = None
        self._start_up: float | None = None
        self._written = False
        # Draws are detected before any step is timed, and only in a single process that computes one piece at a time.
        self._sees_draws = run.world.size == 1 and parts.noise is None and not parts.runs_closure
        self._draws = False  # whether the model or the loss has drawn random numbers
        self._generators: list[torch.Tensor] = []  # the states of torch's generators after the last yield
        parts.stepper.losses = []  # for this probe: the monitor is switched off

    # --- events of the run

    def before_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        if self._spec.global_batch is not None and options["train"]:
            if options.get("batch_sampler") is not None:
                raise SettingError(
                    f"--global-batch {self._spec.global_batch}: the script's training loader has a batch_sampler, "
                    "which determines the global batch. Leave out --global-batch."
                )
            options["global_batch"] = self._spec.global_batch

    def after_loader(self, loader: Loader) -> None:
        if loader.train:
            self._loaders.append(loader)

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if not loader.train:
            self._disturbed = True
        elif request.micro == 0 and (self._current is None or self._current.ended is not None):
            self._complete_step()
            self._begin_step(loader)

    def after_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if self._current is not None and loader.train and loader is self._counted_loader:
            self._current.parts += [(part.shard, part.micro, len(part.indices)) for part in request.parts]
        if loader.train and self._looks_for_draws():
            self._generators = _generator_states(self._run.device)

    def after_step(self, acted: bool) -> None:
        if acted and self._current is not None:
            now = self._current
            now.ended, now.waited = self._timestamp(), self._seconds_waited()
            losses = self._parts.stepper.losses  # read now, before the script can change them
            if losses:
                now.window.add_losses(losses)
                losses.clear()
            if self._start_up is None:
                if self._accelerated:
                    torch.accelerator.synchronize()
                self._start_up = time.time() - self._spec.launched_at

    def before_backward(self, losses: tuple[Tensor, ...]) -> float:
        if losses and self._generators and self._looks_for_draws():
            self._draws |= not _alike(self._generators, _generator_states(self._run.device))
        self._generators = []  # the backward may seed the generators; `closure` detects a closure's draws
        return 1

    def closure(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def seen(model: Any, batch: Any) -> Any:
            before = _generator_states(self._run.device)
            loss = loss_fn(model, batch)
            self._draws |= not _alike(before, _generator_states(self._run.device))
            return loss

        return seen if self._looks_for_draws() else loss_fn

    def _looks_for_draws(self) -> bool:
        return self._sees_draws and not self._draws and len(self._steps) < self._spec.warmup

    def in_save(self, begins: bool) -> None:
        self._disturbed = True

    def before_close(self) -> None:
        with contextlib.suppress(OSError):  # at exit; the launcher will report that there is no record
            self._write_record()

    # --- steps

    def _begin_step(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        before = self._steps[-1] if self._steps else None
        waited = before.waited if before is not None else 0.0
        if before is not None and not self._disturbed and before.epoch == request.epoch:
            began, unseen = before.ended, 0.0
        else:
            began, unseen = self._timestamp(), self._seconds_waited() - waited
        self._counted_loader, self._disturbed = loader, False
        window = Window(self._run.device)
        self._current = _Step(request.epoch, request.step, request.total, began, waited, unseen, window)

    def _complete_step(self) -> None:
        """Complete the current step, if any, before the next step begins. Start the next phase if it is due."""
        if self._current is None:
            return
        self._keep_finished_step()
        made, spec = len(self._steps), self._spec
        if made == spec.steps + 1 and self._profile is not None:
            self._profile.begin_counting()
        if made not in (spec.warmup, spec.steps, spec.steps + PROFILED_STEPS):
            return
        self._disturbed = True
        if made == spec.warmup:
            self._traffic.append(traffic())
        elif made == spec.steps:
            self._traffic.append(traffic())
            self._memory = peak_memory(self._run.device)
            self._profile = CommunicationProfile(self._run.device)
            self._profile.start()
        else:
            self._write_record()
            raise TrialEnded(0)

    def _keep_finished_step(self) -> None:
        if self._current is not None and self._current.ended is not None:
            self._steps.append(self._current)
        self._current = None

    def _timestamp(self) -> Any:
        if not self._accelerated:
            return time.perf_counter()
        event = torch.Event(device=self._run.device, enable_timing=True)
        event.record()
        return event

    def _step_seconds(self, step: _Step) -> float:
        between = step.began.elapsed_time(step.ended) / 1e3 if self._accelerated else step.ended - step.began
        return float(between) + step.unseen

    def _seconds_waited(self) -> float:
        return sum(loader.waited for loader in self._loaders)

    # --- the record

    def _write_record(self) -> None:
        """Write the record, once. The script may have ended before the trial, and a server makes no steps."""
        if self._written:
            return
        self._written = True
        self._keep_finished_step()
        if self._accelerated and self._steps:
            torch.accelerator.synchronize()
        if len(self._traffic) == 1:
            self._traffic.append(traffic())
        communication: CommunicationTime | None = None
        if self._profile is not None:
            communication = self._profile.stop()
            if len(self._steps) < self._spec.steps + PROFILED_STEPS:
                communication = None  # the ranks may have made different numbers of steps
        counted = self._steps[self._spec.steps + 1 :]
        memory = self._memory or peak_memory(self._run.device)
        steps = self._steps[: self._spec.steps]
        moved = [counted for counted in self._traffic if counted is not None]
        record = {
            "rank": self._run.world.rank,
            "device": str(self._run.device),
            "start_up_seconds": self._start_up,
            "memory_bytes": memory[0],
            "memory_kind": memory[1],
            "bytes_sent": moved[1].sent - moved[0].sent if len(moved) == 2 else None,
            "bytes_received": moved[1].received - moved[0].received if len(moved) == 2 else None,
            "communication": None if communication is None else communication._asdict(),
            "profiled_seconds": sum(self._step_seconds(step) for step in counted),
            "chunks": self._parts.chunks,
            "parameter_bytes": sum(p.nbytes for model in self._parts.models for p in model.parameters()),
            "traits": self._traits(),
            "steps": [self._step_record(step, number >= self._spec.warmup) for number, step in enumerate(steps)],
        }
        path = os.path.join(self._spec.directory, f"rank-{self._run.world.rank}.json")
        with open(path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(path + ".part", path)

    def _traits(self) -> list[str]:
        run, strategy = self._run, self._parts.strategy
        normalised = any(isinstance(layer, _BATCH_NORMS) for model in self._parts.models for layer in model.modules())
        found = {
            DRAWS: self._draws,
            NOT_IN_STEP: not self._parts.in_step,
            BATCH_NORM_PER_SHARD: normalised and run.settings.batch_norm == "shard" and strategy.plan.shards > 1,
        }
        return [trait for trait, has in found.items() if has]

    def _step_record(self, step: _Step, timed: bool) -> dict[str, Any]:
        return {
            "epoch": step.epoch,
            "step": step.number,
            "total": step.total,
            "parts": step.parts,
            "timed": timed,
            "seconds": self._step_seconds(step),
            "waited": step.waited - step.waited_before,
            "losses": {key.removeprefix(LOSS): list(pair) for key, pair in step.window.totals().items()},
        }


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators, on the CPU and on the device."""
    state = generators.get_state(device)
    return [state[key] for key in ("torch", "device") if key in state]


def _alike(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(states, others, strict=True))
