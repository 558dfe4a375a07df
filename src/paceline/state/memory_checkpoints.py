"""Checkpoints in the memory of two machines, after each so many steps: `paceline run --memory-every STEPS`.

Where each process holds slices of the state, none that lives has all of it when another dies. So all ranks gather it
now and then, as `run.save` does, and it goes where it outlives them (Wang et al., "GEMINI: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints", SOSP 2023):

1. After the step, when the script comes back for its next batch, rank 0 copies the state, and a thread writes it into a
   folder in the memory of its machine (world.MEMORY). That machine's launcher has made the folder, and removes it.
2. Where there are several machines, the first rank of another machine is sent the state, and writes it there.
3. At the next start `run.restore` takes the newest of what the ranks find in these folders, what was handed on
   (newest_state.py), and the checkpoint of the script.

Whatever fails here is said, and nothing is kept from then on: the training goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm import collectives, process_group
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, in_words
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.snapshot import SnapshotBuffers
from paceline.state.state import State, with_models
from paceline.strategies.base import Strategy
from paceline.world import HANDOVER, MEMORY, MEMORY_EVERY

_ROOM = 1.1
"""A folder is used where so many times the size of the tensors is free: the names, the options and the JSON need some
too."""


def asked_for(environ: Mapping[str, str]) -> int | None:
    """After how many steps each the launcher wants a checkpoint in memory; None: never."""
    return int(environ[MEMORY_EVERY]) if environ.get(MEMORY_EVERY) else None


class MemoryCheckpoints:
    """Those of one run. All ranks make it alike.

    Args:
        every: steps from one to the next.
        node: the number of this process's machine.
        ready: whether a checkpoint may be written now, as after `run.step` and before the next batch.
        steps: how many steps were made.
    """

    def __init__(
        self,
        every: int,
        strategy: Strategy,
        state: State,
        node: int,
        *,
        ready: Callable[[], bool],
        steps: Callable[[], int],
    ) -> None:
        self._every, self._strategy, self._state, self._node = every, strategy, state, node
        self._ready, self._steps = ready, steps
        # The launcher's folder in memory, and where that has no room its folder for temporary files; of this run of
        # those that the script makes one after the other.
        own = f"run-{process_group.runs}"
        places = os.environ.get(MEMORY), os.path.join(os.environ.get(HANDOVER, ""), "kept")
        self._folders = [Path(place) / own for place in places if place]
        self._folder = self._folders[0]
        self._writer = BackgroundWrite(tells=False)
        self._buffers = SnapshotBuffers()
        self._begun = False  # has the script restored? Without that the next start could not use what is kept
        self._last = -1  # the step of the last one
        self._told = False  # that this machine cannot write
        self._holders: list[int] | None = None  # the ranks that write; None: not known yet
        self._pair: dist.ProcessGroup | None = None  # the two of them, where there are two

    def find(self) -> checkpoint.WholeCheckpoint | None:
        """The newest whole one that this machine holds. None after the script's first restore, and at the first start
        of the run."""
        if self._begun or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        found = []
        for folder in self._folders:
            with contextlib.suppress(CheckpointError):
                found.append(checkpoint.find(folder))
        return max(found, key=lambda one: one.step, default=None)

    def begin(self) -> None:
        """The script has looked for a checkpoint, and would again."""
        if not self._begun:
            self._begun, self._last = True, self._steps()
            if not self._strategy.plan.in_step:
                self._give_up("the processes are not in step, and cannot agree on one step")

    def due(self, loader: Loader) -> bool:
        """Whether one is to be made, as the script comes back for its next training batch. Alike on all ranks."""
        steps = self._steps()
        return self._begun and loader.stepped and steps != self._last and steps % self._every == 0 and self._ready()

    def keep(self, counters: dict[str, Any]) -> None:
        """Make one. counters: what the run adds to its part of a checkpoint. Collective."""
        self._last = self._steps()
        if self._holders is None:
            self._choose_holders()
        assert self._holders is not None
        models, streams = self._state.gather()
        parts: dict[str, Any] = {}
        encoded: Any = None
        failure = ""
        if collectives.rank_of() == 0:
            try:
                parts = with_models(models, self._state.parts_beside_models(counters, streams))
                encoded = self._encoded(parts)
            except Exception as problem:  # of a tracked object, or of the last write; the others must hear of it
                failure = str(problem) if isinstance(problem, CheckpointError) else in_words(problem)
        failure = collectives.broadcast_object(failure)
        if failure:
            self._give_up(failure)
            return
        if self._pair is not None and collectives.rank_of() in self._holders:
            parts = collectives.broadcast_object(parts, 0, self._pair, "a checkpoint for another machine's memory")
        try:
            if collectives.rank_of() == self._holders[-1] != 0:
                encoded = self._encoded(parts)
            if encoded is not None:
                self._begin_writing(encoded)
        except (CheckpointError, OSError) as error:  # of the second machine, or there is no thread: the other goes on
            if not self._told:
                self._told = True
                _say(f"on machine {self._node} no checkpoint is kept in memory: {error}")

    def _choose_holders(self) -> None:
        nodes = collectives.gather_objects(self._node)
        others = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
        self._holders = [0, *others[:1]]
        if others:
            self._pair = dist.new_group(self._holders)

    def _encoded(self, parts: dict[str, Any]) -> dict[str, checkpoint.EncodedPart]:
        """A copy of the parts, when the last one is written. Raises CheckpointError: that failed, or it has no room."""
        self._writer.finish()
        encoded = checkpoint.encode_parts(parts, self._buffers)
        needed = int(_ROOM * sum(tensor.nbytes for part in encoded.values() for tensor in part.tensors.values()))
        free = {}
        for folder in self._folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free[folder] = shutil.disk_usage(folder).free
            if free[folder] >= needed:
                self._folder = folder
                return encoded
        places = " and ".join(f"{folder} has {size / 2**20:,.0f} MB" for folder, size in free.items())
        raise CheckpointError(
            f"a checkpoint takes {needed / 2**20:,.0f} MB, and {places} free. Give the machine or the container more "
            "shared memory (docker run --shm-size=...), or name another disk with TMPDIR."
        )

    def _begin_writing(self, encoded: dict[str, checkpoint.EncodedPart]) -> None:
        meta = {"world_size": collectives.size_of(), "torch": str(torch.__version__)}
        newest = checkpoint.Retention(keep=1)
        write = partial(checkpoint.write, self._folder, step=self._last, parts=encoded, retention=newest, meta=meta)
        self._writer.begin(self._last, write)

    def _give_up(self, why: str) -> None:
        """On all ranks."""
        self.close()
        if collectives.rank_of() == 0:
            _say(f"no checkpoint is kept in memory (--memory-every): {why}")

    def close(self) -> None:
        """Wait for what is being written, and keep nothing any more."""
        self._begun, self._every = True, sys.maxsize
        with contextlib.suppress(CheckpointError):
            self._writer.finish()
        self._pair = None


def _say(text: str) -> None:
    print(f"paceline: {text.rstrip('.')}.", file=sys.stderr, flush=True)
