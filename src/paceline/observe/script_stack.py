"""Find the line of the user's script that makes the current call, and the owner of the code in a file.

Nothing depends on the location of Paceline: it may be a checkout or an installed library.
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
_INSTALLED = ("site-packages", "dist-packages")  # the second is Debian's name
_MAX_CALLS = 24  # largest number of frames in call_stack


class Owner(enum.Enum):
    SCRIPT = enum.auto()
    LIBRARY = enum.auto()
    PACELINE = enum.auto()
    BENEATH = enum.auto()  # Python and torch: all code uses them, so their frames say nothing about the script


class ScriptStack:
    """Finds the owners of the frames of the current call.

    A root is a file or folder of the script. Code in a root folder, or in the folder of a root file, belongs to the
    script. Code that is installed inside this folder, for example in a virtual environment, does not. A script may
    itself be installed: its folder then belongs to the script, unless it is the folder of all libraries. Without
    roots, all code that is not installed belongs to the script.
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
        """The owner of code. name: its `co_filename`."""
        if name not in self._known:
            self._known[name] = self._find_owner(name)
        return self._known[name]

    def _find_owner(self, name: str) -> Owner:
        if name.startswith("<"):  # frozen modules, code made at run time
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
        """The frames of the current call with code of these owners, innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.owner_of(frame.f_code.co_filename) in owners:
                yield frame
            frame = frame.f_back

    def owns(self, file: str) -> bool:
        """Does the code in a file belong to the script?"""
        return self.owner_of(file) is Owner.SCRIPT

    def caller(self, skip: Callable[[FrameType], bool] | None = None) -> list[Any]:
        """[file, line] of the script's innermost frame; [] if there is none.

        skip: ignore these frames if there are others.
        """
        lines = self.script_stack(1, skip) or (self.script_stack(1) if skip else [])
        return next(iter(lines), [])

    def script_stack(self, most: int = 6, skip: Callable[[FrameType], bool] | None = None) -> list[list[Any]]:
        """[file, line] of the script's frames, innermost first, except those to `skip`."""
        own = (f for f in self.frames(Owner.SCRIPT) if skip is None or not skip(f))
        return [[f.f_code.co_filename, f.f_lineno] for f in islice(own, most)]

    def call_stack(self) -> list[list[Any]]:
        """[file, line] of the frames of the script and of its libraries, innermost first."""
        frames = islice(self.frames(Owner.SCRIPT, Owner.LIBRARY), _MAX_CALLS)
        return [[f.f_code.co_filename, f.f_lineno] for f in frames]

    def called_by_script(self) -> bool:
        """Does the script itself make the current call, with only Paceline in between?"""
        innermost = next(self.frames(Owner.SCRIPT, Owner.LIBRARY, Owner.BENEATH), None)
        return innermost is not None and self.owns(innermost.f_code.co_filename)

    def called_through(self, module: str) -> bool:
        """Is the innermost frame that is not Paceline's in this module?"""
        innermost = next(self.frames(Owner.SCRIPT, Owner.LIBRARY, Owner.BENEATH), None)
        return innermost is not None and innermost.f_globals.get("__name__") == module

    def called_by_library(self) -> bool:
        """Does a library make the current call, not the script itself?"""
        innermost = next(self.frames(Owner.SCRIPT, Owner.LIBRARY), None)
        return innermost is not None and not self.owns(innermost.f_code.co_filename)


anywhere = ScriptStack()
"""A ScriptStack without roots, for use when the script is unknown."""


def module_files(name: str) -> list[str]:
    """The folders, or the file, of the package or module that `python -m name` runs; [] if it is not found."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))


def _is_in(folder: str, path: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _parts(folder: str, path: str) -> Sequence[str]:
    return os.path.relpath(path, folder).split(os.sep)


def _is_installed_in(folder: str, path: str) -> bool:
    """Is the file in an environment's packages, or in a target of `pip install --target`, inside this folder?"""
    parts = _parts(folder, path)[:-1]
    between = [os.path.join(folder, *parts[: count + 1]) for count in range(len(parts))]
    return any(part in _INSTALLED for part in parts) or any(map(_has_metadata, between))


@lru_cache(maxsize=4096)
def _has_metadata(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # the folder is inside an archive
        return False
