"""A callback that writes torch.profiler traces of a few steps, one file per process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from paceline.errors import SettingError, check_whole
from paceline.fitting.callbacks import Callback

if TYPE_CHECKING:
    from paceline.fitting.fit_state import Fitting


class Profiler(Callback):
    """Traces some optimizer steps with torch.profiler, and writes `rank0.step12.pt.trace.json` and so on into a
    directory, one file per process and cycle. Open a file at https://ui.perfetto.dev, chrome://tracing or in
    TensorBoard.

    A cycle skips `wait` steps, runs the profiler for `warmup` steps without keeping their numbers, and records `active`
    steps. options: record_shapes, profile_memory, with_stack and so on, as in torch.profiler.profile. Steps count from
    the start of the fit, or from its restart.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        **options: Any,
    ) -> None:
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 1),
        ):
            check_whole("Profiler", name, value, least)
        for name in ("schedule", "on_trace_ready", "activities"):
            if name in options:
                raise SettingError(f"Profiler({name}=...): Profiler sets it. Use torch.profiler.profile directly.")
        self._directory = Path(directory)
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._steps = (wait + warmup + active) * repeat  # in all cycles
        self._options = options
        self._profile: Any = None
        self.files: list[Path] = []  # written by this process

    def on_start(self, fit: Fitting) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)

        def write(made: Any) -> None:
            path = self._directory / f"rank{fit.run.rank}.step{fit.run.steps}.pt.trace.json"
            made.export_chrome_trace(str(path))
            self.files.append(path)

        self._left = self._steps
        self._profile = profile(activities=activities, schedule=self._schedule, on_trace_ready=write, **self._options)
        self._profile.start()

    def on_step(self, fit: Fitting) -> None:
        if self._profile is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")  # each is in its file
            self._profile.step()
        self._left -= 1
        if not self._left:
            self._end()

    def on_end(self, fit: Fitting) -> None:
        self._end()

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
