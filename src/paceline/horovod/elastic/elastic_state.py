"""The state of an elastic Horovod script, and its recovery after a lost worker.

Horovod keeps surviving workers running, with their commits in memory. torch.distributed's group cannot lose a member,
so after a failure the launcher ends all workers and restarts the script (`paceline run --max-restarts N`). Therefore
`commit` also writes the state to a file. On each machine, local rank 0 writes it to the launcher's folder, which
survives the workers and is removed at the end of the run. After a restart:

Phase 1: the processes exchange the numbers of their newest commits. The newest commit is broadcast and loaded.
Phase 2: the reset callbacks are called, because the number of processes may have changed.
Phase 3: `sync` broadcasts rank 0's state, as at every start, and the script's function is called.

All workers also restart when a machine joins. If the launcher never restarts, no file is written. A full disk does not
end the training: the commit stays in memory, and a restart resumes from the last commit that was written.
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
_HELD = (torch.nn.Module, Optimizer, ElasticSampler)  # saved by their state_dict


class TorchState:
    """The state of an elastic script: models, optimizers, samplers and other values, as attributes.

    Args:
        model: a model, or None.
        optimizer: an optimizer, or None.
        values: further models, optimizers, ElasticSamplers, or picklable values, such as epoch=0.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._commits = self._written = 0
        self._failed = False  # whether writing the last commit failed; reported once, until a write succeeds
        self._names = ["model", "optimizer", *values]
        wrong = [name for name in self._names if hasattr(self, name)]
        if wrong:
            raise SettingError(f"TorchState({wrong[0]}=...): it has a method of that name. Choose another name.")
        vars(self).update(values, model=model, optimizer=optimizer)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register functions to call after a restart. The number of processes may have changed."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the reset callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing. Subclasses may override it."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = {
            name: copy.deepcopy(value.state_dict()) if isinstance(value, _HELD) else copy.copy(value)
            for name, value in self._current().items()
        }

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def restore(self) -> None:
        """Restore the state from the last copy in memory."""
        self._load(self._saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        missing = sorted(set(saved) ^ set(self._names))
        if missing:
            raise UsageError(
                f"the last commit and this TorchState have different attributes ({', '.join(missing)}). The script has "
                "changed since the commit. Start a new run."
            )
        for name, value in self._current().items():
            if isinstance(value, _HELD):
                value.load_state_dict(copy.deepcopy(saved[name]))
            else:
                setattr(self, name, copy.copy(saved[name]))

    def commit(self) -> None:
        """Keep a copy in memory, and also in the launcher's folder if the launcher may restart the workers."""
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
            back = f"commit {self._written}" if self._written else "the beginning"
            print(
                f"paceline: commit {self._commits} could not be written to {path.parent} ({problem}). After a failure, "
                f"the script would resume from {back}. Free space, or set TMPDIR to another directory.",
                file=sys.stderr,
                flush=True,
            )
        self._failed = bool(problem)

    def check_host_updates(self) -> None:
        """Do nothing: the launcher restarts the script when machines join or leave."""

    def sync(self) -> None:
        """Broadcast rank 0's state to every process."""
        self.save()
        held = {name for name, value in self._current().items() if isinstance(value, _HELD)}
        states = hvd_state.broadcast_object({name: self._saved[name] for name in held})
        values = hvd_state.broadcast_object({name: self._saved[name] for name in self._saved.keys() - held})
        self._load(states | values)
        self.save()

    def resume(self) -> bool:
        """Load the newest commit after a restart. Return False if there is none."""
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
    """Return the file for commits. None if the launcher never restarts, or is not `paceline run`.

    The file is in the launcher's folder for messages of the workers, which exists until the run ends.
    """
    error_file = os.environ.get(ERROR_FILE)
    return Path(error_file).parent / FILE if error_file and os.environ.get(STARTS_AGAIN) else None


def _write(path: Path, content: Any) -> str:
    """Write a file atomically, readable by this user only. Return the error message, or ""."""
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
    """Return the commit that this run wrote on this machine, or None if there is none."""
    if path is None or not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return content


def forget() -> None:
    """Remove the commit file, which is no longer needed."""
    path = _path()
    if path is not None and hvd_world.local_rank() == 0:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
