"""A step of ddp over slow links, in the laboratory (lab.py): stock DDP and lossless reducers. Needs root.

    python benchmarks/slow_links.py --json benchmarks/results/slow_links.json              # forty minutes
    python benchmarks/slow_links.py --overlap --json benchmarks/results/overlap.json       # ten minutes

Steps. A multilayer perceptron of 4 MB and a small batch, so that communication dominates a step. `stock` is
hand-written torch.nn.parallel.DistributedDataParallel, and `again` a second one (an A/A control). Each round has three
steps of each variant, in a new random order, and times the last two. Shown are medians, and the median of the ratios to
stock within a round with its 5th and 95th percentile.

Overlap. The layers sleep in their backward for the time that the sum of all gradients takes: the hardest case. Shown is
the time of a step, divided by the longer of compute alone and communication alone, for stock and for small buckets.

Settings that are already in the file are not measured again: an interrupted benchmark resumes. Times are rank 0's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collate_draws import machine
from data_path import spread
from lab import Link, lab
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.config import parse_strategy
from paceline.run import Run

RATES = (None, 1000.0, 100.0, 20.0)
DELAYS = (0.5, 10.0, 40.0)
PLACES = [
    *((2, 1, Link(rate, delay)) for rate in RATES for delay in DELAYS),
    (1, 2, Link()),  # both on one host
    *((2, 2, Link(rate, 0.5)) for rate in (1000.0, 100.0)),
    *((4, 1, Link(rate, 10.0)) for rate in (1000.0, 100.0)),
]
"""Hosts, processes on each, and the link."""

FIXED = ("native", "direct", "ring", "hierarchical", "direct,bucket_mb=1", "native,bucket_mb=1")
OVERLAP = ((None, 32), (1000.0, 16), (300.0, 8), (100.0, 4), (20.0, 1))
"""Bandwidth, and MB of gradients."""
BUCKETS = 16  # of these, for `small`

MARK = "FOUND "


class Sleeping(torch.autograd.Function):
    """A layer with a backward that sleeps for a given time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(weight), None


class Layers(nn.Module):
    def __init__(self, count: int, mb: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(int(mb * 2**20 / 4 / count)) for _ in range(count))
        self.seconds = 0.0  # of the whole backward

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Sleeping.apply(x, weight, self.seconds / len(self.weights))
        return x.sum()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(362, 362) for _ in range(8)))


