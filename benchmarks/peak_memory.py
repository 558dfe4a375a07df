"""The most bytes in tensors during a step, under Paceline and by hand, as torch's MemTracker counts them.

    python benchmarks/peak_memory.py --json benchmarks/results/peak_memory.json    # three minutes

Every strategy that has a counterpart in plain PyTorch trains the models of plan_job.py on two processes (one for
`single`), beside the same step by hand: DistributedDataParallel for ddp, fully_shard on each layer for fsdp, a replica
that sends nothing for local_sgd. The fourth step is counted. torch's buckets of DistributedDataParallel are not seen,
on both sides: C++ allocates them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collate_draws import machine
from plan_job import job, peak_of_a_step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline

JOBS = ("mlp", "gpt", "convnet")
CASES = ("single", "ddp", "ddp:reducer=native", "fsdp:stage=2", "fsdp:stage=3", "local_sgd:every=8")


def by_hand(name: str, strategy: str) -> None:
    """Print the peak of a step without Paceline."""
    torch.manual_seed(0)
    model, make, data, batch = job(name)
    size = 1
    if strategy != "single":
        dist.init_process_group("gloo")
        size = dist.get_world_size()
    kind = strategy.partition(":")[0]
    if kind == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    elif kind == "fsdp":
        keep = {"reshard_after_forward": False} if strategy.endswith("2") else {}
        for layer in layers(model):
            fully_shard(layer, **keep)
        fully_shard(model, **keep)
    optimizer = make(model.parameters())
    x, y = data[: batch // size]

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    peaks: list[Any] = [None] * size
    peak = peak_of_a_step(model, optimizer, step)
    if size > 1:
        dist.all_gather_object(peaks, peak)
    else:
        peaks = [peak]
    if size == 1 or dist.get_rank() == 0:
        print(json.dumps(peaks))
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # freeing what MemTracker has seen deadlocks now and then with gloo threads (torch 2.13)


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a guide for fully_shard would shard: the entries of a list of layers."""
    blocks = getattr(model, "blocks", None)
    return [*blocks] if blocks is not None else [layer for layer in model if isinstance(layer, nn.Linear)]  # type: ignore[union-attr]


def under_paceline(name: str) -> None:
    run = paceline.start(seed=0, progress="off")
    model, make, data, batch = job(name)
    model, optimizer = run.prepare(model, make(model.parameters()))
    batches = iter(run.loader(data, global_batch=batch))

    def step() -> None:
        x, y = next(batches)
        run.backward(F.cross_entropy(model(x).flatten(0, -2), y.flatten()))
        run.step(optimizer)

    run.print(json.dumps(run.gather([peak_of_a_step(model, optimizer, step)])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--job", nargs=2, metavar=("NAME", "STRATEGY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, strategy = options.job
        torch.set_num_threads(1)
        under_paceline(name) if strategy == "paceline" else by_hand(name, strategy)
        return
    results: dict[str, Any] = {}
    for strategy in CASES:
        for name in JOBS:
            count = "1" if strategy == "single" else "2"
            line = [sys.executable, "-m", "paceline", "run", "--nproc", count]
            ours = peaks([*line, "--strategy", strategy, __file__, "--job", name, "paceline"])
            theirs = peaks([*line, __file__, "--job", name, strategy])
            ratio = max(ours) / max(theirs)
            results[f"{strategy}, {name}"] = {"paceline": max(ours), "by hand": max(theirs), "ratio": round(ratio, 4)}
            print(f"{strategy:20} {name:8} {max(ours):>13,} {max(theirs):>13,} {ratio:.4f}", flush=True)
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/peak_memory.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def peaks(command: list[str]) -> list[int]:
    done = subprocess.run(command, check=True, timeout=40, capture_output=True, text=True)
    found: list[int] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return found


if __name__ == "__main__":
    main()
