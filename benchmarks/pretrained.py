"""Memory of large models from Hugging Face's layout and from "meta" under fsdp (stage 3), in host memory.

    python benchmarks/pretrained.py --out benchmarks/results/pretrained.json

Every measurement is of new processes; shown is the largest of them. Memory is the peak of anonymous memory (RssAnon,
sampled each millisecond) above what the process held before, in bytes, beside the bytes of its own slices.

    meta      prepare of a model that was built on "meta", float32, with its modules' own initialisation
    export    run.export(shards=) of that model
    load      prepare with init=False, and run.load_pretrained of these files
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_checkpoints import Peak, chained
from torch import nn
from verify_cost import machine

import paceline
from paceline.comm import dtensor


def build(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.forward = lambda x: chained(model[0], x)
    return model


def measure(folder: Path, options: argparse.Namespace) -> None:
    """In one of the processes: write its figures."""
    run = paceline.start(device="cpu", progress="off", strategy="fsdp", seed=1)
    run.prepare(nn.Linear(2, 2))  # loads torch's modules
    found: dict[str, Any] = {}

    def recorded(what: str, peak: Peak) -> None:
        found[what] = {"peak": peak.most - peak.before, "seconds": peak.seconds}

    model = build(options.width, options.layers)
    dist.barrier()
    with Peak() as peak:
        run.prepare(model)
    recorded("meta", peak)
    found["own slices"] = sum(dtensor.local(p).nbytes for p in model.parameters())
    dist.barrier()
    with Peak() as peak:
        run.export(folder / "out", model, shards=options.shards)
    recorded("export", peak)
    again = build(options.width, options.layers)
    dist.barrier()
    with Peak() as peak:
        run.prepare(again, init=False)
        run.load_pretrained(folder / "out", again)
    recorded("load", peak)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(dtensor.local(one), dtensor.local(other))
    run.close()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "paceline", "run", "--nproc", str(options.processes), __file__]
        line += ["--measure", folder, "--width", str(options.width), "--layers", str(options.layers)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*line, "--shards", options.shards], env=env, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.processes)]
    own = max(rank["own slices"] for rank in ranks)
    found: dict[str, Any] = {"own slices": own}
    for what in ("meta", "export", "load"):
        most = max(rank[what]["peak"] for rank in ranks)
        found[what] = {
            "peak of rank 0": ranks[0][what]["peak"],
            "largest peak": most,
            "largest peak of own slices": round(most / own, 3),
            "seconds": max(rank[what]["seconds"] for rank in ranks),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--width", type=int, default=2890)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--shards", default="200MB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options)
        return
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "parameters": options.width**2 * options.layers,
        "processes": options.processes,
        "shards": options.shards,
        "bytes": launch(options),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
