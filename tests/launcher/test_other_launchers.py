"""The same script under torch's old launcher. Slurm and Open MPI are in tests/system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import sys
import paceline
run = paceline.start(device="cpu")
words = (run.world.source, run.world.rank, run.world.size, run.sum(run.world.rank + 1), *sys.argv[1:])
sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece: these launchers mix what the ranks print
sys.stdout.flush()
"""


def outcome(directory: Path, command: list[str], environ: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """(exit code, sorted lines of stdout, stderr)"""
    (directory / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.conformance
def test_the_old_torch_launcher(tmp_path: Path) -> None:
    """It puts --local-rank before the script's own arguments, which is the script's business; the world is as usual."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2", "script.py", "--lr", "1"]
    code, lines, err = outcome(tmp_path, command)
    assert code == 0, err
    assert lines == [f"torchrun {rank} 2 3 --local-rank={rank} --lr 1" for rank in (0, 1)]
