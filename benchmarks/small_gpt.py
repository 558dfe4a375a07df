"""The held-out loss of examples/nanogpt.py on tinyshakespeare by step, and a sample.

    python benchmarks/small_gpt.py --data input.txt                  # 6,000 steps: some 20 minutes on one idle core
    python benchmarks/small_gpt.py --data input.txt --checkpoints checkpoints/     # can be stopped and resumed

The JSON file is written at the end. With --checkpoints the evaluations before a stop are saved beside the checkpoints.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from collate_draws import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "small_gpt.json"
SETTINGS = {"steps": 6000, "global-batch": 16, "length": 128, "layers": 4, "width": 128, "every": 250}
EVALUATED = re.compile(r"step (\d+): held-out loss ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="tinyshakespeare's input.txt")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    settings = {name: getattr(options, name.replace("-", "_")) for name in SETTINGS}
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(options.nproc)]
    command += [str(ROOT / "examples" / "nanogpt.py"), "--data", str(options.data)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found: dict[str, float] = {}
    notes = options.checkpoints and options.checkpoints / "held_out.json"
    if options.checkpoints:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        command += ["--checkpoints", str(options.checkpoints)]
        found = json.loads(notes.read_text()) if notes.is_file() else {}
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    sample: list[str] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if evaluated := EVALUATED.match(line):
                found[evaluated[1]] = float(evaluated[2])
                if notes:
                    notes.write_text(json.dumps(found))
            elif not line.startswith("resumed after"):
                sample.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    result = {
        "command": "python benchmarks/small_gpt.py --data input.txt",
        "time": began,
        "machine": machine(),
        "settings": {**settings, "processes": options.nproc},
        "held_out_loss": found,
        "lowest": min(found.values()),
        "sample": "".join(sample),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
