"""A run that is asked to stop saves a checkpoint and ends, so that its machine can be taken away.

Who takes it (Slurm, Kubernetes, a cloud) gives notice by a signal to the launcher. All ranks must save at the same
step, and may be a step apart when the signal comes, on machines that hear of it at different times:

1. A launcher that is asked tells the others. Each writes LOOK into the file that the ranks of its machine have mapped
   (world.STOP_FILE). From then on each rank looks into the launcher's store after every step.
2. When all launchers have written, that of rank 0 writes DECIDE. Rank 0 then puts a step into the store: one that no
   rank can have completed yet, since it takes all of them (Strategy.steps_to_meeting).
3. After that step all ranks save, tell their launchers so, and end. The launcher's exit code says that the run is not
   done; started again, the script restores the checkpoint.

SIGTERM to a rank is the same notice: systemd and Slurm's process tracking send it to all processes of a job, launcher
and ranks, in any order. Once the script has saved or restored, a rank passes SIGTERM on to the launcher and goes on to
the step above. When the launcher itself sends SIGTERM, to end the rank, it has written END into the file before.

A process without a launcher, alone in its world, needs no agreement: SIGTERM asks it to save after its next step.

The launcher asks too where machines have come, and all ranks are to start again with them: then no step is lost.

Before anybody asks, a step costs one read of a byte in memory.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from paceline.comm import collectives, process_group
from paceline.data.loader import Loader
from paceline.errors import WorldError
from paceline.state import manifest
from paceline.strategies.base import Strategy
from paceline.world import (
    CLOSED,
    DECIDE,
    END,
    LAUNCHER_PID,
    LOOK,
    NOTICE,
    NOTICE_SECONDS,
    SAVED,
    SAVES,
    Preempted,
    store_place,
    take_back,
    tell_launcher,
)

_STORE_SECONDS = 60.0
_REACT_SECONDS = 3.0
_LAG = 2
"""An accelerator's host may be ahead of the device by this many steps (finite.py reads flags a step late)."""

_open: list[Preemption] = []  # of which SIGTERM calls the handler


def _put_back() -> None:
    """SIGTERM has its default meaning again: after a run, and in a forked child, such as a loader's worker."""
    while _open:
        if signal.getsignal(signal.SIGTERM) == _open.pop()._on_sigterm:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_put_back)


class _End:
    """Ends this process by SIGTERM after so many seconds, or by SIGKILL if it does not react to that."""

    def __init__(self, seconds: float) -> None:
        self.came = False
        self._cancelled = threading.Event()
        self._seconds = seconds
        threading.Thread(target=self._wait, name="paceline-end", daemon=True).start()

    def _wait(self) -> None:
        if not self._cancelled.wait(self._seconds):
            self.came = True
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._cancelled.wait(_REACT_SECONDS):
                os.kill(os.getpid(), signal.SIGKILL)

    def cancel(self) -> None:
        self._cancelled.set()


