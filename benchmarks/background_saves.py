"""How long a checkpoint stops training: run.save and run.save(background=True).

    python benchmarks/background_saves.py --json benchmarks/results/background_saves.json    # some minutes

An MLP of 25 million parameters with AdamW on two processes, with a checkpoint of 300 MB. Each round has three blocks of
equal length, in a new random order: without a checkpoint, with a save after the first step, and with a background save
that is waited for at the end of the block. Recorded are the seconds of the whole block, of the call of run.save on rank
0, and of a step after the save (in the background: while the file is written). Medians over the rounds, with minimum
and maximum.
"""

from __future__ import annotations

import argparse
import datetime
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
from paceline.world import from_env

WIDTH, LAYERS, GLOBAL_BATCH = 2500, 4, 64
KINDS = ("none", "foreground", "background")


def train(rounds: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train. Returns rank 0's record of each block."""
    run = paceline.start(device="cpu", progress="off", seed=0)
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters()))
    loader = run.batches(lambda rows: torch.randn(len(rows), WIDTH), global_batch=GLOBAL_BATCH)
    batches = iter(loader)

    def step() -> float:
        began = time.perf_counter()
        run.backward(model(next(batches)).square().mean())
        run.step(optimizer)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    began = time.perf_counter()
    run.save(folder, keep=1, background=True)
    first = time.perf_counter() - began  # it allocates the memory for the copy
    run.wait_for_save()
    records: list[dict[str, Any]] = [{"kind": "first in the background", "save": first}]
    draw = random.Random(0)
    for number in range(rounds):
        for kind in draw.sample(KINDS, len(KINDS)):
            run.wait()
            began = time.perf_counter()
            step()
            before_save = time.perf_counter()
            if kind != "none":
                run.save(folder, keep=1, background=kind == "background")
            saved = time.perf_counter() - before_save
            after = [step() for _ in range(steps - 1)]
            before_wait = time.perf_counter()
            run.wait_for_save()
            ended = time.perf_counter()
            record = {"round": number, "kind": kind, "save": saved, "wait": ended - before_wait}
            records.append({**record, "steps": after, "block": ended - began})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if run.main else 0
    parameters = sum(parameter.numel() for parameter in net.parameters())
    records[0] |= {"bytes": size, "parameters": parameters}
    run.close()
    return records


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"first_save_in_background": records[0]["save"], **records[0]}
    del found["kind"], found["save"]
    for kind in KINDS:
        own = [record for record in records if record["kind"] == kind]
        found[kind] = {name: spread([record[name] for record in own]) for name in ("save", "wait", "block")}
        found[kind]["step"] = spread([seconds for record in own for seconds in record["steps"]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        records = train(args.rounds, args.steps, args.worker / "checkpoints")
        if from_env(os.environ).rank == 0:
            (args.worker / "records.json").write_text(json.dumps(records))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", __file__, "--worker", folder]
        command += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
        subprocess.run(command, check=True, timeout=1800)
        records = json.loads((Path(folder) / "records.json").read_text())
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "machine": machine(),
        **summary(records),
    }
    text = json.dumps(document, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
