"""The event log: the file into which one rank's recorders write, one JSON object a line.

It also answers which line of the script makes the current call, from the frames of the stack.
"""

from __future__ import annotations

import ast
import atexit
import json
import linecache
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from paceline.doctor.recorders.code_owner import CodeOwner, Owner
from paceline.doctor.recorders.library_names import names_in
from paceline.doctor.recorders.statements import Statement, statement_at, values_in
from paceline.world import ERROR_FILE

MAX_EVENTS = 400_000  # the log ends here, so that a run of days fills no disk
_FLUSH_SECONDS = 0.2
_MAX_CALLS = 24  # frames of call_stack


class EventLog:
    """The events of one process, and what its recorders share.

    Args:
        directory: of `rank-N.jsonl`.
        rank: of this process.
        roots: the script's file, or those of the module that is run, and its working directory (code_owner.py).
        steps: the script is ended after so many optimizer steps; None: it ends itself.
    """

    def __init__(self, directory: str, rank: int, roots: Sequence[str], steps: int | None) -> None:
        self.rank, self.steps, self.directory = rank, steps, directory
        self.overhead_seconds = 0.0  # seconds that recording has taken; no recorded time includes them
        self.models: Any = None  # the ModelRecorder
        self.collectives: Any = None  # the CollectiveRecorder
        self.variables: Any = None  # the VariableRecorder
        self.draws: Any = None  # the DrawRecorder
        self.optimizers: Any = weakref.WeakSet()  # the script's optimizers that are alive
        self.backward_since_step = False  # has a backward ended since the last optimizer step?
        self.clipped_gradients: set[int] = set()  # id of each gradient that the last clipping made smaller
        self._pid = os.getpid()
        self._owner = CodeOwner(roots)
        self._trees: dict[str, ast.AST | None] = {}
        self._statements: dict[tuple[str, int], Statement] = {}
        self._written, self._flushed = 0, 0.0
        self._file: TextIO = open(  # noqa: SIM115  # for as long as the process lives
            os.path.join(directory, f"rank-{rank}.jsonl"), "w", encoding="utf-8"
        )
        os.register_at_fork(after_in_child=self.stop)  # a DataLoader's worker records nothing here
        atexit.register(self.finish)

    def record(self, kind: str, /, at: list[Any] | None = None, now: bool = False, **values: Any) -> None:
        """Write an event.

        Args:
            at: [file, line] of the script; None: the line that makes the current call.
            now: flush, since the launcher's side reads this event while the script runs.
        """
        if self._written >= MAX_EVENTS or not self.active:
            return
        began = time.perf_counter()
        self._written += 1
        event = {"k": kind, "t": began - self.overhead_seconds, "at": at if at is not None else self.caller(), **values}
        self._file.write(json.dumps(event, default=str) + "\n")
        if now or began - self._flushed > _FLUSH_SECONDS:
            self._flushed = began
            self._file.flush()
        self.overhead_seconds += time.perf_counter() - began

    @property
    def active(self) -> bool:
        """Does this process record? A forked child does not."""
        return self._pid != 0

    def owns(self, file: str) -> bool:
        """Is a file of code the script's own?"""
        return self._is_script(file)

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """Count the time of this block as overhead, and record an error in it as an event instead of raising it."""
        began, before = time.perf_counter(), self.overhead_seconds
        try:
            yield
        except Exception as error:
            self.record("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            self.overhead_seconds = before + time.perf_counter() - began

    def clock(self) -> float:
        """Seconds, without overhead."""
        return time.perf_counter() - self.overhead_seconds

    def caller(self, skip: Callable[[FrameType], bool] | None = None) -> list[Any]:
        """[file, line] of the innermost frame in the script's folder; [] where there is none.

        skip: frames to leave out, unless there are no others.
        """
        return next(iter(self.script_stack(1, skip) or (self.script_stack(1) if skip else [])), [])

    def call_stack(self) -> list[list[Any]]:
        """[file, line] of the frames outside torch, Python and Paceline, the innermost first."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < _MAX_CALLS:
            name = frame.f_code.co_filename
            if self._owner.of(name) is not Owner.BENEATH:
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def called_by_library(self) -> bool:
        """Does a library of the script's make the current call, and not the script itself?"""
        innermost = next(iter(self.call_stack()), None)
        return innermost is not None and not self._is_script(innermost[0])

    def script_stack(self, most: int = 6, skip: Callable[[FrameType], bool] | None = None) -> list[list[Any]]:
        """[file, line] of the frames in the script's folder, the innermost first, without those to `skip`."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < most:
            name = frame.f_code.co_filename
            if self._is_script(name) and not (skip is not None and skip(frame)):
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def call_context(self) -> tuple[list[Any], dict[str, Any], dict[str, bool]]:
        """Where the current call is made, how its data were chosen, and in which branches it stands.

        Returns:
            caller(); a dict of "the line" (all of the script's lines on the stack), "what is sent" (the text of the
            first argument) and the values of the names that the statement chooses by, as `name` in
            `all_reduce(metrics[name])`, or that the calling library chooses by; and for the line of each `if` around
            the calls, whether the call stands in its body.
        """
        frame: FrameType | None = sys._getframe(1)
        at: list[Any] = []
        lines: list[str] = []
        how: dict[str, Any] = {}
        branches: dict[str, bool] = {}
        inner: list[FrameType] = []  # of the library that makes the call
        while frame is not None and len(lines) < 8:
            name, line = frame.f_code.co_filename, frame.f_lineno
            if self._is_script(name):
                statement = self._statement(name, line)
                lines.append(f"{os.path.basename(name)}:{line}")
                branches |= {f"{os.path.basename(name)}:{where}": taken for where, taken in statement.branches.items()}
                if not at:
                    at = [name, line]
                    how = values_in(statement, frame)
            elif not at and len(inner) < _MAX_CALLS and self._owner.of(name) is Owner.LIBRARY:
                inner.append(frame)
            frame = frame.f_back
        return at, {"the line": " < ".join(lines), **how, **names_in(inner)}, branches

    def _statement(self, file: str, line: int) -> Statement:
        known = self._statements.get((file, line))
        if known is None:
            known = self._statements[file, line] = statement_at(self._tree(file), line)
        return known

    def _tree(self, file: str) -> ast.AST | None:
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse("".join(linecache.getlines(file)))
            except (SyntaxError, ValueError):
                self._trees[file] = None
        return self._trees[file]

    def _is_script(self, name: str) -> bool:
        return self._owner.of(name) is Owner.SCRIPT

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
            self._file.flush()
