"""A checkpoint that is written in a thread of rank 0, while training goes on.

1. `begin` starts the thread, with a function that writes what was copied before (snapshot.py). It returns at once.
2. Whoever must find the checkpoint on the disk, or uses the copies' memory again, calls `finish` first. It waits for
   the thread, and tells in this one what the write has warned of and why it failed.

The interpreter waits at its exit for the thread, which is no daemon. A launcher that would end the process waits too
(world.WRITES).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.errors import CheckpointError, in_words, warn, warnings_held
from paceline.world import WRITES, take_back, tell_launcher


class BackgroundWrite:
    """The checkpoint that is being written, if one is; at most one at a time.

    Args:
        tells: whether the launcher is told, so that it does not end the process meanwhile.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self._tells = tells
        self._thread: threading.Thread | None = None  # None: there is nothing to wait for
        self._step = 0
        # What came of it, known when the thread has ended.
        self._path: Path | None = None
        self._failure = ""
        self._warnings: list[str] = []

    def begin(self, step: int, write: Callable[[], Path]) -> None:
        """Write in a thread. write: returns the path of the checkpoint; nothing that it uses may change meanwhile.

        Raises CheckpointError where no thread can be started.
        """
        assert self._thread is None, "call `finish` first"
        self._step, self._path, self._failure, self._warnings = step, None, "", []
        thread = threading.Thread(target=self._write, args=[write], name="paceline-background-save")
        self._tell(True)
        try:
            thread.start()
        except RuntimeError as error:
            self._tell(False)
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
        except BaseException as error:  # whatever it is, all ranks must hear of it
            self._failure = in_words(error)
        finally:
            self._tell(False)

    def _tell(self, writing: bool) -> None:
        """Tell the launcher whether it should wait before it ends this process."""
        if self._tells and writing:
            tell_launcher(os.environ, WRITES, str(self._step))
        elif self._tells:
            take_back(os.environ, WRITES)

    def finish(self) -> Path | None:
        """Wait until nothing is being written. Returns the path of what was, None where nothing was.

        Raises CheckpointError, once, where it could not be written.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._failure:
            raise CheckpointError(
                f"the checkpoint of step {self._step}, which was written in the background, is not saved: "
                f"{self._failure}"
            )
        for message in self._warnings:
            warn(message)
        return self._path
