"""A run that is a trial: measured from outside, kept from writing, and ended.

The probe takes the place of some of a run's methods; the run and its strategy know nothing of it. A step is one global
batch: it begins with the first micro-batch that a training loader yields after an update, and ends with the last
`run.step` that acts on it. Phases, in steps:

1. `warmup` steps are made, and not timed.
2. The others up to `steps` are timed. Of all of them the losses are kept.
3. PROFILED more run under torch's profiler, which tells the time in communication. The first of them is not counted:
   in it the ranks wait for the one whose profiler was last to start.
4. Each rank writes its record, and its script is ended by TrialEnded, a SystemExit: `finally` and exit functions run.

A step's time runs from the end of the step before it, or, where an epoch or an evaluation lies between, from the
moment at which its data were asked for. On an accelerator both ends are events in its stream, read when all is over,
so that nothing waits for the device that would not wait otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import SettingError
from paceline.monitor.window import LOSS, Window
from paceline.run import Run
from paceline.train.loader import Loader
from paceline.trial.order import PROFILED, Order
from paceline.trial.profiled import Communication, Profile
from paceline.trial.resources import Traffic, peak_memory, traffic


class TrialEnded(SystemExit):
    """Ends the script of a trial. No error: the exit code is 0."""


@dataclass
class _Step:
    epoch: int
    number: int
    total: int
    began: Any
    waited_before: float  # by all training loaders, when the step before it ended
    unseen: float  # of the time waited for this step's data, what lies before `began`
    window: Window
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # (shard, micro-batch, examples)
    ended: Any = None
    waited: float = 0.0  # when it ended


class Probe:
    """Attached to a run when it is made; it has no other callers than the run's own."""

    def __init__(self, run: Run, order: Order) -> None:
        self._run, self._order = run, order
        self._accelerated = run.device.type != "cpu"
        self._loaders: list[Loader] = []
        self._steps: list[_Step] = []  # those that are complete
        self._now: _Step | None = None
        self._first: Loader | None = None  # whose batches are the step's examples, where several take part
        self._disturbed = True  # something came between the last step and the next
        self._traffic: list[Traffic | None] = []  # when timing began and when it ended
        self._memory: tuple[int, str] | None = None
        self._profile: Profile | None = None
        self._communication: Communication | None = None
        self._start_up: float | None = None
        self._written = False
        run._stepper.losses = []  # the monitor is told to be quiet, and leaves them
        own = {
            "loader": self._loader,
            "_on_yield": self._on_yield,
            "step": self._step,
            "save": self._save,
            "restore": self._restore,
            "export": self._nothing,
            "add_tracker": self._nothing,
            "close": self._close,
        }
        self._runs: dict[str, Callable[..., Any]] = {name: getattr(run, name) for name in own}
        for name, method in own.items():
            setattr(run, name, method)

    # --- in place of the run's methods

    def _loader(self, dataset: Any, **options: Any) -> Loader:
        if self._order.global_batch is not None and options.get("train", True):
            if options.get("batch_sampler") is not None:
                raise SettingError(
                    f"--global-batch {self._order.global_batch}: the script's training loader has a batch_sampler of "
                    "its own, which says how large a global batch is. Leave --global-batch out."
                )
            options["global_batch"] = self._order.global_batch
        loader: Loader = self._runs["loader"](dataset, **options)
        if loader.train:
            self._loaders.append(loader)
        return loader

    def _on_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if not loader.train:
            self._disturbed = True
        elif request.micro == 0 and (self._now is None or self._now.ended is not None):
            self._complete()
            self._begin(loader)
        self._runs["_on_yield"](loader)
        if self._now is not None and loader.train and loader is self._first:
            self._now.parts += [(part.shard, part.micro, len(part.indices)) for part in request.parts]

    def _step(self, *args: Any, **options: Any) -> bool:
        acted: bool = self._runs["step"](*args, **options)
        if acted and self._now is not None:
            now = self._now
            now.ended, now.waited = self._mark(), self._waited()
            losses = self._run._stepper.losses  # taken out before the script can change them
            if losses:
                now.window.add_losses(losses)
                losses.clear()
            if self._start_up is None:
                if self._accelerated:
                    torch.accelerator.synchronize()
                self._start_up = time.time() - self._order.began
        return acted

    def _save(self, directory: str | Path, **_: Any) -> Path:
        self._disturbed = True
        return Path(directory) / f"step-{self._run.steps:08d}"

    def _restore(self, directory: str | Path, **_: Any) -> bool:
        """A trial begins at step 0, with fresh weights, whatever an earlier run has left."""
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        self._disturbed = True

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # at exit; the launcher sees that there is no record
            self._finish()
        self._runs["close"]()

    # --- steps

    def _begin(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        before = self._steps[-1] if self._steps else None
        waited = before.waited if before is not None else 0.0
        if before is not None and not self._disturbed and before.epoch == request.epoch:
            began, unseen = before.ended, 0.0
        else:
            began, unseen = self._mark(), self._waited() - waited
        self._first, self._disturbed = loader, False
        window = Window(self._run.device)
        self._now = _Step(request.epoch, request.step, request.total, began, waited, unseen, window)

    def _complete(self) -> None:
        """The step at hand, if there is one, is over: the next one has begun. Changes the phase where it is time."""
        if self._now is None:
            return
        self._add()
        made, order = len(self._steps), self._order
        if made == order.steps + 1 and self._profile is not None:
            self._profile.mark()
        if made not in (order.warmup, order.steps, order.steps + PROFILED):
            return
        self._disturbed = True
        if made == order.warmup:
            self._traffic.append(traffic())
        elif made == order.steps:
            self._traffic.append(traffic())
            self._memory = peak_memory(self._run.device)
            self._profile = Profile(self._run.device)
            self._profile.start()
        else:
            self._finish()
            raise TrialEnded(0)

    def _add(self) -> None:
        if self._now is not None and self._now.ended is not None:
            self._steps.append(self._now)
        self._now = None

    def _mark(self) -> Any:
        if not self._accelerated:
            return time.perf_counter()
        event = torch.Event(device=self._run.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, step: _Step) -> float:
        between = step.began.elapsed_time(step.ended) / 1e3 if self._accelerated else step.ended - step.began
        return float(between) + step.unseen

    def _waited(self) -> float:
        return sum(loader.waited for loader in self._loaders)

    # --- the record

    def _finish(self) -> None:
        """Writes what there is, once: a script may end before the trial does, and a server makes no step at all."""
        if self._written:
            return
        self._written = True
        self._add()
        if self._accelerated and self._steps:
            torch.accelerator.synchronize()
        if len(self._traffic) == 1:
            self._traffic.append(traffic())
        communication: Communication | None = None
        if self._profile is not None:
            communication = self._profile.stop()
            if len(self._steps) < self._order.steps + PROFILED:
                communication = None  # the ranks may have made unequally many
        counted = self._steps[self._order.steps + 1 :]
        memory = self._memory or peak_memory(self._run.device)
        steps = self._steps[: self._order.steps]
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
            "profiled_seconds": sum(self._seconds(step) for step in counted),
            "dealt": self._run._strategy.layout.dealt,
            "parameter_bytes": sum(p.nbytes for model in self._run._models for p in model.parameters()),
            "steps": [self._record(step, number >= self._order.warmup) for number, step in enumerate(steps)],
        }
        path = os.path.join(self._order.directory, f"rank-{self._run.world.rank}.json")
        with open(path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(path + ".part", path)

    def _record(self, step: _Step, timed: bool) -> dict[str, Any]:
        return {
            "epoch": step.epoch,
            "step": step.number,
            "total": step.total,
            "parts": step.parts,
            "timed": timed,
            "seconds": self._seconds(step),
            "waited": step.waited - step.waited_before,
            "losses": {key.removeprefix(LOSS): list(pair) for key, pair in step.window.totals().items()},
        }
