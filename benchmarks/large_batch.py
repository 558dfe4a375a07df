"""examples/resnet_large_batch.py at several batch sizes and equal epochs, with and without learning rate scaling.

    python benchmarks/large_batch.py --data cifar10.zip            # the table of docs/learning_rate.md

Scaled: the learning rate grows with the batch, with a warm-up. Not scaled: the learning rate of the smallest batch.
Everything else is the same: images, epochs, initial weights, cosine schedule. One run each, with the same seed.
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
RESULTS = ROOT / "benchmarks" / "results" / "large_batch.json"
SCRIPT = ROOT / "examples" / "resnet_large_batch.py"


def accuracies(data: Path, batch: int, words: list[str]) -> list[float]:
    """Test accuracy after each epoch."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "1", str(SCRIPT), "--data", str(data)]
    command += ["--global-batch", str(batch), *words]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"batch {batch} failed:\n{done.stdout}{done.stderr}")
    return [float(value) for value in re.findall(r"val_accuracy ([\d.]+)", done.stderr)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cifar10.zip, or cifar-10-python.tar.gz")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--limit", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1, help="that of the smallest batch")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args()
    smallest = min(options.batches)
    names = ("limit", "epochs", "warmup", "lr", "blocks", "width")
    words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    words += ["--base-batch", str(smallest)]
    about = {
        "command": "python benchmarks/large_batch.py --data cifar10.zip",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {name: getattr(options, name) for name in names},
        "steps": {str(batch): options.epochs * -(-options.limit // batch) for batch in options.batches},
    }
    found: dict[str, dict[str, list[float]]] = {}
    if RESULTS.is_file() and (before := json.loads(RESULTS.read_text()))["settings"] == about["settings"]:
        about, found = {**about, "time": before["time"]}, before["accuracy_by_epoch"]  # resume a stopped benchmark
    for batch in options.batches:
        for kind, more in (("scaled", []), ("not scaled", ["--no-scaling"])):
            if batch == smallest and more:
                continue  # both are the same there
            if kind not in found.setdefault(str(batch), {}):
                found[str(batch)][kind] = accuracies(options.data, batch, [*words, *more])
            RESULTS.write_text(json.dumps({**about, "accuracy_by_epoch": found}, indent=1) + "\n")
            print(batch, kind, found[str(batch)][kind], flush=True)


if __name__ == "__main__":
    main()
