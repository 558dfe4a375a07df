"""What each process of `paceline doctor` runs: the script, with recorders, as launcher/worker.py runs it.

    python -m paceline.doctor.doctor_worker script FILE args...

The recorders are installed when the script imports torch. Nothing is imported earlier than the script would: what it
puts into the environment before `import torch` counts.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

from paceline.doctor.recorders.patching import after_import
from paceline.launcher import worker
from paceline.world import DOCTOR


def main() -> None:
    kind, script = sys.argv[1:3]
    order = json.loads(os.environ.pop(DOCTOR))  # processes that the script starts are not watched

    def watch(_: ModuleType) -> None:
        from paceline.doctor.recorders import install

        install(order, kind, script)

    after_import("torch", watch)
    worker.main()


if __name__ == "__main__":
    main()
