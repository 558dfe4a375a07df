"""Restarts: save state, besides the script's saves, for a run that is stopped or loses a rank or a machine.

preemption.py           a run that is asked to stop saves a checkpoint and exits
newest_state.py         if a rank dies, the others save the newest state for the restart
memory_checkpoints.py   in-memory checkpoints, every few steps

The launcher enables each of these by an environment variable.
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
    """Saves the state of one run for its restarts, and finds it after a restart.

    Args:
        steps: returns the number of steps so far.
        save: writes a checkpoint into a directory, and returns the checkpoint's path. Collective.
        saving: returns the context in which an in-memory checkpoint is made.
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
        # The launcher sets HANDOVER if it restarts ranks. Not on accelerators: with NCCL, torch ends a rank that waits
        # for a dead rank, and raises no exception in it.
        self._newest: NewestState | None = None
        if (folder := env.get(HANDOVER)) and device.type == "cpu":
            self._newest = NewestState(folder, strategy, state, position, models, optimizers, **looks)
        every = asked_for(env)
        self._memory = None if every is None else MemoryCheckpoints(every, strategy, state, world.node, **looks)
        savers = self._newest, self._memory
        self._savers: list[NewestState | MemoryCheckpoints] = [one for one in savers if one is not None]

    def _between_steps(self) -> bool:
        """Whether a checkpoint may be written now."""
        loaders = self._state.loaders.values()
        return all(one.current is None or one.stepped for one in loaders) and not self._stepper.ownership.incomplete

    @property
    def after_batch(self) -> tuple[Callable[[Loader], None], ...]:
        """The hooks to call when the script fetches its next training batch."""
        hooks: list[Callable[[Loader], None]] = [] if self._newest is None else [self._newest.after_batch]
        hooks += [] if self._memory is None else [self._keep_in_memory]
        return (*hooks, *([] if self._preemption is None else [self._preemption.after_batch]))

    def _keep_in_memory(self, loader: Loader) -> None:
        if self._memory is not None and self._memory.due(loader):
            self._stepper.updates.prepare_save()
            with self._saving():
                self._memory.keep(self._position.counters())

    def prepared(self) -> None:
        """Called after models or optimizers were prepared."""
        if self._newest is not None:
            self._newest.prepared()

    def saved(self, directory: Path) -> None:
        """Record that the script has saved a checkpoint in this directory."""
        if self._preemption is not None:
            self._preemption.saves(directory.absolute())

    @property
    def kept(self) -> Callable[[], WholeCheckpoint | None] | None:
        """A function that finds the newest state kept before a restart; None if this run keeps no state."""
        return self._find if self._savers else None

    def _find(self) -> WholeCheckpoint | None:
        found = [whole for saver in self._savers if (whole := saver.find()) is not None]
        return max(found, key=lambda whole: whole.step, default=None)

    def restored(self, directory: Path) -> None:
        """Record that the script has looked for a checkpoint in this directory."""
        if self._preemption is not None:
            self._preemption.restores(directory)

    def begin(self) -> None:
        """Start keeping the state of the run. Called when the script has called run.restore."""
        for saver in self._savers:
            saver.begin()

    def save_newest(self, error: BaseException) -> None:
        """Save the newest state for the restart. Called with the uncaught error that ends this process."""
        if self._newest is not None:
            self._newest.save_newest(error)

    def close(self) -> None:
        for saver in self._savers:
            saver.close()
        if self._preemption is not None:
            self._preemption.close()


def _preemption(world: World, env: Mapping[str, str], make: Callable[[str | None], Preemption]) -> Preemption | None:
    """Make the object that checks for requests to stop; None if no check is possible.

    Requests come from the launcher or, for a single process without a launcher, from a signal.
    """
    path = env.get(STOP_FILE)
    if path or (world.size == 1 and LAUNCHER_PID not in env):
        with contextlib.suppress(OSError, ValueError):  # the launcher's folder is gone, or full
            return make(path)
    return None
