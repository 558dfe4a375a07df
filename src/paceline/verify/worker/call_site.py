"""Which line of the user's script is being run."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

_PACELINE = str(Path(__file__).resolve().parents[2]) + os.sep
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + os.sep}
)
_WORKER_FOLDER = os.path.join("", "verify", "worker", "")
# What these modules of the folder compute is not the script's.
_RECORDING_MODULES = {"recorder.py", "record_files.py", "backward_watch.py", "rng_draws.py", "collate_recorder.py"}

Place = tuple[str, int]
"""(file, line), from 1."""


@lru_cache(maxsize=4096)
def owner_of_code(file: str) -> str:
    """Whose file this is: "own" (the user's), "paceline" or "library"."""
    path = os.path.realpath(file)
    if path.startswith(_PACELINE):  # which may be installed among the libraries
        return "paceline"
    return "library" if file.startswith("<") or path.startswith(_LIBRARIES) or "site-packages" in path else "own"


def call_site(from_recorder: bool = False) -> tuple[Place | None, bool]:
    """(the innermost line of the user's that is being run, whether that line has called Paceline).

    There is no such line, (None, True), for what the recorder computes for itself.

    from_recorder: the recorder itself asks, for the line that has called it.
    """
    inside_paceline = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = owner_of_code(frame.f_code.co_filename)
        if kind == "own":
            return (frame.f_code.co_filename, frame.f_lineno), inside_paceline
        if kind == "paceline":
            name = os.path.basename(frame.f_code.co_filename)
            if _WORKER_FOLDER not in frame.f_code.co_filename:
                inside_paceline = True
            elif not inside_paceline and not from_recorder and name in _RECORDING_MODULES:
                return None, True
        frame = frame.f_back
    return None, inside_paceline
