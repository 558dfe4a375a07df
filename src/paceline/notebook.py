"""The cell of a notebook: is there one, and a picture in it that is drawn again in its place. No torch, and no import
of IPython: where there is a kernel, it has loaded IPython.

A run in the kernel's own process shows its picture itself. Under `paceline.launch` a worker writes the picture into a
file (`CellFile`), and the kernel's process, which watches the workers, shows what it finds there (`Relay`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any, Protocol


class Place(Protocol):
    """Where a picture is shown, each one in place of the one before."""

    def show(self, html: str, text: str) -> None:
        """text: the same for those who cannot show HTML."""
        ...


def in_kernel() -> bool:
    """Is this the process of a Jupyter kernel (JupyterLab, VS Code, Colab, nbclient)?"""
    shell = _shell()
    return shell is not None and any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def _shell() -> Any:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


class Cell:
    """The output of the cell that is running, in the kernel's process."""

    def __init__(self) -> None:
        self._id: str | None = None

    def show(self, html: str, text: str) -> None:
        module: Any = sys.modules["IPython.display"]
        data = {"text/html": html, "text/plain": text}
        if self._id is None:
            self._id = uuid.uuid4().hex
            module.display(data, raw=True, display_id=self._id)
        else:
            module.update_display(data, raw=True, display_id=self._id)


def after_each_cell(call: Callable[[], None]) -> Callable[[], None]:
    """Have this called when a cell has ended, however it ended. Returns what ends that. Without a kernel: nothing."""
    if not in_kernel():
        return lambda: None
    events = _shell().events

    def ended(*_: object) -> None:
        call()

    def forget() -> None:
        with contextlib.suppress(ValueError):
            events.unregister("post_run_cell", ended)

    events.register("post_run_cell", ended)
    return forget


class CellFile:
    """A file that the kernel's process shows. Each picture replaces the one before, as a whole."""

    def __init__(self, path: str) -> None:
        self._path = path

    def show(self, html: str, text: str) -> None:
        part = f"{self._path}.part"
        with contextlib.suppress(OSError), open(part, "w") as file:  # a full disk ends no training
            json.dump([html, text], file)
        with contextlib.suppress(OSError):
            os.replace(part, self._path)


class Relay:
    """Shows what a CellFile of another process holds."""

    def __init__(self, path: str, place: Place) -> None:
        self.path, self._place = path, place
        self._seen: tuple[int, int] | None = None  # the time and number of the file that was shown last

    def show(self) -> None:
        """Show the picture, if it is another one than the last time."""
        try:
            found = os.stat(self.path)
            if (found.st_mtime_ns, found.st_ino) == self._seen:
                return
            with open(self.path) as file:
                html, text = json.load(file)
        except (OSError, ValueError):  # not there yet
            return
        self._seen = found.st_mtime_ns, found.st_ino
        self._place.show(html, text)


def shorten(error: BaseException, text: str) -> None:
    """In a notebook, have this text shown for the error in place of its traceback (a method that IPython looks for)."""
    if in_kernel():
        with contextlib.suppress(AttributeError):
            error._render_traceback_ = lambda: text.split("\n")  # type: ignore[attr-defined]
