"""Find the line of the user's script that is running, and whether it is in a call of Paceline."""

from __future__ import annotations

import os

from paceline.observe.script_stack import Owner, Place, anywhere

_OBSERVERS = tuple(os.path.join("", *folder, "") for folder in (("verify", "worker"), ("observe",)))
# Computations of these modules do not belong to the script.
_RECORDING_MODULES = {"recorder.py", "record_files.py", "backward_watch.py", "rng_draws.py", "collate_recorder.py"}


def call_site(from_recorder: bool = False) -> tuple[Place | None, bool]:
    """Return (the innermost line of the user's script that is running, whether this line is in a call of Paceline).

    Returns (None, True) for computations of the recorder.

    from_recorder: the recorder is the caller, and needs the line of the script that led to it.
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
