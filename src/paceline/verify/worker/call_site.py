"""Which line of the user's script is being run, and whether Paceline or verify's own recording stands above it."""

from __future__ import annotations

import os

from paceline.observe.script_stack import Owner, Place, anywhere

_OBSERVERS = tuple(os.path.join("", *folder, "") for folder in (("verify", "worker"), ("observe",)))
# What these modules of the folder compute is not the script's.
_RECORDING_MODULES = {"recorder.py", "record_files.py", "backward_watch.py", "rng_draws.py", "collate_recorder.py"}


def call_site(from_recorder: bool = False) -> tuple[Place | None, bool]:
    """(the innermost line of the user's that is being run, whether that line has called Paceline).

    There is no such line, (None, True), for what the recorder computes for itself.

    from_recorder: the recorder itself asks, for the line that has called it.
    """
    inside_paceline = False
    for frame in anywhere.frames(Owner.SCRIPT, Owner.PACELINE):
        file = frame.f_code.co_filename
        if anywhere.owns(file):
            return (file, frame.f_lineno), inside_paceline
        if not any(folder in file for folder in _OBSERVERS):
            inside_paceline = True
        elif not inside_paceline and not from_recorder and os.path.basename(file) in _RECORDING_MODULES:
            return None, True
    return None, inside_paceline
