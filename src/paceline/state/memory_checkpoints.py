"""In-memory checkpoints on two machines, every STEPS steps: `paceline run --memory-every STEPS`.

If the state is sharded and a process dies, a part of the state is lost. So every STEPS steps all ranks gather the
state, as `run.save` does, and store it where it survives the processes (Wang et al., "GEMINI: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints", SOSP 2023):

1. After the step, when the script fetches its next batch, rank 0 copies the state, and a thread writes it into a folder
   in the memory of its machine (world.MEMORY). That machine's launcher makes and removes the folder.
2. With several machines, the first rank of another machine receives the state too, and writes it there.
3. At the next start `run.restore` takes the newest of the checkpoints in these folders, the newest state
   (newest_state.py) and the script's checkpoint.

If anything fails here, a message is printed, no more in-memory checkpoints are made, and the training continues.
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

from paceline.comm import process_group
from paceline.comm.group import Group
from paceline.comm.mesh import world_group
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, describe_error
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.snapshot import SnapshotBuffers
from paceline.state.state import State, with_models
from paceline.strategies.base import Strategy
from paceline.world import HANDOVER, MEMORY, MEMORY_EVERY

_SPACE = 1.1
"""A folder needs this multiple of the tensors' size as free space, since names, options and JSON take space too."""


def asked_for(environ: Mapping[str, str]) -> int | None:
    """The number of steps between in-memory checkpoints, as set by the launcher; None: make no checkpoints."""
    return int(environ[MEMORY_EVERY]) if environ.get(MEMORY_EVERY) else None


class MemoryCheckpoints:
    """The in-memory checkpoints of one run. All ranks make this object with the same arguments.

    Args:
        every: the number of steps between checkpoints.
        node: the number of this process's machine.
        ready: returns whether a checkpoint may be written now, as between `run.step` and the next batch.
        steps: returns the number of steps so far.
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
        # The launcher's folder in memory; if that has no space, the launcher's folder for temporary files. A script may
        # make several runs in sequence, and each run has a subfolder.
        subfolder = f"run-{process_group.runs}"
        parents = os.environ.get(MEMORY), os.path.join(os.environ.get(HANDOVER, ""), "kept")
        self._folders = [Path(parent) / subfolder for parent in parents if parent]
        self._folder = self._folders[0]
        self._writer = BackgroundWrite(informs_launcher=False)
        self._buffers = SnapshotBuffers()
        self._begun = False  # whether the script has called restore; if not, a restart could use no checkpoint
        self._last = -1  # the step of the last checkpoint
        self._reported = False  # whether the message that this machine cannot write was printed
        self._holders: list[int] | None = None  # the ranks that write; None: not known yet
        self._pair: Group | None = None  # the group of the two writing ranks, if there are two

    def find(self) -> checkpoint.WholeCheckpoint | None:
        """The newest intact checkpoint on this machine; None if there is none.

        Also None after the script's first restore, and at the first start of the run.
        """
        if self._begun or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        found = []
        for folder in self._folders:
            with contextlib.suppress(CheckpointError):
                found.append(checkpoint.find(folder))
        return max(found, key=lambda one: one.step, default=None)

    def begin(self) -> None:
        """Start making checkpoints: the script has called restore, so a restarted script will find them."""
        if not self._begun:
            self._begun, self._last = True, self._steps()
            if not self._strategy.plan.in_step:
                self._give_up("the processes do not run in step, so they cannot save at the same step")

    def due(self, loader: Loader) -> bool:
        """Whether to make a checkpoint before the script's next batch. The result is the same on all ranks."""
        steps = self._steps()
        return self._begun and loader.stepped and steps != self._last and steps % self._every == 0 and self._ready()

    def keep(self, counters: dict[str, Any]) -> None:
        """Make a checkpoint. counters: the run's counters, for the part "run" of the checkpoint. Collective."""
        self._last = self._steps()
        if self._holders is None:
            self._choose_holders()
        assert self._holders is not None
        models, streams = self._state.gather()
        parts: dict[str, Any] = {}
        encoded: Any = None
        failure = ""
        if world_group().rank == 0:
            try:
                parts = with_models(models, self._state.parts_beside_models(counters, streams))
                encoded = self._encoded(parts)
            except Exception as problem:  # from a tracked object, or from the last write: report it on all ranks
                failure = str(problem) if isinstance(problem, CheckpointError) else describe_error(problem)
        failure = world_group().broadcast(failure)
        if failure:
            self._give_up(failure)
            return
        if self._pair is not None:
            parts = self._pair.broadcast(parts, 0, "a checkpoint for another machine's memory")
        try:
            if world_group().rank == self._holders[-1] != 0:
                encoded = self._encoded(parts)
            if encoded is not None:
                self._begin_writing(encoded)
        except (CheckpointError, OSError) as error:  # on the second machine, or no thread starts: the other continues
            if not self._reported:
                self._reported = True
                _say(f"machine {self._node} stores no in-memory checkpoints: {error}")

    def _choose_holders(self) -> None:
        nodes = world_group().gather(self._node)
        others = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
        self._holders = [0, *others[:1]]
        if others:
            made = dist.new_group(self._holders)  # all ranks must call it
            self._pair = Group(made) if world_group().rank in self._holders else None

    def _encoded(self, parts: dict[str, Any]) -> dict[str, checkpoint.EncodedPart]:
        """Wait for the last write, and copy the parts. Raises CheckpointError if it failed, or if space is missing."""
        self._writer.finish()
        encoded = checkpoint.encode_parts(parts, self._buffers)
        needed = int(_SPACE * sum(tensor.nbytes for part in encoded.values() for tensor in part.tensors.values()))
        free = {}
        for folder in self._folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free[folder] = shutil.disk_usage(folder).free
            if free[folder] >= needed:
                self._folder = folder
                return encoded
        found = " and ".join(f"{folder} has {size / 2**20:,.0f} MB" for folder, size in free.items())
        raise CheckpointError(
            f"a checkpoint needs {needed / 2**20:,.0f} MB, but {found} free. Give the machine or the container more "
            "shared memory (docker run --shm-size=...), or set TMPDIR to another disk."
        )

    def _begin_writing(self, encoded: dict[str, checkpoint.EncodedPart]) -> None:
        meta = {"world_size": world_group().size, "torch": str(torch.__version__)}
        newest = checkpoint.Retention(keep=1)
        write = partial(checkpoint.write, self._folder, step=self._last, parts=encoded, retention=newest, meta=meta)
        self._writer.begin(self._last, write)

    def _give_up(self, why: str) -> None:
        """Stop making checkpoints, and print why. Called on all ranks."""
        self.close()
        if world_group().rank == 0:
            _say(f"in-memory checkpoints (--memory-every) are disabled: {why}")

    def close(self) -> None:
        """Wait for the current write, and make no more checkpoints."""
        self._begun, self._every = True, sys.maxsize
        with contextlib.suppress(CheckpointError):
            self._writer.finish()
        self._pair = None


def _say(text: str) -> None:
    print(f"paceline: {text.rstrip('.')}.", file=sys.stderr, flush=True)
