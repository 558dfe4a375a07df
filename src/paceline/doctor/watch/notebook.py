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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TextIO

from paceline.world import ERROR_FILE

MOST_EVENTS = 400_000  # then nothing more is written: a run of days fills no disk
_FLUSH_SECONDS = 0.2
_MOST_CALLS = 24  # of a way through libraries
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


class Notebook:
    """What one process's watchers share.

    Args:
        directory: where `rank-N.jsonl` goes.
        folder: of the script: lines of files in it are the user's.
        steps: end the script before the optimizer step after so many; None: never.

    own: seconds that watching has taken so far, which are no part of a step.
    """

    def __init__(self, directory: str, rank: int, folder: str, steps: int | None) -> None:
        self.rank, self.steps, self.directory = rank, steps, directory
        self.own = 0.0
        self.models: Any = None  # what one watcher has for the others: models.py
        self.collectives: Any = None  # collectives.py
        self.optimizers: Any = weakref.WeakSet()  # training.py
        self.fresh = False  # has a backward been made since the last step?
        self.clipped: set[int] = set()  # id of each gradient that the last clipping made smaller
        self._folder = os.path.join(folder, "")
        self._pid = os.getpid()
        self._files: dict[str, bool] = {}  # a file of code -> is it the user's?
        self._looked: dict[str, bool] = {}  # a file of code -> is it the user's or a library's?
        self._trees: dict[str, ast.AST | None] = {}
        self._statements: dict[tuple[str, int], Statement] = {}
        self._written, self._flushed = 0, 0.0
        self._file: TextIO = open(  # noqa: SIM115  # for as long as the process lives
            os.path.join(directory, f"rank-{rank}.jsonl"), "w", encoding="utf-8"
        )
        os.register_at_fork(after_in_child=self.leave)  # a DataLoader's worker is not watched
        atexit.register(self.finish)

    def note(self, kind: str, /, at: list[Any] | None = None, now: bool = False, **values: Any) -> None:
        """Write an event. at: `[file, line]`, otherwise the line that calls. now: it is read while the script runs."""
        if self._written >= MOST_EVENTS or not self.watching:
            return
        began = time.perf_counter()
        self._written += 1
        event = {"k": kind, "t": began - self.own, "at": at if at is not None else self.at(), **values}
        self._file.write(json.dumps(event, default=str) + "\n")
        if now or began - self._flushed > _FLUSH_SECONDS:
            self._flushed = began
            self._file.flush()
        self.own += time.perf_counter() - began

    @property
    def watching(self) -> bool:
        return self._pid != 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done in here is watching, and no part of the script's time; its errors are not the script's."""
        began, before = time.perf_counter(), self.own
        try:
            yield
        except Exception as error:
            self.note("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            self.own = before + time.perf_counter() - began

    def clock(self) -> float:
        """Seconds, without those that watching took."""
        return time.perf_counter() - self.own

    def at(self, beneath: Callable[[FrameType], bool] | None = None) -> list[Any]:
        """[file, line] of the innermost call in a file of the script's folder; empty where there is none. beneath:
        calls that are left out, where others lead to them."""
        return next(iter(self.path(1, beneath) or (self.path(1) if beneath else [])), [])

    def through(self) -> list[list[Any]]:
        """[file, line] of the calls in files of the script and of the libraries that it calls (not torch's, Python's or
        Paceline's), the innermost first."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < _MOST_CALLS:
            name = frame.f_code.co_filename
            looked = self._looked.get(name)
            if looked is None:
                looked = self._looked[name] = self._users(name) or _is_library(name)
            if looked:
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def library(self) -> bool:
        """Does a library of the script's make this call, and not the script itself?"""
        innermost = next(iter(self.through()), None)
        return innermost is not None and not self._users(innermost[0])

    def path(self, most: int = 6, beneath: Callable[[FrameType], bool] | None = None) -> list[list[Any]]:
        """[file, line] of the calls in files of the script's folder, the innermost first, without those beneath."""
        found: list[list[Any]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < most:
            name = frame.f_code.co_filename
            if self._users(name) and not (beneath is not None and beneath(frame)):
                found.append([name, frame.f_lineno])
            frame = frame.f_back
        return found

    def way(self) -> tuple[list[Any], dict[str, Any], dict[str, bool]]:
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
            if self._users(name):
                statement = self._statement(name, line)
                lines.append(f"{os.path.basename(name)}:{line}")
                branches |= {f"{os.path.basename(name)}:{where}": taken for where, taken in statement.branches.items()}
                if not at:
                    at = [name, line]
                    how = _values(statement, frame)
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

    def _users(self, name: str) -> bool:
        users = self._files.get(name)
        if users is None:
            users = self._files[name] = self._is_users(name)
        return users

    def _is_users(self, name: str) -> bool:
        if name.startswith("<"):
            return False
        path = os.path.realpath(name)
        if not path.startswith(self._folder):
            return False
        # An environment that lies inside the folder is a library all the same.
        return "site-packages" not in path and not path.startswith(_LIBRARIES)

    def flush(self) -> None:
        """What has been written is on its way: this process may be about to wait for ever."""
        if self.watching:
            self._file.flush()

    def leave(self) -> None:
        """Write nothing more: this process is a child, or its script has failed."""
        if self._pid == os.getpid():
            self._file.flush()
        self._pid = 0

    def finish(self) -> None:
        """The script has come to its end."""
        if self.watching and os.getpid() == self._pid:
            self.note("end", at=[], now=True, failed=os.path.exists(os.environ.get(ERROR_FILE, "")))
            self._file.flush()


def _is_library(name: str) -> bool:
    path, torch = os.path.realpath(name), getattr(sys.modules.get("torch"), "__file__", None)
    if name.startswith("<") or (torch and path.startswith(os.path.join(os.path.dirname(os.path.realpath(torch)), ""))):
        return False
    return "site-packages" in path or not path.startswith(_BENEATH)


@dataclass(frozen=True)
class Statement:
    """sent: the first argument of its call. names: those in it, and those of a loop around it that binds one of them or
    computes one from what it binds;
    indices: those in its subscripts. branches: line of each `if` around it -> is it in the body, or in the else?"""

    sent: str = ""
    names: frozenset[str] = frozenset()
    indices: frozenset[str] = frozenset()
    branches: Mapping[int, bool] = field(default_factory=dict)


def statement_at(tree: ast.AST | None, line: int) -> Statement:
    """The innermost at a line."""
    around = [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _holds(n, line)]
    statement = max(around, key=lambda n: n.lineno, default=None)
    if statement is None:
        return Statement()
    branches = {
        n.lineno: held
        for n in around
        if isinstance(n, ast.If)
        for held, part in ((True, n.body), (False, n.orelse))
        if any(_holds(inner, line) for inner in part)
    }
    if hasattr(statement, "body"):  # the head of a block
        return Statement(branches=branches)
    used = _names(statement)
    for loop in around:
        if isinstance(loop, ast.For):
            bound = _names(loop.target)
            used |= bound if bound & (used | _sources(loop, line, used)) else set()
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and n.args and _holds(n, line)]
    subscripts = [_names(n.slice) for n in ast.walk(statement) if isinstance(n, ast.Subscript)]
    indices = frozenset(name for names in subscripts for name in names)
    return Statement(ast.unparse(calls[0].args[0])[:60] if calls else "", frozenset(used), indices, branches)


def _sources(loop: ast.For, line: int, used: set[str]) -> set[str]:
    """The names in what a loop's body assigns to the `used` ones before a line, as `name` in
    `value = metrics[name].clone()`."""
    found: set[str] = set()
    assigned = (n for n in ast.walk(loop) if isinstance(n, ast.Assign) and n.lineno < line)
    for statement in sorted(assigned, key=lambda n: n.lineno, reverse=True):
        if any(_names(target) & (used | found) for target in statement.targets):
            found |= _names(statement.value)
    return found


def _values(statement: Statement, frame: FrameType) -> dict[str, Any]:
    """What a statement chooses by. A number only where it is an index: elsewhere it may be data."""
    found: dict[str, Any] = {"what is sent": statement.sent} if statement.sent else {}
    for name in statement.names | statement.indices:
        value = frame.f_locals.get(name)
        if (type(value) is str and len(value) <= 40) or (type(value) is int and name in statement.indices):
            found[name] = value
    return found


def _holds(node: ast.AST, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or 0))  # type: ignore[attr-defined]


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def put(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by what `make` makes of it, under the same name and documentation."""
    original = getattr(owner, name)
    made = make(original)
    vars(made).update({k: v for k, v in getattr(original, "__dict__", {}).items() if k not in vars(made)})
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(original, attribute):
            setattr(made, attribute, getattr(original, attribute))
    made.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature reads it
    setattr(owner, name, made)