class Preemption:
    """Looks after every step whether the run is asked to stop.

    Args:
        path: of the launcher's file. Raises OSError or ValueError where it cannot be read. None: there is no launcher,
            and no other process.
        ready: whether a checkpoint may be written now, as after `run.step` and before the next batch.
        steps: how many steps were made.
        save: writes a checkpoint into this directory, and returns its path. Collective.
    """

    def __init__(
        self,
        path: str | None,
        strategy: Strategy,
        device: torch.device,
        *,
        ready: Callable[[], bool],
        steps: Callable[[], int],
        save: Callable[[Path], Path],
    ) -> None:
        self._asked: mmap.mmap | bytearray = bytearray(1)
        if path is not None:
            with open(path, "rb") as file:
                self._asked = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._alone = path is None
        self._end: _End | None = None  # of a process alone, since SIGTERM has come
        self._strategy, self._ready, self._steps, self._save = strategy, ready, steps, save
        self._lag = 0 if device.type == "cpu" else _LAG
        self._restores: Path | None = None  # where the script looked for the newest checkpoint
        self._saves: Path | None = None  # where it saved last
        self._announced = False
        # Of this start of the workers, and of this run of those that the script makes one after the other.
        self._key = f"paceline/stop/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{process_group.runs}"
        self._refused = False  # was it said that nothing can be saved?
        self._last_look = -1  # the step at which the store had no decision yet
        self._at: int | None = None  # the step that was decided on
        take_back(os.environ, CLOSED)  # of an earlier run of this process

    def restores(self, directory: Path) -> None:
        """The script has looked there for a checkpoint, and will again when it is started the next time."""
        if not (directory / manifest.NAME).exists():  # else it names one checkpoint, and will start from that again
            self._restores = directory
            self._announce()

    def saves(self, directory: Path) -> None:
        """The script has saved there."""
        self._saves = directory
        self._announce()

    def _announce(self) -> None:
        """Asked to stop, this rank can save from now on: the launcher hears of it, and SIGTERM is a notice."""
        if self._announced or not self._strategy.plan.in_step:
            return
        self._announced = True
        tell_launcher(os.environ, SAVES)
        # A script's own handler stays, and so does SIG_IGN. In a session of Python's, SIGTERM ends the session.
        notice = not hasattr(sys, "ps1") if self._alone else os.environ.get(NOTICE)
        if notice and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, self._on_sigterm)
                _open.append(self)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self._asked[0] == END or (self._end is not None and self._end.came):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif self._alone:
            if self._end is None:  # schedulers send it more than once
                self._asked[0] = DECIDE  # a bytearray
                self._end = _End(NOTICE_SECONDS)
        else:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(os.environ[LAUNCHER_PID]), signal.SIGTERM)

    def close(self) -> None:
        """The run has ended: this rank saves no more."""
        if self._announced:
            tell_launcher(os.environ, CLOSED)  # first: a rank that has said neither is one that could never save
            take_back(os.environ, SAVES)
        if self._end is not None:
            self._end.cancel()
        _put_back()

    def after_batch(self, loader: Loader) -> None:
        """The script comes back for its next training batch. Saves and raises Preempted at the step decided on."""
        phase = self._asked[0]
        if phase not in (LOOK, DECIDE) or not loader.stepped or not self._ready():
            return
        steps = self._steps()
        if self._at is None:
            self._at = self._decide(steps) if phase == DECIDE and collectives.rank_of() == 0 else self._decision()
            if self._at is None:
                self._last_look = steps
                return
            if self._last_look >= self._at:
                raise WorldError(
                    f"the run was asked to stop after step {self._at}, but this process had made {self._last_look} "
                    "when it heard of it. Nothing was saved now; the last checkpoint is as it was."
                )
        if steps >= self._at:
            directory = self._restores or self._saves
            assert directory is not None
            path = self._save(directory).absolute()
            if self._end is not None:
                self._end.cancel()
            if self._restores is not None:
                then = "The same command goes on from there"
            else:
                then = f"The script restores nothing: call run.restore({str(directory)!r}) in it to go on from there"
            told = tell_launcher(os.environ, SAVED, f"{path}. {then}")
            if not told and collectives.rank_of() == 0:
                print(f"paceline: asked to stop, and saved {path}. {then}.", file=sys.stderr, flush=True)
            raise Preempted(told)

    def _decide(self, steps: int) -> int | None:
        """Rank 0's choice of the step, told to the others; None where nothing can be saved, which is said once."""
        problem = None
        if self._restores is None and self._saves is None:
            problem = (
                "the script saves none, and restores none when it is started again. Call run.restore(DIRECTORY, "
                "missing_ok=True) after run.prepare"
            )
        elif not self._strategy.plan.in_step:
            problem = "processes that are not in step cannot agree on one. Save now and then"
        if problem is not None:
            if not self._refused:
                print(f"paceline: asked to stop, but no checkpoint is saved: {problem}.", file=sys.stderr, flush=True)
            self._refused = True
            return None
        at = steps + self._strategy.steps_to_meeting() + self._lag
        if collectives.size_of() > 1:
            self._store.set(self._key, str(at))
            # `set` has no answer, and between machines the store is behind forwarders: the others, which learn from a
            # collective that rank 0 went on, must find the step by then. `get` is answered after it, in their order.
            self._store.get(self._key)
        return at

    def _decision(self) -> int | None:
        """The step that rank 0 has told, if it has."""
        if collectives.size_of() == 1 or not self._store.check([self._key]):
            return None
        return int(self._store.get(self._key))

    @cached_property
    def _store(self) -> Store:
        """The launcher's, by a connection of its own: which store a process group uses is torch's secret."""
        place = store_place(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        patience = datetime.timedelta(seconds=_STORE_SECONDS)
        return TCPStore(*place, is_master=False, wait_for_workers=False, timeout=patience)
