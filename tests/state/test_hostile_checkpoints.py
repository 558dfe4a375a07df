"""A checkpoint that was changed by somebody who can sign manifests is restored, or refused by a CheckpointError that
names it: in bounded time and memory, whatever kinds of files, sizes, nesting and numbers it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_checkpoints.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [42, pytest.param(500, marks=pytest.mark.full)])
def test_a_changed_checkpoint_is_refused_by_name_or_restored(count: int) -> None:
    done = subprocess.run([sys.executable, SCRIPT, str(count)], capture_output=True, text=True, timeout=280)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (done.returncode, len(found)) == (0, count), done.stderr[-2000:]
    refused = [one for one in found if one["error"]]
    assert not [one for one in found if one["must"] and not one["error"]]
    assert not [one for one in refused if one["error"] != "CheckpointError" or not one["named"]]
    assert len(refused) > 0.8 * count, "most changes were harmless: what was tested?"
