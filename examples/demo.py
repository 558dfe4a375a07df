"""`make demo`: trains examples/digits.py on one process and on two, and compares the models and each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

BOUND = 1e-5
WHY = """\
Both runs add the same numbers, in another order: after 180 steps in fp32 their weights differ by rounding, by less
than 1e-6 where this was written. What is wrong shows: a gradient 1% too small moves a weight by 8e-3, another global
batch by 3e-2, batch norm over each process's own examples by 5e-2. The bound is between the two."""


def run(command: str, processes: int, options: list[str], arguments: list[str]) -> int:
    """`paceline COMMAND` with the example and its arguments. Returns the exit code."""
    paceline, script = Path(sys.executable).with_name("paceline"), Path(__file__).with_name("digits.py")
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # each process imitates a device of fixed speed
    called = [str(paceline), command, "--nproc", str(processes), *options, str(script), *arguments]
    return subprocess.run(called, env=one_thread).returncode


def train(processes: int, folder: Path, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the example on this number of processes. Returns its results and its weights."""
    out = folder / f"{processes}.safetensors"
    code = run("run", processes, [], [*arguments, "--out", str(out)])
    if code:
        sys.exit(f"demo: training with --nproc {processes} ended with exit code {code}; see the message above.")
    return json.loads(out.with_suffix(".json").read_text()), load_file(out)


def main() -> None:
    console = Console(highlight=False)
    results, weights = [], []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            console.rule(f"{processes} process{'es' if processes > 1 else ''}: the same script, the same global batch")
            result, exported = train(processes, Path(folder), sys.argv[1:])
            results.append(result)
            weights.append(exported)

    table = Table(title="One model, trained twice (one thread a process)")
    for heading in ("processes", "test accuracy", "training seconds"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(str(result["processes"]), f"{result['accuracy']:.4f}", f"{result['seconds']:.1f}")
    console.print(table)

    one, two = weights
    difference = max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
    console.print(f"Largest difference between two weights: {difference:.1e} (bound {BOUND:.0e})")
    if one.keys() != two.keys() or not difference <= BOUND:
        console.print(f"These are not the same model.\n{WHY}")
        sys.exit(1)
    console.rule("step by step: paceline verify")
    sys.exit(run("verify", 2, ["--steps", "5"], sys.argv[1:]))


if __name__ == "__main__":
    main()
