"""Preemption: save a checkpoint and exit when the run is asked to stop, before its machine is taken away.

The scheduler (Slurm, Kubernetes, a cloud) sends a signal to the launcher. All ranks must save at the same step, but
they may be a step apart when the signal comes, and machines receive it at different times:

1. The launcher that receives the signal informs the other launchers. Each launcher writes LOOK into the file that the
   ranks of its machine have mapped (world.STOP_FILE). From then on each rank checks the launcher's store after every
   step.
2. When all launchers have written LOOK, the launcher of rank 0 writes DECIDE. Rank 0 then chooses a step, and puts its
   number into the store. At this step all ranks wait for each other, so no rank can have completed it yet
   (Strategy.steps_to_synchronization).
3. After that step all ranks save, report this to their launchers, and exit. The launcher's exit code says that the run
   is not done. When the script is started again, it restores the checkpoint.

SIGTERM to a rank has the same effect: systemd and Slurm's process tracking send it to all processes of a job, launcher
and ranks, in any order. Once the script has saved or restored, a rank forwards SIGTERM to the launcher and continues
until the chosen step. If the launcher itself wants to end a rank, it writes END into the file before it sends SIGTERM.

A single process without a launcher needs no agreement: after SIGTERM it saves at its next step.

The launcher also stops the ranks in this way when machines have joined and all ranks must restart, so no step is lost.

Until the run is asked to stop, the check costs one read of a byte in memory per step.
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

from paceline.comm import process_group
from paceline.comm.mesh import world_group
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
    send_to_launcher,
    store_address,
    withdraw,
)

_STORE_SECONDS = 60.0
_REACT_SECONDS = 3.0
_LAG = 2
"""The host may be ahead of an accelerator by this many steps (finite.py reads flags a step late)."""

_open: list[Preemption] = []  # those that have installed a SIGTERM handler


def _put_back() -> None:
    """Restore SIGTERM's default action. Called after a run, and in a forked child, such as a DataLoader worker."""
    while _open:
        if signal.getsignal(signal.SIGTERM) == _open.pop()._on_sigterm:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_put_back)


class _End:
    """Sends SIGTERM to this process after `seconds`, then SIGKILL if the process does not react."""

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
    """Checks after every step whether the run is asked to stop.

    Args:
        path: the launcher's file. Raises OSError or ValueError if it cannot be read. None: there is no launcher, and
            this is the only process.
        ready: returns whether a checkpoint may be written now. It may between `run.step` and the next batch.
        steps: returns the number of steps so far.
        save: writes a checkpoint into a directory, and returns the checkpoint's path. Collective.
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
        self._end: _End | None = None  # set after SIGTERM to a single process
        self._strategy, self._ready, self._steps, self._save = strategy, ready, steps, save
        self._lag = 0 if device.type == "cpu" else _LAG
        self._restores: Path | None = None  # the directory in which the script looked for the newest checkpoint
        self._saves: Path | None = None  # the directory in which the script last saved
        self._announced = False
        # The store's key for the chosen step. It is unique to this restart, and to this run within the process.
        self._key = f"paceline/stop/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{process_group.runs}"
        self._refused = False  # whether the reason that nothing can be saved was printed
        self._last_look = -1  # the last step at which the store had no decision yet
        self._at: int | None = None  # the chosen step
        withdraw(os.environ, CLOSED)  # left by an earlier run in this process

    def restores(self, directory: Path) -> None:
        """Record that the script has looked for a checkpoint in this directory.

        It will do so again at its next start.
        """
        if not (directory / manifest.NAME).exists():  # otherwise it is one checkpoint, and the script always loads it
            self._restores = directory
            self._announce()

    def saves(self, directory: Path) -> None:
        """Record that the script has saved a checkpoint in this directory."""
        self._saves = directory
        self._announce()

    def _announce(self) -> None:
        """Inform the launcher that this rank can save when it is asked to stop, and handle SIGTERM from now on."""
        if self._announced or not self._strategy.plan.in_step:
            return
        self._announced = True
        send_to_launcher(os.environ, SAVES)
        # Do not replace the script's handler or SIG_IGN. In an interactive Python, SIGTERM should end the session.
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
            if self._end is None:  # schedulers send SIGTERM more than once
                self._asked[0] = DECIDE  # a bytearray here, since there is no launcher's file
                self._end = _End(NOTICE_SECONDS)
        else:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(os.environ[LAUNCHER_PID]), signal.SIGTERM)

    def close(self) -> None:
        """Inform the launcher that this rank saves no more, and restore SIGTERM's default action."""
        if self._announced:
            send_to_launcher(os.environ, CLOSED)  # first, so that the rank has SAVES or CLOSED at all times
            withdraw(os.environ, SAVES)
        if self._end is not None:
            self._end.cancel()
        _put_back()

    def after_batch(self, loader: Loader) -> None:
        """Save and raise Preempted at the chosen step. Called when the script fetches its next training batch."""
        phase = self._asked[0]
        if phase not in (LOOK, DECIDE) or not loader.stepped or not self._ready():
            return
        steps = self._steps()
        if self._at is None:
            self._at = self._decide(steps) if phase == DECIDE and world_group().rank == 0 else self._decision()
            if self._at is None:
                self._last_look = steps
                return
            if self._last_look >= self._at:
                raise WorldError(
                    f"the run was asked to stop after step {self._at}, but this process was already at step "
                    f"{self._last_look} when it received the request. Nothing was saved; the last checkpoint is "
                    "unchanged."
                )
        if steps >= self._at:
            directory = self._restores or self._saves
            assert directory is not None
            path = self._save(directory).absolute()
            if self._end is not None:
                self._end.cancel()
            if self._restores is not None:
                then = "The same command resumes from it"
            else:
                then = f"The script does not call run.restore: to resume from it, call run.restore({str(directory)!r})"
            informed = send_to_launcher(os.environ, SAVED, f"{path}. {then}")
            if not informed and world_group().rank == 0:
                print(f"paceline: asked to stop, and saved {path}. {then}.", file=sys.stderr, flush=True)
            raise Preempted(informed)

    def _decide(self, steps: int) -> int | None:
        """On rank 0, choose the step and put it into the store.

        If nothing can be saved, prints the reason once and returns None.
        """
        problem = None
        if self._restores is None and self._saves is None:
            problem = (
                "the script neither saves checkpoints nor restores them at its next start. Call run.restore(DIRECTORY, "
                "missing_ok=True) after run.prepare"
            )
        elif not self._strategy.plan.in_step:
            problem = "processes that do not run in step cannot save at the same step. Call run.save regularly"
        if problem is not None:
            if not self._refused:
                print(f"paceline: asked to stop, but no checkpoint is saved: {problem}.", file=sys.stderr, flush=True)
            self._refused = True
            return None
        at = steps + self._strategy.steps_to_synchronization() + self._lag
        if world_group().size > 1:
            self._store.set(self._key, str(at))
            # The step must be in the store before rank 0's next collective lets the other ranks continue. `set` does
            # not wait for a reply, and forwarders may delay it. `get` returns after the store has processed `set`.
            self._store.get(self._key)
        return at

    def _decision(self) -> int | None:
        """The step that rank 0 has chosen; None if it has not chosen yet."""
        if world_group().size == 1 or not self._store.check([self._key]):
            return None
        return int(self._store.get(self._key))

    @cached_property
    def _store(self) -> Store:
        """A separate connection to the launcher's store, since torch does not expose a process group's store."""
        address = store_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        patience = datetime.timedelta(seconds=_STORE_SECONDS)
        return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=patience)
