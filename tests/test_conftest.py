"""The guard of conftest.py catches each kind of leak, and cleans up so that the next test starts well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "environment variable": "os.environ['PACELINE_LEAK'] = '1'",
    "thread": "threading.Thread(target=time.sleep, args=(100,), name='leaky', daemon=True).start()",
    "child process": "subprocess.Popen(['sleep', '60'])",
    "listening port": "KEPT.append(socket.create_server(('127.0.0.1', 0)))",
    "signal handler": "signal.signal(signal.SIGTERM, lambda *_: None)",
    "torch global": "torch.set_default_dtype(torch.float64)",
    "process group": "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
}


@pytest.mark.conformance
def test_every_leak_fails_its_test_and_no_other(tmp_path: Path) -> None:
    guard = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(f"{guard}\nfrom tests import leaks\nleaks.GRACE_SECONDS = 0.1\n")
    lines = [
        "import os, signal, socket, subprocess, threading, time",
        "import torch, torch.distributed as dist",
        "KEPT = []",
    ]
    for number, (kind, statement) in enumerate(LEAKS.items()):
        lines += [
            f"def test_{number}_{kind.replace(' ', '_')}():",
            f"    {statement}",
            f"def test_{number}_good(): pass",
        ]
    (tmp_path / "test_leaks.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"COLUMNS": "300"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # of the guard's own modules
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    errors = re.findall(
        r"^ERROR \S+::test_\d+_(\w+) - Failed: the test left behind: ([a-z ]+?) \S+:", done.stdout, re.M
    )
    assert errors == [(kind.replace(" ", "_"), kind) for kind in LEAKS], done.stdout
    assert re.search(rf"{2 * len(LEAKS)} passed.*, {len(LEAKS)} errors in", done.stdout), done.stdout
