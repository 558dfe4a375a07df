"""The cost of in-memory checkpoints: paceline run --memory-every.

    python benchmarks/memory_checkpoints.py --json benchmarks/results/memory_checkpoints.json    # some minutes

An MLP of 25 million parameters with AdamW under fsdp:stage=1 on two processes, with a checkpoint of 300 MB. Each round
runs the job three times, in a new random order: without in-memory checkpoints, without again (the control), and with
one every eighth step. Recorded are the seconds of each step on rank 0, from one fetch of a batch to the next. A step
with a checkpoint includes the time for which training stops; the steps after it run while a thread writes. Medians over
all steps of a kind, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from collate_draws import machine
from torch import nn

import paceline
from paceline.world import MEMORY_EVERY

WIDTH, LAYERS, GLOBAL_BATCH, EVERY, WARM = 2500, 4, 64, 8, 2
KINDS = {"without": False, "without again": False, "in memory": True}


def train(steps: int, results: Path) -> None:
    """Train, and write the seconds of each step, by the number of earlier steps."""
    run = paceline.start(device="cpu", progress="off", seed=0, strategy="fsdp:stage=1")
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters()))
    loader = run.batches(lambda rows: torch.randn(len(rows), WIDTH), global_batch=GLOBAL_BATCH, steps=steps + 1)
    run.restore(results.with_suffix(".none"), missing_ok=True)
    heads: list[float] = []  # the start times of the iterations
    for batch in loader:
        heads.append(time.perf_counter())
        run.backward(model(batch).square().mean())
        run.step(optimizer)
    seconds = [after - before for before, after in itertools.pairwise(heads)]
    if run.main:
        results.write_text(json.dumps(seconds))
    run.close()


def of_kind(kept: bool, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "--max-restarts", "1"]
        command += ["--memory-every", str(EVERY)] if kept else []
        subprocess.run([*command, __file__, "--steps", str(steps), "--worker", str(results)], check=True, timeout=900)
        found: list[float] = json.loads(results.read_text())
        return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {"every": EVERY}
    for kind in KINDS:
        steps = [
            (number, seconds) for one in rounds for number, seconds in enumerate(one[kind], start=1) if number > WARM
        ]
        whole = [
            sum(one[kind][EVERY : len(one[kind]) // EVERY * EVERY]) / (len(one[kind]) // EVERY - 1) for one in rounds
        ]
        found[kind] = {
            "step": spread([seconds for number, seconds in steps if number % EVERY]),
            "eighth step": spread([seconds for number, seconds in steps if number % EVERY == 0]),
            "eight steps": spread(whole),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        train(args.steps, args.worker)
        return
    assert MEMORY_EVERY not in os.environ
    draw, rounds = random.Random(0), []
    for _ in range(args.rounds):
        rounds.append({kind: of_kind(KINDS[kind], args.steps) for kind in draw.sample(list(KINDS), len(KINDS))})
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "machine": machine(),
        **summary(rounds),
        "rounds": rounds,
    }
    text = json.dumps(document, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(json.dumps(summary(rounds), indent=1))


if __name__ == "__main__":
    main()
