"""Which progress display a run has: by the setting, and by what there is to show it on."""

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
    """For a setting of `progress`; "auto" is a bar in a notebook, and where stderr is a terminal that can move its
    cursor."""
    writer = Writer(view, totals, device)
    place = _cell()
    if place is not None and progress in ("auto", "bar"):
        return NotebookDisplay(writer, place)
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Bar(writer) if progress == "bar" or (progress == "auto" and terminal) else Lines(writer)


def _cell() -> notebook.Place | None:
    """The cell of a notebook, in which this process runs or from which it was launched."""
    path = os.environ.get(CELL_FILE)
    return notebook.CellFile(path) if path else notebook.Cell() if notebook.in_kernel() else None
