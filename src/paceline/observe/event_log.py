"""The event log of one process: what was observed of its script, in order.

An event is a record (records.py) with the fields `k`, its kind; `t`, seconds without the observer's own; and `at`,
[file, line] of the script, or []. The other fields belong to the kind.
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
    """The events of one process. It says where in the script an event happens, and holds the patches that observe.

    Code of an observer runs in `overhead()`: its time is left out of all recorded times, and its errors become events.

    Args:
        path: the file.
        stack: whose code is on the stack.
        shared: what the recorders that write into this log know of each other.
    """

    def __init__(self, path: str, stack: ScriptStack, shared: Any = None) -> None:
        self.stack, self.shared = stack, shared
        self.patches = Patches(lambda: self.active, self.overhead)
        self._overhead_seconds = 0.0
        self._block_began: float | None = None  # of the outermost `overhead()`: the clock stands still in it
        self._pid = os.getpid()
        self._flushed = 0.0
        self._counts: Counter[str] = Counter()
        self._file = RecordFile(path, MAX_EVENTS)
        os.register_at_fork(after_in_child=self.stop)  # a DataLoader's worker records nothing here
        atexit.register(self.finish)

    def record(self, kind: str, /, at: list[Any] | None = None, now: bool = False, **values: Any) -> None:
        """Write an event.

        Args:
            at: [file, line] of the script; None: the line that makes the current call.
            now: flush, since another process reads this event while the script runs.
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
        """Count one more of these. Are there no more than `most` so far? For what costs too much to be done always."""
        self._counts[what] += 1
        return self._counts[what] <= most

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """Count the time of this block as overhead, and record an error in it as an event instead of raising it."""
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
        """Seconds, without overhead."""
        now = time.perf_counter() if self._block_began is None else self._block_began
        return now - self._overhead_seconds

    def flush(self) -> None:
        """Write the buffer to the file: this process may be about to wait for ever."""
        if self.active:
            self._file.flush()

    def stop(self) -> None:
        """Record nothing more: this process is a forked child, or its script has failed."""
        if self._pid == os.getpid():
            self._file.flush()
        self._pid = 0

    def finish(self) -> None:
        """Record that the script has come to its end."""
        if self.active and os.getpid() == self._pid:
            self.record("end", at=[], now=True, failed=os.path.exists(os.environ.get(ERROR_FILE, "")))
