"""Restarts: what lets a run go on after it was stopped, or has lost a rank or a machine, beside the script's own saves.

preemption.py           a run that is asked to stop saves a checkpoint and ends
newest_state.py         where a rank dies, the others hand the newest state to the next start
memory_checkpoints.py   checkpoints in memory, every few steps

The launcher asks for each of them through the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.data.loader import Loader
from paceline.state.checkpoint import WholeCheckpoint
from paceline.state.memory_checkpoints import MemoryCheckpoints, asked_for
from paceline.state.newest_state import NewestState
from paceline.state.preemption import Preemption
from paceline.state.run_position import RunPosition
from paceline.state.state import State
from paceline.step.step import Stepper
from paceline.world import HANDOVER, LAUNCHER_PID, STOP_FILE, World


class Restarts:
    """The restarts of one run.

    Args:
        steps: how many steps were made.
        save: writes a checkpoint into this directory, and returns its path. Collective.
        saving: a context around a write into memory.
    """

    def __init__(
        self,
        world: World,
        stepper: Stepper,
        state: State,
        position: RunPosition,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        steps: Callable[[], int],
        save: Callable[[Path], Path],
        saving: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stepper, self._state, self._position, self._saving = stepper, state, position, saving
        strategy, device, env = stepper.strategy, stepper.device, os.environ
        looks: dict[str, Any] = {"ready": self._between_steps, "steps": steps}
        self._preemption = _preemption(world, env, lambda path: Preemption(path, strategy, device, **looks, save=save))
        # On accelerators nothing is handed on: with NCCL, a rank that waits for one that has died is ended by torch,
        # without an exception. Without a folder the launcher does not start ranks again.
        self._newest: NewestState | None = None
        if (folder := env.get(HANDOVER)) and device.type == "cpu":
            self._newest = NewestState(folder, strategy, state, position, models, optimizers, **looks)
        every = asked_for(env)
        self._memory = None if every is None else MemoryCheckpoints(every, strategy, state, world.node, **looks)
        keepers = self._newest, self._memory
        self._keepers: list[NewestState | MemoryCheckpoints] = [one for one in keepers if one is not None]

    def _between_steps(self) -> bool:
        """Whether a checkpoint may be written now."""
        loaders = self._state.loaders.values()
        return all(one.current is None or one.stepped for one in loaders) and not self._stepper.ownership.incomplete

    @property
    def after_batch(self) -> tuple[Callable[[Loader], None], ...]:
        """What is called when the script comes back for its next training batch."""
        hooks: list[Callable[[Loader], None]] = [] if self._newest is None else [self._newest.after_batch]
        hooks += [] if self._memory is None else [self._keep_in_memory]
        return (*hooks, *([] if self._preemption is None else [self._preemption.after_batch]))

    def _keep_in_memory(self, loader: Loader) -> None:
        if self._memory is not None and self._memory.due(loader):
            self._stepper.updates.prepare_save()
            with self._saving():
                self._memory.keep(self._position.counters())

    def prepared(self) -> None:
        """Models or optimizers were prepared."""
        if self._newest is not None:
            self._newest.prepared()

    def saved(self, directory: Path) -> None:
        """The script has saved a checkpoint there."""
        if self._preemption is not None:
            self._preemption.saves(directory.absolute())

    @property
    def kept(self) -> Callable[[], WholeCheckpoint | None] | None:
        """Finds the newest checkpoint that an earlier start of this run has kept; None where nothing is kept."""
        return self._find if self._keepers else None

    def _find(self) -> WholeCheckpoint | None:
        found = [whole for keeper in self._keepers if (whole := keeper.find()) is not None]
        return max(found, key=lambda whole: whole.step, default=None)

    def restored(self, directory: Path) -> None:
        """The script has looked there for a checkpoint, and the run goes on from it, or begins."""
        if self._preemption is not None:
            self._preemption.restores(directory)

    def begin(self) -> None:
        """The run goes on: from here on its state is kept."""
        for keeper in self._keepers:
            keeper.begin()

    def hand_on(self, error: BaseException) -> None:
        """An uncaught error ends this process: what it has may help those that start the run again."""
        if self._newest is not None:
            self._newest.hand_on(error)

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.close()
        if self._preemption is not None:
            self._preemption.close()


def _preemption(world: World, env: Mapping[str, str], make: Callable[[str | None], Preemption]) -> Preemption | None:
    """What looks after each step whether the launcher, or a signal to a process without one, asks the run to stop;
    None: nothing does."""
    path = env.get(STOP_FILE)
    if path or (world.size == 1 and LAUNCHER_PID not in env):
        with contextlib.suppress(OSError, ValueError):  # the launcher's folder is gone, or full
            return make(path)
    return None
