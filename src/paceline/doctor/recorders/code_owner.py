"""Whose code is in a file: the script's, a library's, or that of Python, torch and Paceline, on which both stand.

Nothing is decided by where Paceline itself lies: it may be a checkout, or installed among the libraries.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence

_PACELINE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_PYTHON = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_PYTHON.add(os.path.dirname(os.path.realpath(os.__file__)))
_INSTALLED = ("site-packages", "dist-packages")  # Debian's name for it is the second


class Owner(enum.Enum):
    SCRIPT = enum.auto()
    LIBRARY = enum.auto()
    BENEATH = enum.auto()  # Python, torch and Paceline: their frames say nothing about what a script does


class CodeOwner:
    """Answers for the files of one process.

    A root is a file of the script's, or a folder. The code in the folder of a file, and below it, is the script's, but
    not what is installed there, as into a virtual environment. A script may itself be installed: then its own folder
    counts, if that is not the one that holds all libraries.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        self._known: dict[str, Owner] = {}
        self._files: set[str] = set()
        self._folders: list[str] = []
        for root in map(os.path.realpath, roots):
            folder = root if os.path.isdir(root) else os.path.dirname(root)
            if folder != root:
                self._files.add(root)
            if os.path.basename(folder) not in _INSTALLED:
                self._folders.append(folder)

    def of(self, name: str) -> Owner:
        """name: `co_filename` of the code."""
        owner = self._known.get(name)
        if owner is None:
            owner = self._known[name] = self._find(name)
        return owner

    def _find(self, name: str) -> Owner:
        if name.startswith("<"):  # frozen modules, code that is made at run time
            return Owner.BENEATH
        path = os.path.realpath(name)
        if path in self._files:
            return Owner.SCRIPT
        if _is_beneath(path):
            return Owner.BENEATH
        owned = any(path.startswith(os.path.join(f, "")) and not _is_installed_in(f, path) for f in self._folders)
        return Owner.SCRIPT if owned else Owner.LIBRARY


def module_files(name: str) -> list[str]:
    """The folders, or the file, of the package or module that `python -m name` runs. [] where it is not found."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))


def _is_beneath(path: str) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    packages = [_PACELINE] + ([os.path.dirname(os.path.realpath(torch))] if torch else [])
    if any(path.startswith(os.path.join(package, "")) for package in packages):
        return True
    return any(
        path.startswith(os.path.join(folder, "")) and _parts(folder, path)[0] not in _INSTALLED for folder in _PYTHON
    )


def _is_installed_in(folder: str, path: str) -> bool:
    """Is the file below an environment's packages, or those of a `pip install --target`, within this folder?"""
    parts = _parts(folder, path)[:-1]
    if any(part in _INSTALLED for part in parts):
        return True
    between = [os.path.join(folder, *parts[: count + 1]) for count in range(len(parts))]
    return any(_has_metadata(inner) for inner in between)


def _has_metadata(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # it lies in an archive
        return False


def _parts(folder: str, path: str) -> Sequence[str]:
    return os.path.relpath(path, folder).split(os.sep)
