"""The file into which one rank's watchers write, an event in each line; and the line of the script that calls."""

from __future__ import annotations

import ast
import atexit
import json
import linecache
import os
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from paceline.doctor.recorders.statements import Statement, statement_at, values_in
from paceline.world import ERROR_FILE

MAX_EVENTS = 400_000  # then nothing more is written: a run of days fills no disk
_FLUSH_SECONDS = 0.2
_MAX_CALLS = 24  # of a way through libraries
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _PACKAGE}
)
# Frames of these say nothing of what a script does with a result.
_BENEATH = (
    os.path.join(os.path.dirname(os.path.realpath(os.__file__)), ""),
    os.path.join(os.path.realpath(_PACKAGE), ""),
)


class EventLog:
    """What one process's watchers share.

    Args:
        directory: where `rank-N.jsonl` goes.
        folder: of the script: lines of files in it are the user's.
        steps: end the script before the optimizer step after so many; None: never.

    own: seconds that watching has taken so far, which are no part of a step.
    """

    def __init__(self, directory: str, rank: int, folder: str, steps: int | None) -> None:
        self.rank, self.steps, self.directory = rank, steps, directory
        self.overhead_seconds = 0.0
        self.models: Any = None  # what one watcher has for the others: models.py
        self.collectives: Any = None  # collectives.py
        self.optimizers: Any = weakref.WeakSet()  # training.py
        self.backward_since_step = False  # has a backward been made since the last step?
        self.clipped_gradients: set[int] = set()  # id of each gradient that the last clipping made smaller
        self._folder = os.path.join(folder, "")
        self._pid = os.getpid()
        self._script_files: dict[str, bool] = {}  # a file of code -> is it the user's?
        self._outside_torch: dict[str, bool] = {}  # a file of code -> is it the user's or a library's?
        self._trees: dict[str, ast.AST | None] = {}
        self._statements: dict[tuple[str, int], Statement] = {}
        self._written, self._flushed = 0, 0.0
        self._file: TextIO = open(  # noqa: SIM115  # for as long as the process lives
            os.path.join(directory, f"rank-{rank}.jsonl"), "w", encoding="utf-8"
        )
        os.register_at_fork(after_in_child=self.stop)  # a DataLoader's worker is not watched
        atexit.register(self.finish)

    def record(self, kind: str, /, at: list[Any] | None = None, now: bool = False, **values: Any) -> None:
        """Write an event. at: `[file, line]`, otherwise the line that calls. now: it is read while the script runs."""
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
        return self._pid != 0

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """What is done in here is watching, and no part of the script's time; its errors are not the script's."""
        began, before = time.perf_counter(), self.overhead_seconds
        try:
            yield
        except Exception as error:
            self.record("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            self.overhead_seconds = before + time.perf_counter() - began

    def clock(self) -> float:
        """Seconds, without those that watching took."""
        return time.perf_counter() - self.overhead_seconds

    def caller(self, beneath: Callable[[FrameType], bool] | None = None) -> list[Any]:
        """[file, line] of the innermost call in a file of the script's folder; empty where there is none. beneath:
        calls that are left out, where others lead to them."""
        return next(iter(self.script_stack(1, beneath) or (self.script_stack(1) if beneath else [])), [])

    def call_stack(self) -> list[list[Any]]:
        """[file, line] of the calls in files of the script and of the libraries that it calls (not torch's, Python's or
        Paceline's), the innermost first."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < _MAX_CALLS:
            name = frame.f_code.co_filename
            outside_torch = self._outside_torch.get(name)
            if outside_torch is None:
                outside_torch = self._outside_torch[name] = self._is_script(name) or _is_library(name)
            if outside_torch:
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def called_by_library(self) -> bool:
        """Does a library of the script's make this call, and not the script itself?"""
        innermost = next(iter(self.call_stack()), None)
        return innermost is not None and not self._is_script(innermost[0])

    def script_stack(self, most: int = 6, beneath: Callable[[FrameType], bool] | None = None) -> list[list[Any]]:
        """[file, line] of the calls in files of the script's folder, the innermost first, without those beneath."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < most:
            name = frame.f_code.co_filename
            if self._is_script(name) and not (beneath is not None and beneath(frame)):
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def call_context(self) -> tuple[list[Any], dict[str, Any], dict[str, bool]]:
        """What at() says; how the script came to make this call; the branches of `if`s in which it is made.

        How: "the line", all of its lines on the way; "what is sent", the text of the argument; and the values of the
        names by which the statement chooses, as `name` in `all_reduce(metrics[name])`.
        """
        frame: FrameType | None = sys._getframe(1)
        at: list[Any] = []
        lines: list[str] = []
        how: dict[str, Any] = {}
        branches: dict[str, bool] = {}
        while frame is not None and len(lines) < 8:
            name, line = frame.f_code.co_filename, frame.f_lineno
            if self._is_script(name):
                statement = self._statement(name, line)
                lines.append(f"{os.path.basename(name)}:{line}")
                branches |= {f"{os.path.basename(name)}:{where}": taken for where, taken in statement.branches.items()}
                if not at:
                    at = [name, line]
                    how = values_in(statement, frame)
            frame = frame.f_back
        return at, {"the line": " < ".join(lines), **how}, branches

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
        is_script = self._script_files.get(name)
        if is_script is None:
            is_script = self._script_files[name] = self._in_script_folder(name)
        return is_script

    def _in_script_folder(self, name: str) -> bool:
        if name.startswith("<"):
            return False
        path = os.path.realpath(name)
        if not path.startswith(self._folder):
            return False
        # An environment that lies inside the folder is a library all the same.
        return "site-packages" not in path and not path.startswith(_LIBRARIES)

    def flush(self) -> None:
        """What has been written is on its way: this process may be about to wait for ever."""
        if self.active:
            self._file.flush()

    def stop(self) -> None:
        """Write nothing more: this process is a child, or its script has failed."""
        if self._pid == os.getpid():
            self._file.flush()
        self._pid = 0

    def finish(self) -> None:
        """The script has come to its end."""
        if self.active and os.getpid() == self._pid:
            self.record("end", at=[], now=True, failed=os.path.exists(os.environ.get(ERROR_FILE, "")))
            self._file.flush()


def _is_library(name: str) -> bool:
    path, torch = os.path.realpath(name), getattr(sys.modules.get("torch"), "__file__", None)
    if name.startswith("<") or (torch and path.startswith(os.path.join(os.path.dirname(os.path.realpath(torch)), ""))):
        return False
    return "site-packages" in path or not path.startswith(_BENEATH)
