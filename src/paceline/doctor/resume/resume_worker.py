"""The program of each rank under `paceline doctor --resume`: runs the script as launcher/worker.py does, and records.

    python -m paceline.doctor.resume.resume_worker script FILE args...

The recorder is installed when the script imports torch.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

from paceline.launcher import worker
from paceline.launcher.import_hook import after_import, stay_first
from paceline.world import DOCTOR


def main() -> None:
    kind, script = sys.argv[1:3]
    order = json.loads(os.environ.pop(DOCTOR))  # processes that the script starts are not watched
    watched: list[ModuleType] = []

    def watch(torch: ModuleType) -> None:
        if not watched:  # torch may be reloaded
            watched.append(torch)
            from paceline.doctor.resume.resume_recorder import install

            install(order, kind, script)

    after_import("torch", watch)
    stay_first()
    worker.main()


if __name__ == "__main__":
    main()
