"""The program of each rank under `paceline doctor`: run the script as launcher/worker.py does, with recorders.

    python -m paceline.doctor.doctor_worker script FILE args...

The recorders are installed when the script imports torch. This program does not import torch earlier, because a script
may first set environment variables that `import torch` reads.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from types import ModuleType
from typing import Any

from paceline.launcher import worker
from paceline.launcher.import_hook import after_import, stay_first
from paceline.observe.records import append_record
from paceline.world import DOCTOR


def main() -> None:
    kind, script = sys.argv[1:3]
    order = json.loads(os.environ.pop(DOCTOR))  # processes that the script starts are not watched
    watched: list[ModuleType] = []

    def watch(torch: ModuleType) -> None:
        if not watched:  # torch may be reloaded
            watched.append(torch)
            if order.get("checkpoints"):
                from paceline.doctor.resume.resume_recorder import install
            else:
                from paceline.doctor.recorders import install  # type: ignore[assignment]

            install(order, kind, script)

    after_import("torch", watch)
    stay_first()
    atexit.register(_note_if_unwatched, order, watched, os.getpid())
    worker.main()


def _note_if_unwatched(order: dict[str, Any], watched: list[ModuleType], pid: int) -> None:
    """Record an "unseen" event if the script imported torch and doctor missed it."""
    if "torch" in sys.modules and not watched and os.getpid() == pid:
        path = os.path.join(order["directory"], f"rank-{os.environ.get('RANK', '0')}.jsonl")
        append_record(path, {"k": "unseen", "t": 0.0, "at": []})


if __name__ == "__main__":
    main()
