"""The program of each rank in a run of `paceline verify`: runs the script as launcher/worker.py does, with a recorder.

    python -m paceline.verify.plain_worker.rank_program script FILE args...

The recorder is installed when the script imports torch. If the script calls `paceline.start`, the run gets the recorder
of worker/recorder.py instead.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from paceline.launcher import worker
from paceline.launcher.import_hook import after_import, stay_first
from paceline.trials.spec import TrialSpec
from paceline.verify.plain_worker.libraries import use_one_device, use_small_meshes


def main() -> None:
    kind, script = sys.argv[1:3]
    spec = TrialSpec.from_env(os.environ)
    assert spec is not None
    watched: list[ModuleType] = []

    def record(torch: ModuleType) -> None:
        if not watched:  # torch may be reloaded
            watched.append(torch)
            from paceline.verify.plain_worker.plain_recorder import install

            install(spec, kind, script)
            if not spec.is_subject:
                use_small_meshes()

    if not spec.is_subject:
        use_one_device()
    after_import("torch", record)
    stay_first()
    worker.main()


if __name__ == "__main__":
    main()
