"""What the processes of test_migrate.py run: the scripts of examples/migrate with Paceline, in float64."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import torch

from paceline import session


def run(folder: str, *scripts: str) -> dict[str, str]:
    """What each script printed, by its name. Its weights are left in FOLDER/NAME.SIZE.out."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, folder)
    printed, size = {}, os.environ["WORLD_SIZE"]
    for name in scripts:
        told = io.StringIO()
        sys.argv = [name, "--epochs", "1", "--out", f"{folder}/{name}.{size}.out"]
        with contextlib.redirect_stdout(told):
            runpy.run_path(str(Path(folder, f"{name}.py")), run_name="__main__")
        current = session.current()
        if current is not None:
            current.close()
        printed[name] = told.getvalue()
    return printed
