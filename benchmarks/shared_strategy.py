"""The strategy shared, compared with hand-written DDP and one process with all threads: time and memory of a step.

    python benchmarks/shared_strategy.py --json benchmarks/results/shared_strategy.json      # ten minutes

The model is a multilayer perceptron of 25 million parameters, with AdamW (default and fused). Two processes of one
thread each compare in one run: `ddp` and `ddp again` (an A/A control), torch's DistributedDataParallel with
gradient_as_bucket_view and static_graph; `shared`; and `one process`, plain PyTorch on rank 0 with two threads and the
whole global batch, while rank 1 waits at a barrier. Each round has a step of each, in a new random order, after a
barrier; the time is that of the slower rank. Shown are medians over the rounds, and the median of the ratios of
examples/s within a round with its 5th and 95th percentile.

Memory is each process's proportional set size (PSS, /proc/self/smaps_rollup), read every 10 ms during steps, in a
separate run for each variant: a page shared by several processes counts in each by its share. The ratios are of the
mean over the processes, with and without the memory that a process had before it made the model.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from collate_draws import machine
from data_path import spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline

BATCHES = (8, 64, 256)  # examples per process
WIDTHS = (1024, 2560, 2560, 2560, 2560, 1024)
CLASSES = 1024


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adamw(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


class ByHand:
    def __init__(self, fused: bool) -> None:
        self.model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = adamw(self.model, fused)

    def step(self, batch: list[Tensor]) -> None:
        step_by_hand(self.model, self.optimizer, batch)


class Ours:
    """A step under Paceline, with batches in memory. The loader's yield, which begins a step, is timed too."""

    def __init__(self, run: paceline.Run, fused: bool, batch: int) -> None:
        self.run, self.size = run, batch * run.world_size
        self.model = mlp()
        self.optimizer = adamw(self.model, fused)
        run.prepare(self.model, self.optimizer)
        self.batches = iter(run.batches(lambda rows: torch.zeros(len(rows), 1), global_batch=self.size))

    def step(self, batch: list[Tensor]) -> None:
        next(self.batches)
        self.run.forward_backward(loss_fn, self.model, batch)
        self.run.step(self.optimizer)


class OneProcess:
    def __init__(self, fused: bool) -> None:
        self.model = mlp()
        self.optimizer = adamw(self.model, fused)

    def step(self, batch: list[Tensor]) -> None:
        torch.set_num_threads(2)
        step_by_hand(self.model, self.optimizer, batch)
        torch.set_num_threads(1)


def a_batch(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        torch.randn(size, WIDTHS[0], generator=generator),
        torch.randint(CLASSES, (size,), generator=generator),
    ]


def speed(batch: int, fused: bool, rounds: int) -> dict[str, Any]:
    run = paceline.start(strategy="shared", device="cpu", progress="off")
    torch.set_num_threads(1)
    own, whole = a_batch(batch), a_batch(batch * run.world_size)
    first, second, ours = ByHand(fused), ByHand(fused), Ours(run, fused, batch)
    alone = OneProcess(fused) if run.main else None
    sides: dict[str, Callable[[], None]] = {
        "ddp": lambda: first.step(own),
        "ddp again": lambda: second.step(own),
        "shared": lambda: ours.step(own),
        "one process": lambda: None if alone is None else alone.step(whole),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    for number in range(rounds + 3):
        for side in draw.sample(list(sides), len(sides)):
            dist.barrier()
            began = time.perf_counter()
            sides[side]()
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 3:  # the first rounds warm up
                times[side].append(float(taken))
    return {
        "ms": {side: round(statistics.median(values) * 1e3, 1) for side, values in times.items()},
        "rounds": rounds,
        "examples/s, ddp again / ddp": of(times, "ddp", "ddp again"),
        "examples/s, shared / ddp": of(times, "ddp", "shared"),
        "examples/s, shared / one process": of(times, "one process", "shared"),
    }


def of(times: dict[str, list[float]], one: str, other: str) -> Any:
    """[median, 5th, 95th percentile] of the ratio within a round."""
    return spread([a / b for a, b in zip(times[one], times[other], strict=True)])


def pss() -> float:
    """MB (2**20 bytes) of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no Pss in /proc/self/smaps_rollup")


def memory(way: str, fused: bool) -> dict[str, Any]:
    run = paceline.start(strategy="shared" if way == "shared" else None, device="cpu", progress="off")
    torch.set_num_threads(1)
    batch = a_batch(8)
    loss_fn(nn.Linear(WIDTHS[0], CLASSES), batch).backward()  # make torch load its libraries
    dist.barrier()
    before = pss()
    side = Ours(run, fused, 8) if way == "shared" else ByHand(fused)
    for _ in range(2):
        side.step(batch)
    most, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(6):
        side.step(batch)
    ended.set()
    watcher.join()
    everyone: list[Any] = [None] * run.world_size
    dist.all_gather_object(everyone, (before, most[0]))
    return {"before, MB": [round(a) for a, _ in everyone], "peak, MB": [round(b) for _, b in everyone]}


def host(options: argparse.Namespace) -> None:
    """Start the parts in sequence."""
    found: dict[str, Any] = {}
    load = os.getloadavg()[1]
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"

        def run(*arguments: str) -> Any:
            command = [
                sys.executable,
                "-m",
                "paceline",
                "run",
                "--nproc",
                "2",
                __file__,
                *arguments,
                "--json",
                str(part),
            ]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
            return json.loads(part.read_text())

        for fused in (False, True):
            name = "AdamW, fused" if fused else "AdamW"
            flag = ["--fused"] if fused else []
            found[name] = {"memory": {way: run("--memory", way, *flag) for way in ("ddp", "shared")}}
            for way in ("peak, MB", "peak above before, MB"):
                found[name]["memory"][f"shared / ddp, {way}"] = share(found[name]["memory"], way)
            for batch in BATCHES:
                found[name][f"batch {batch}"] = run("--batch", str(batch), "--rounds", str(options.rounds), *flag)
                print(name, batch, json.dumps(found[name][f"batch {batch}"]), flush=True)
            print(json.dumps(found[name]["memory"]), flush=True)
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/shared_strategy.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            # of the five minutes before; above 0, other programs ran beside it
            "load average before it": round(load, 1),
        }
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


def share(memory: dict[str, Any], what: str) -> float:
    def of(way: str) -> float:
        its = memory[way]
        above = zip(its["peak, MB"], its["before, MB"], strict=True)
        return sum(its["peak, MB"]) if what == "peak, MB" else sum(peak - before for peak, before in above)

    return round(of("shared") / of("ddp"), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fused", action="store_true", help="of a part: AdamW(fused=True)")
    parser.add_argument("--memory", help="of a part: of which way the memory is measured")
    parser.add_argument("--batch", type=int, help="of a part: examples per process")
    options = parser.parse_args()
    if options.batch is None and options.memory is None:
        host(options)
        return
    if options.memory:
        found = memory(options.memory, options.fused)
    else:
        found = speed(options.batch, options.fused, options.rounds)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
