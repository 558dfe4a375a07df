"""The quality of the features of examples/contrastive.py before, during and after training, on 1 and 2 processes.

    python benchmarks/features.py --data cifar10.zip       # the table of docs/examples.md: some 10 minutes
    python benchmarks/features.py --draw                   # docs/img/contrastive.svg, from the JSON file

The measure is the example's: the accuracy of a vote among the nearest training images. The same measure for the raw
pixels is shown beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from collate_draws import machine
from curves import picture
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "contrastive.json"
SCRIPT = ROOT / "examples" / "contrastive.py"
SETTINGS = "--limit 5000 --epochs 10 --width 16 --global-batch 128 --lr 2e-3 --temperature 0.2 --every 2"
FOUND = re.compile(r"epoch +(\d+)  nearest neighbours ([\d.]+)")


def run(processes: int, data: Path) -> tuple[dict[str, float], list[float]]:
    """The measure by epoch, and the loss of each step."""
    with tempfile.TemporaryDirectory() as logs:
        config = Path(logs) / "settings.toml"
        config.write_text(f'log_dir = {json.dumps(logs)}\nlog_every = 1\nprogress = "off"\n')
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--config", str(config)]
        command += [str(SCRIPT), "--data", str(data), *shlex.split(SETTINGS)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (Path(logs) / "metrics.jsonl").read_text().splitlines()]
    losses = [round(line["loss"], 8) for line in lines if "loss" in line]
    return {epoch: float(value) for epoch, value in FOUND.findall(done.stdout)}, losses


def of_pixels(data: Path) -> float:
    """The same measure, with normalised pixels as features."""
    from cifar10_data import load
    from contrastive import NEIGHBOURS

    train, test = load(data, 5000)
    train.augment = False
    one, other = (F.normalize(torch.stack([part[n][0] for n in range(len(part))]).flatten(1)) for part in (test, train))
    closest = (one @ other.T).topk(NEIGHBOURS, dim=1)
    votes = torch.zeros(len(one), 10).scatter_add_(1, train.labels[closest.indices], closest.values)
    return float((votes.argmax(1) == test.labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="cifar10.zip, or cifar-10-python.tar.gz")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw the losses of the JSON file")
    options = parser.parse_args()
    if options.draw:
        curves = json.loads(RESULTS.read_text())["losses"]
        (ROOT / "docs" / "img" / "contrastive.svg").write_text(picture(curves, "contrastive.py"))
        return
    if options.data is None:
        parser.error("--data is missing: cifar10.zip, or cifar-10-python.tar.gz")
    sys.path.append(str(ROOT / "examples"))
    result: dict[str, Any] = {
        "command": "python benchmarks/features.py --data cifar10.zip",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | {"note": "other programs computed at the same time: nothing here is a time"},
        "settings": SETTINGS,
        "nearest_neighbours": {},
        "losses": {},
    }
    for size, name in ((1, "1 process"), (2, "2 processes")):
        result["nearest_neighbours"][name], result["losses"][name] = run(size, options.data)
        print(name, result["nearest_neighbours"][name], flush=True)
    one, two = result["losses"].values()
    result["largest_difference"] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    result["nearest_neighbours"]["pixels"] = of_pixels(options.data)
    RESULTS.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
