"""What the ranks of test_verify.py run: runs of `paceline verify`, one after the other, in processes that wait."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from paceline import session, world
from paceline.compare.worker.probe import TrialEnded


def run(work: str) -> dict[str, str]:
    """work: a JSON list of {"name", "script", "args", "settings", "spec"}. Returns what failed, by name."""
    return {one["name"]: failed for one in json.loads(work) if (failed := _run(**one)) is not None}


def _run(name: str, script: str, args: Sequence[str], settings: dict[str, Any], spec: str) -> str | None:
    os.environ[world.SETTINGS], os.environ[world.TRIAL] = json.dumps(settings), spec
    sys.argv = [script, *args]
    try:
        runpy.run_path(script, run_name="__main__")
    except TrialEnded:
        pass
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        session._close_all()
    return None
