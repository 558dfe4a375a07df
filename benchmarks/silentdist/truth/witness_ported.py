"""Does a script of benchmarks/silentdist/corpus/ported train the same model on two processes as on one? Without paceline verify.

    python benchmarks/silentdist/truth/witness_ported.py benchmarks/silentdist/corpus/ported/*.py

The script runs once alone and once on two processes; the weights and buffers of all that it prepared are compared
at the end. This is what makes the truths of corpus_truth.py more than an opinion: a fault that changes nothing is none.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def record(script: str, out: str) -> None:
    """Run a script in this process; write what its prepared modules hold at the end to `out` with the rank."""
    import paceline  # where this file only starts processes, nothing else is imported

    modules: list[torch.nn.Module] = []
    prepare = paceline.Run.prepare

    def prepare_and_note(run: paceline.Run, *objects: object) -> object:
        modules.extend(o for o in objects if isinstance(o, torch.nn.Module))
        modules.extend(o.module for o in objects if hasattr(o, "module") and isinstance(o.module, torch.nn.Module))
        return prepare(run, *objects)

    paceline.Run.prepare = prepare_and_note  # type: ignore[method-assign]
    sys.argv = [script]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    state = [value.detach().double().flatten() for m in modules for value in m.state_dict().values()]
    torch.save(torch.cat(state) if state else torch.zeros(0), f"{out}.{os.environ.get('RANK', '0')}")


def distance(script: Path) -> str:
    """The largest relative distance of the weights, of both ranks, from those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        alone, apart = f"{folder}/1", f"{folder}/2"
        paceline = str(Path(sys.executable).with_name("paceline"))
        for command in (
            [sys.executable, __file__, "--record", str(script), alone],
            [paceline, "run", "--nproc", "2", __file__, "--record", str(script), apart],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                return f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        one = torch.load(f"{alone}.0")
        far = max(float((torch.load(f"{apart}.{rank}") - one).norm() / one.norm()) for rank in (0, 1))
        return f"{far:.1e}"


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(*sys.argv[2:])
    else:
        for name in sys.argv[1:]:
            print(f"{Path(name).stem:36} {distance(Path(name))}", flush=True)
