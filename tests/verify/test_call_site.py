"""verify tells Paceline's own files from libraries', also where Paceline is installed among them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "paceline"


def test_paceline_among_the_libraries(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    shutil.copytree(SOURCE, installed / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import json, torch, paceline.world\nfrom paceline.verify.worker.call_site import owner_of_code\n"
        "print(*map(owner_of_code, (paceline.world.__file__, torch.__file__, json.__file__, '/nowhere/train.py')))"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "paceline library library own\n", done.stderr
