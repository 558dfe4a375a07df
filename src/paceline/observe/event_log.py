"""The event log of one process: observations of its script, in order.

An event is a record (records.py) with the fields `k` (the kind), `t` (seconds, without the observer's time) and `at`
([file, line] of the script, or []). The other fields depend on the kind.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.observe.patching import Patches
from paceline.observe.records import RecordFile
from paceline.observe.script_stack import ScriptStack
from paceline.world import ERROR_FILE

MAX_EVENTS = 400_000
_FLUSH_SECONDS = 0.2


class EventLog:
    """The events of one process. It finds the script's line of each event, and holds the observer's patches.

    Code of an observer runs in `overhead()`: its time is left out of all recorded times, and its errors become events.

    Args:
        path: the file.
        stack: finds the script's lines on the call stack.
        shared: the state that the recorders of this log share.
    """

    def __init__(self, path: str, stack: ScriptStack, shared: Any = None) -> None:
        self.stack, self.shared = stack, shared
        self.patches = Patches(lambda: self.active, self.overhead)
        self._overhead_seconds = 0.0
        self._block_began: float | None = None  # start of the outermost `overhead()`: the clock stops inside it
        self._pid = os.getpid()
        self._flushed = 0.0
        self._counts: Counter[str] = Counter()
        self._file = RecordFile(path, MAX_EVENTS)
        os.register_at_fork(after_in_child=self.stop)  # a forked DataLoader worker does not write to this log
        atexit.register(self.finish)

    def record(self, kind: str, /, at: list[Any] | None = None, now: bool = False, **values: Any) -> None:
        """Write an event.

        Args:
            at: [file, line] of the script; None: the line of the current call.
            now: also flush the file, since another process reads this event while the script runs.
        """
        if not self.active:
            return
        began = time.perf_counter()
        flush = now or began - self._flushed > _FLUSH_SECONDS
        self._flushed = began if flush else self._flushed
        event = {"k": kind, "t": self.clock(), "at": self.stack.caller() if at is None else at, **values}
        self._file.write(event, flush)
        if self._block_began is None:
            self._overhead_seconds += time.perf_counter() - began

    @property
    def active(self) -> bool:
        """Does this process record? A forked child does not."""
        return self._pid != 0

    def few(self, what: str, most: int) -> bool:
        """Count one more `what`. Returns whether the count is at most `most`, to limit work that is expensive."""
        self._counts[what] += 1
        return self._counts[what] <= most

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """Count the time of this block as overhead. An error in the block is recorded instead of raised."""
        outermost, began = self._block_began is None, time.perf_counter()
        if outermost:
            self._block_began = began
        try:
            yield
        except Exception as error:
            self.record("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            if outermost:
                self._overhead_seconds += time.perf_counter() - began
                self._block_began = None

    def clock(self) -> float:
        """Seconds on a clock that excludes overhead."""
        now = time.perf_counter() if self._block_began is None else self._block_began
        return now - self._overhead_seconds

    def flush(self) -> None:
        """Write the buffer to the file. Call it before a wait that may never end."""
        if self.active:
            self._file.flush()

    def stop(self) -> None:
        """Stop recording: this process is a forked child, or its script has failed."""
        if self._pid == os.getpid():
            self._file.flush()
        self._pid = 0

    def finish(self) -> None:
        """Record that the script has finished."""
        if self.active and os.getpid() == self._pid:
            self.record("end", at=[], now=True, failed=os.path.exists(os.environ.get(ERROR_FILE, "")))
