"""Where in the user's script the current call is made; and whose code is in a file.

Nothing is decided by where Paceline itself lies: it may be a checkout, or installed among the libraries.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

Place = tuple[str, int]
"""(file, line), from 1."""

_PACELINE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PYTHON = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_PYTHON.add(os.path.dirname(os.path.realpath(os.__file__)))
_INSTALLED = ("site-packages", "dist-packages")  # Debian's name for it is the second
_MAX_CALLS = 24  # frames of call_stack


class Owner(enum.Enum):
    SCRIPT = enum.auto()
    LIBRARY = enum.auto()
    PACELINE = enum.auto()
    BENEATH = enum.auto()  # Python and torch, on which all stand: their frames say nothing about what a script does


class ScriptStack:
    """Whose code the frames of the current call are.

    A root is a file of the script's, or a folder. The code in the folder of a file, and below it, is the script's, but
    not what is installed there, as into a virtual environment. A script may itself be installed: then its own folder
    counts, if that is not the one that holds all libraries. Without roots all code is the script's that is not
    installed.
    """

    def __init__(self, roots: Iterable[str] | None = None) -> None:
        self._known: dict[str, Owner] = {}
        self._files: set[str] = set()
        self._folders: list[str] = ["/"] if roots is None else []
        for root in map(os.path.realpath, roots or ()):
            folder = root if os.path.isdir(root) else os.path.dirname(root)
            if folder != root:
                self._files.add(root)
            if os.path.basename(folder) not in _INSTALLED:
                self._folders.append(folder)

    def owner_of(self, name: str) -> Owner:
        """name: `co_filename` of the code."""
        if name not in self._known:
            self._known[name] = self._find_owner(name)
        return self._known[name]

    def _find_owner(self, name: str) -> Owner:
        if name.startswith("<"):  # frozen modules, code that is made at run time
            return Owner.BENEATH
        path = os.path.realpath(name)
        if path in self._files:
            return Owner.SCRIPT
        if _is_in(_PACELINE, path):
            return Owner.PACELINE
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        python = any(_is_in(folder, path) and _parts(folder, path)[0] not in _INSTALLED for folder in _PYTHON)
        if python or (torch and _is_in(os.path.dirname(os.path.realpath(torch)), path)):
            return Owner.BENEATH
        owned = any(_is_in(folder, path) and not _is_installed_in(folder, path) for folder in self._folders)
        return Owner.SCRIPT if owned else Owner.LIBRARY

    def frames(self, *owners: Owner) -> Iterator[FrameType]:
        """The frames of the current call with code of these owners, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.owner_of(frame.f_code.co_filename) in owners:
                yield frame
            frame = frame.f_back

    def owns(self, file: str) -> bool:
        """Is a file of code the script's own?"""
        return self.owner_of(file) is Owner.SCRIPT

    def caller(self, skip: Callable[[FrameType], bool] | None = None) -> list[Any]:
        """[file, line] of the script's innermost frame; [] where there is none.

        skip: frames to leave out, unless there are no others.
        """
        lines = self.script_stack(1, skip) or (self.script_stack(1) if skip else [])
        return next(iter(lines), [])

    def script_stack(self, most: int = 6, skip: Callable[[FrameType], bool] | None = None) -> list[list[Any]]:
        """[file, line] of the script's frames, the innermost first, without those to `skip`."""
        own = (f for f in self.frames(Owner.SCRIPT) if skip is None or not skip(f))
        return [[f.f_code.co_filename, f.f_lineno] for f in islice(own, most)]

    def call_stack(self) -> list[list[Any]]:
        """[file, line] of the frames of the script and of its libraries, the innermost first."""
        frames = islice(self.frames(Owner.SCRIPT, Owner.LIBRARY), _MAX_CALLS)
        return [[f.f_code.co_filename, f.f_lineno] for f in frames]

    def called_by_script(self) -> bool:
        """Does the script itself make the current call, with nothing but Paceline in between?"""
        innermost = next(self.frames(Owner.SCRIPT, Owner.LIBRARY, Owner.BENEATH), None)
        return innermost is not None and self.owns(innermost.f_code.co_filename)

    def called_by_library(self) -> bool:
        """Does a library of the script's make the current call, and not the script itself?"""
        innermost = next(self.frames(Owner.SCRIPT, Owner.LIBRARY), None)
        return innermost is not None and not self.owns(innermost.f_code.co_filename)


anywhere = ScriptStack()
"""For where it is not known which script runs."""


def module_files(name: str) -> list[str]:
    """The folders, or the file, of the package or module that `python -m name` runs. [] where it is not found."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))


def _is_in(folder: str, path: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _parts(folder: str, path: str) -> Sequence[str]:
    return os.path.relpath(path, folder).split(os.sep)


def _is_installed_in(folder: str, path: str) -> bool:
    """Is the file below an environment's packages, or those of a `pip install --target`, within this folder?"""
    parts = _parts(folder, path)[:-1]
    between = [os.path.join(folder, *parts[: count + 1]) for count in range(len(parts))]
    return any(part in _INSTALLED for part in parts) or any(map(_has_metadata, between))


@lru_cache(maxsize=4096)
def _has_metadata(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # it lies in an archive
        return False
