"""An all-reduce between the processes of this machine, in shared memory (comm/shared_memory.py) and with gloo.

    paceline run --nproc 2 benchmarks/shared_memory.py --json benchmarks/results/shared_memory.json    # a minute

Each round times one sum in shared memory, one with gloo, and a second with gloo (an A/A control), in a new random order
and with a barrier before each. Shown are the medians over the rounds, and the median of the ratios within a round with
its 5th and 95th percentile. Times are those of rank 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collate_draws import machine
from data_path import spread
from torch import Tensor

import paceline
from paceline.comm import shared_memory
from paceline.comm.mesh import world_group

SIZES = {"4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "25 MB": 25 * 2**20, "100 MB": 100 * 2**20}
SECONDS = 10.0  # for each size


def measure(nbytes: int, ways: dict[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    flat = torch.zeros(nbytes // 4)  # zeros: sums cannot overflow
    times: dict[str, list[float]] = {way: [] for way in ways}
    draw = random.Random(nbytes)
    began, number, go = time.perf_counter(), 0, torch.ones(1)
    while go.item():
        for way in draw.sample(list(ways), len(ways)):
            dist.barrier()
            start = time.perf_counter()
            ways[way](flat)
            if number >= 3:  # the first rounds warm up
                times[way].append(time.perf_counter() - start)
        number += 1
        go.fill_(float(time.perf_counter() - began < SECONDS or number < 10))
        dist.broadcast(go, 0)
    ratios = {
        way: spread([one / other for one, other in zip(times[way], times["gloo"], strict=True)])
        for way in ("shared", "again")
    }
    us = {way: round(statistics.median(times[way]) * 1e6, 1) for way in ("shared", "gloo")}
    return {"us": us, "rounds": len(times["gloo"]), "ratio": ratios["shared"], "control": ratios["again"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    run = paceline.start(device="cpu", progress="off")
    torch.set_num_threads(1)
    memory = shared_memory.open_memory(world_group())
    if memory is None:
        raise SystemExit("the processes of this run cannot share memory")
    ways = {"shared": memory.add, "gloo": dist.all_reduce, "again": dist.all_reduce}
    found: dict[str, Any] = {}
    for name, nbytes in SIZES.items():
        found[name] = measure(nbytes, ways)
        run.print(f"{name}: {found[name]}", flush=True)
    memory.close()
    if options.json and run.main:
        about = {
            "command": shlex.join(
                ["paceline", "run", "--nproc", str(run.world_size), "benchmarks/shared_memory.py", *sys.argv[1:]]
            ),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
