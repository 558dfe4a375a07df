"""The state of an elastic Horovod script, and how it outlives a lost worker.

Horovod keeps the workers that live, and their commits in memory. torch.distributed's group cannot lose a member: where
a worker fails the launcher ends all of them and starts the script again (`paceline run --max-restarts N`). So `commit`
also writes the state to a file, on each machine by the process of local rank 0, in the launcher's own folder, which
outlives the workers and ends with the run:

Phase 1, in the script that was started again: the processes tell each other their newest commit. The newest of all is
  sent to everyone, and loaded.
Phase 2: the reset callbacks are called, since the number of processes may be another.
Phase 3: `sync` sends rank 0's state to all, as at every start, and the script's function is called.

Where a machine comes all start again too. Where the launcher starts nothing again, nothing is written. A full disk ends
no training: the commit is kept in memory, and a script that starts again goes back to the last one that was written.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import SettingError, UsageError
from paceline.horovod import hvd_state, hvd_world
from paceline.horovod.elastic.elastic_sampler import ElasticSampler
from paceline.torch_private.core import save
from paceline.world import ERROR_FILE, STARTS_AGAIN

FILE = "horovod-commit"
_HELD = (torch.nn.Module, Optimizer, ElasticSampler)  # what has a state_dict that is saved in its place


class TorchState:
    """What an elastic script keeps: models, optimizers and samplers, and any other values, each an attribute.

    Args:
        model: a model, or None.
        optimizer: an optimizer, or None.
        values: further models, optimizers, ElasticSamplers, or values that can be pickled, such as epoch=0.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._commits = self._written = 0
        self._failed = False  # could the last commit not be written? Said once, until one can be again
        self._names = ["model", "optimizer", *values]
        wrong = [name for name in self._names if hasattr(self, name)]
        if wrong:
            raise SettingError(f"TorchState({wrong[0]}=...): the state has a method of that name. Choose another name.")
        vars(self).update(values, model=model, optimizer=optimizer)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Have these called when the script goes on after a restart, perhaps in another number of processes."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Nothing; for classes that derive from this one."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = {
            name: copy.deepcopy(value.state_dict()) if isinstance(value, _HELD) else copy.copy(value)
            for name, value in self._current().items()
        }

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def restore(self) -> None:
        """Go back to the last copy."""
        self._load(self._saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        missing = sorted(set(saved) ^ set(self._names))
        if missing:
            raise UsageError(
                f"the last commit and this TorchState do not have the same attributes ({', '.join(missing)}). The "
                "script has changed since: start a new run."
            )
        for name, value in self._current().items():
            if isinstance(value, _HELD):
                value.load_state_dict(copy.deepcopy(saved[name]))
            else:
                setattr(self, name, copy.copy(saved[name]))

    def commit(self) -> None:
        """Keep a copy in memory, and in the launcher's folder where it may start the workers again."""
        self.save()
        self._commits += 1
        path = _path()
        if path is not None and hvd_world.local_rank() == 0:
            self._keep_on_disk(path)

    def _keep_on_disk(self, path: Path) -> None:
        problem = _write(path, {"commits": self._commits, "state": self._saved})
        if not problem:
            self._written = self._commits
        if problem and not self._failed:
            back = f"commit {self._written}" if self._written else "its beginning"
            print(
                f"paceline: commit {self._commits} could not be written to {path.parent} ({problem}), so that after a "
                f"failure the script goes back to {back}. Make room, or set TMPDIR to another directory.",
                file=sys.stderr,
                flush=True,
            )
        self._failed = bool(problem)

    def check_host_updates(self) -> None:
        """Nothing: where machines come or go, the launcher starts the script again."""

    def sync(self) -> None:
        """Give every process rank 0's state."""
        self.save()
        held = {name for name, value in self._current().items() if isinstance(value, _HELD)}
        states = hvd_state.broadcast_object({name: self._saved[name] for name in held})
        values = hvd_state.broadcast_object({name: self._saved[name] for name in self._saved.keys() - held})
        self._load(states | values)
        self.save()

    def resume(self) -> bool:
        """Load the newest commit of a run that was started again. False: there is none."""
        path = _path()
        own = _read(path)
        commits = hvd_state.allgather_object(own["commits"] if own else 0)
        if not any(commits):
            return False
        source = commits.index(max(commits))
        found = hvd_state.broadcast_object(own, root_rank=source)
        assert found is not None
        self._commits = self._written = found["commits"]
        self._load(found["state"])
        self.save()
        return True


def _path() -> Path | None:
    """Where commits are written; None: the launcher restarts nothing, or is not `paceline run`, whose folder for what
    workers tell it is there for all of a run's starts."""
    told = os.environ.get(ERROR_FILE)
    return Path(told).parent / FILE if told and os.environ.get(STARTS_AGAIN) else None


def _write(path: Path, content: Any) -> str:
    """Whole or not at all, and readable by this user only. Returns why it was refused; "" where it is written."""
    part = ""
    try:
        number, part = tempfile.mkstemp(dir=path.parent, prefix=FILE)
        save(content, number)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        return error.strerror or str(error)
    return ""


def _read(path: Path | None) -> dict[str, Any] | None:
    """The commit of this machine, written by this run."""
    if path is None or not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return content


def forget() -> None:
    """The commits are needed no more."""
    path = _path()
    if path is not None and hvd_world.local_rank() == 0:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
