"""Choose the progress display of a run from the setting and the output device."""

from __future__ import annotations

import os
import sys

import torch

from paceline import notebook
from paceline.monitor.display import Bar, Display, Lines, View, Writer
from paceline.monitor.notebook_display import NotebookDisplay
from paceline.monitor.summary import Totals
from paceline.world import CELL_FILE


def make_display(progress: str, view: View, totals: Totals, device: torch.device) -> Display:
    """Return the display for a value of the setting `progress`.

    "auto" is a bar in a notebook and on a terminal that can move its cursor, and lines elsewhere.
    """
    writer = Writer(view, totals, device)
    place = _cell()
    if place is not None and progress in ("auto", "bar"):
        return NotebookDisplay(writer, place)
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Bar(writer) if progress == "bar" or (progress == "auto" and terminal) else Lines(writer)


def _cell() -> notebook.Place | None:
    """Return the notebook cell that this process runs in or was launched from; None outside of notebooks."""
    path = os.environ.get(CELL_FILE)
    return notebook.CellFile(path) if path else notebook.Cell() if notebook.in_kernel() else None
