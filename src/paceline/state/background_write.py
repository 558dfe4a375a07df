"""Write a checkpoint in a thread of rank 0, while training continues.

1. `begin` starts a thread that writes copied tensors (snapshot.py), and returns at once.
2. Call `finish` before reading the checkpoint from the disk, or reusing the memory of the copies. It waits for the
   thread, and reports its warnings and its failure in the calling thread.

The interpreter waits for the thread at exit, since it is not a daemon. The launcher also waits before it ends the
process (world.WRITES).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.errors import CheckpointError, describe_error, warn, warnings_held
from paceline.world import WRITES, send_to_launcher, withdraw


class BackgroundWrite:
    """Writes at most one checkpoint at a time.

    Args:
        informs_launcher: whether to inform the launcher, which then does not end the process during a write.
    """

    def __init__(self, *, informs_launcher: bool = True) -> None:
        self._informs_launcher = informs_launcher
        self._thread: threading.Thread | None = None  # None: there is nothing to wait for
        self._step = 0
        # The outcome, valid when the thread has ended.
        self._path: Path | None = None
        self._failure = ""
        self._warnings: list[str] = []

    def begin(self, step: int, write: Callable[[], Path]) -> None:
        """Call `write` in a thread. Raises CheckpointError if no thread can be started.

        `write` returns the path of the checkpoint. The data that it writes must not change until `finish`.
        """
        assert self._thread is None, "call `finish` first"
        self._step, self._path, self._failure, self._warnings = step, None, "", []
        thread = threading.Thread(target=self._write, args=[write], name="paceline-background-save")
        self._inform_launcher(True)
        try:
            thread.start()
        except RuntimeError as error:
            self._inform_launcher(False)
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be saved in the background: {error}. Save it with "
                "background=False, or allow this user more threads (ulimit -u)."
            ) from error
        self._thread = thread

    def _write(self, write: Callable[[], Path]) -> None:
        try:
            with warnings_held() as self._warnings:
                self._path = write()
        except CheckpointError as error:
            self._failure = str(error)
        except BaseException as error:  # report any error on all ranks
            self._failure = describe_error(error)
        finally:
            self._inform_launcher(False)

    def _inform_launcher(self, writing: bool) -> None:
        """Inform the launcher whether to wait before it ends this process."""
        if self._informs_launcher and writing:
            send_to_launcher(os.environ, WRITES, str(self._step))
        elif self._informs_launcher:
            withdraw(os.environ, WRITES)

    def finish(self) -> Path | None:
        """Wait for the write, and return the path of its checkpoint. Returns None if there is no write.

        Raises CheckpointError, once, if the write failed.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._failure:
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be saved in the background: {self._failure}"
            )
        for message in self._warnings:
            warn(message)
        return self._path