def stock(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        loss_of(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(run: Run, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.prepare(model, optimizer)
    batches = iter(run.batches(lambda rows: torch.zeros(len(rows), 1), global_batch=run.world_size))

    def step() -> None:
        run.forward_backward(lambda model, _: loss_of(model), model, next(batches))
        run.step(optimizer)

    return step


@contextlib.contextmanager
def under(first: Run, reducer: str, said: io.StringIO) -> Iterator[Run]:
    spec = parse_strategy(f"ddp:reducer={reducer}")
    with contextlib.redirect_stderr(said):
        run = Run(first.world, dataclasses.replace(first.settings, strategy=spec), first.device)
        yield run
        run.close()


def timed(step: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def steps_job(seconds: float) -> dict[str, Any]:
    first = paceline.start(device="cpu", progress="off", strategy="ddp:reducer=native")
    torch.set_num_threads(1)
    batch = torch.randn(8, 362, generator=torch.Generator().manual_seed(first.rank))

    def loss_of(model: nn.Module) -> Tensor:
        return model(batch).square().mean()

    said = io.StringIO()
    fixed = [*FIXED, "shared_memory"] if first.world.nodes == 1 else list(FIXED)
    with contextlib.ExitStack() as opened, contextlib.redirect_stderr(said):
        ways = {"stock": stock(perceptron(), loss_of), "again": stock(perceptron(), loss_of)}
        for reducer in fixed:
            ways[reducer] = ours(opened.enter_context(under(first, reducer, said)), perceptron(), loss_of)
        for step in ways.values():
            timed(step, 3)  # let TCP connections reach their rate
        times: dict[str, list[float]] = {way: [] for way in ways}
        draw, began, go = random.Random(0), time.perf_counter(), torch.ones(1)
        while go.item():
            for way in draw.sample(list(ways), len(ways)):
                dist.barrier()
                ways[way]()
                times[way].append(timed(ways[way], 2))
            rounds = len(times["stock"])
            go.fill_(float(rounds < 4 or (rounds < 60 and time.perf_counter() - began < seconds)))
            dist.broadcast(go, 0)
    medians = {way: statistics.median(found) for way, found in times.items()}
    ratios = {
        way: spread([one / other for one, other in zip(found, times["stock"], strict=True)])
        for way, found in times.items()
        if way != "stock"
    }
    best = min((medians[way], way) for way in medians if way not in ("again", "stock"))[1]
    return {
        "rounds": len(times["stock"]),
        "ms": {way: round(value * 1e3, 2) for way, value in medians.items()},
        "ratio_to_stock": ratios,
        "best": best,
    }


def overlap_job(seconds: float, mb: float) -> dict[str, Any]:
    first = paceline.start(device="cpu", progress="off", strategy="ddp:reducer=native")
    torch.set_num_threads(1)
    x = torch.zeros(1, requires_grad=True)

    def loss_of(model: nn.Module) -> Tensor:
        return model(x)

    def agreed(value: float) -> float:
        return float(first.broadcast(value))

    found: dict[str, Any] = {"mb": mb}
    probe = Layers(48, mb)
    alone = stock(probe, loss_of)
    timed(alone, 2)
    sleep = agreed(statistics.median(timed(alone, 1) for _ in range(5)))  # the sum of all gradients, without compute
    found["compute_ms"] = round(sleep * 1e3, 2)
    said = io.StringIO()
    with contextlib.ExitStack() as opened:
        models = {"stock": Layers(48, mb), "small": Layers(48, mb)}
        ways: dict[str, Callable[[], None]] = {}
        for way, model in models.items():
            model.seconds = sleep
            if way == "stock":
                ways[way] = stock(model, loss_of)
            else:
                run = opened.enter_context(under(first, f"direct,bucket_mb={mb / BUCKETS}", said))
                ways[way] = ours(run, model, loss_of)
            with contextlib.redirect_stderr(said):
                timed(ways[way], 2)
        both: dict[str, list[float]] = {way: [] for way in ways}
        communication: dict[str, list[float]] = {way: [] for way in ways}
        compute: list[float] = []
        bare, optimizer = Layers(48, mb), torch.optim.SGD
        bare.seconds = sleep
        updates = optimizer(bare.parameters(), lr=1e-6)

        def bare_step() -> None:
            loss_of(bare).backward()
            updates.step()
            updates.zero_grad()

        draw, began, go = random.Random(0), time.perf_counter(), torch.ones(1)
        while go.item():
            compute.append(timed(bare_step, 1))
            for way in draw.sample(list(ways), len(ways)):
                for pause, times in ((sleep, both), (0.0, communication)):
                    models[way].seconds = pause
                    dist.barrier()
                    ways[way]()
                    times[way].append(timed(ways[way], 1))
            go.fill_(float(len(compute) < 4 or (len(compute) < 40 and time.perf_counter() - began < seconds)))
            dist.broadcast(go, 0)
    found["rounds"] = len(compute)
    found["compute_alone_ms"] = round(statistics.median(compute) * 1e3, 2)
    for way in ways:
        floor = max(statistics.median(compute), min(statistics.median(times) for times in communication.values()))
        found[way] = {
            "step_ms": round(statistics.median(both[way]) * 1e3, 2),
            "communication_alone_ms": round(statistics.median(communication[way]) * 1e3, 2),
            "step_over_longer": spread([step / floor for step in both[way]]),
        }
    return found


def measure(hosts: int, nproc: int, link: Link, *words: str) -> dict[str, Any]:
    with lab(hosts, link) as made:
        found: dict[str, Any] = {"link": made.check() if hosts > 1 else None}
        first, *_ = made.run(str(Path(__file__).resolve()), "--job", *words, nproc=nproc, seconds=900.0)
    lines = [line.partition(MARK)[2] for line in first.splitlines() if MARK in line]
    return found | json.loads(lines[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here, after each place")
    parser.add_argument("--overlap", action="store_true", help="how much communication is behind the backward")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds at each place")
    parser.add_argument("--only", help="places whose name contains this")
    parser.add_argument("--load", default="", help="what else ran on the machine, for the file")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)  # what runs on the hosts
    parser.add_argument("--mb", type=float, default=4.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        done = overlap_job(options.seconds, options.mb) if options.overlap else steps_job(options.seconds)
        if dist.get_rank() == 0:
            print(MARK + json.dumps(done), flush=True)
        return
    about: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/slow_links.py", *sys.argv[1:]]),
        "machine": machine(),
        "load": options.load,
        "places": {},
    }
    if options.json and options.json.exists():
        about["places"] = json.loads(options.json.read_text())["places"]
    places = [(2, 1, Link(rate, 0.0), mb) for rate, mb in OVERLAP] if options.overlap else [(*at, 4) for at in PLACES]
    for hosts, nproc, link, mb in places:
        name = f"{hosts} x {nproc}, {link}" if hosts > 1 else f"{nproc} on one host"
        if name in about["places"] or (options.only and options.only not in name):
            continue
        words = ["--seconds", str(options.seconds), *(["--overlap", "--mb", str(mb)] if options.overlap else [])]
        try:
            about["places"][name] = measure(hosts, nproc, link, *words)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{name}: {about['places'][name]}", flush=True)
        about["time"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        if options.json:
            options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
