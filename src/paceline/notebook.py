"""Progress in a notebook cell: detect a notebook, and show a picture that is updated in place.

This module imports neither torch nor IPython: in a Jupyter kernel, IPython is already loaded.

A run in the kernel's process shows its picture directly (`Cell`). Under `paceline.launch`, a worker writes the picture
to a file (`CellFile`), and the kernel's process, which supervises the workers, shows the file (`Relay`).
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
    """An output that shows one picture. A new picture replaces the last."""

    def show(self, html: str, text: str) -> None:
        """Show the picture: `html`, or `text` where HTML is not supported."""
        ...


def in_kernel() -> bool:
    """Return whether this process is a Jupyter kernel (JupyterLab, VS Code, Colab, nbclient)."""
    shell = _shell()
    return shell is not None and any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def _shell() -> Any:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


class Cell:
    """The output of the running cell, in the kernel's process."""

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
    """Call `call` whenever a cell ends, with or without an error. Return a function that unregisters it.

    Outside of a Jupyter kernel, both functions do nothing.
    """
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
    """A file with a picture, which the kernel's process shows. Each picture replaces the last, atomically."""

    def __init__(self, path: str) -> None:
        self._path = path

    def show(self, html: str, text: str) -> None:
        part = f"{self._path}.part"
        with contextlib.suppress(OSError), open(part, "w") as file:  # a full disk must not end the training
            json.dump([html, text], file)
        with contextlib.suppress(OSError):
            os.replace(part, self._path)


class Relay:
    """Shows the picture in another process's CellFile."""

    def __init__(self, path: str, place: Place) -> None:
        self.path, self._place = path, place
        self._seen: tuple[int, int] | None = None  # mtime and inode of the file shown last

    def show(self) -> None:
        """Show the picture if it has changed."""
        try:
            found = os.stat(self.path)
            if (found.st_mtime_ns, found.st_ino) == self._seen:
                return
            with open(self.path) as file:
                html, text = json.load(file)
        except (OSError, ValueError):  # not written yet
            return
        self._seen = found.st_mtime_ns, found.st_ino
        self._place.show(html, text)


def shorten(error: BaseException, text: str) -> None:
    """In a notebook, show this text instead of the error's traceback (IPython calls `_render_traceback_`)."""
    if in_kernel():
        with contextlib.suppress(AttributeError):
            error._render_traceback_ = lambda: text.split("\n")  # type: ignore[attr-defined]
