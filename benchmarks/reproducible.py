"""The cost of `reproducible=n` for a step of ddp on n processes, in one run.

    paceline run --nproc 2 benchmarks/reproducible.py [--seconds 60] [--json FILE]

Models, step and figures as in overhead.py, with one more model that has large gradients. D and D' are ordinary ddp, R
and R' are ddp with `reproducible=n`. Each round has one step of each, in a new random order, the same on all ranks.
Before each step, outside of the timed code, deterministic kernels are switched on or off as its run needs. All four
compute with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from overhead import BATCH, UnderPaceline, interval, models
from torch import nn

import paceline
from paceline.run import Run


def wide() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


MODELS = {**models(), "wide (5 linear layers, 4 million)": (wide, (1024,))}


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float) -> dict[str, object]:
    run = paceline.start(strategy="ddp:reducer=native", progress="off")
    world = run.world
    settings = replace(run.settings, reproducible=world.size, strategy=None)
    runs = {"D": run, "D'": Run(world, run.settings, run.device)}
    runs |= {side: Run(world, settings, run.device) for side in ("R", "R'")}
    sides = {side: UnderPaceline(own, make) for side, own in runs.items()}
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[world.local_rank % len(cores)]})  # this thread; gloo's own stay free
    generator = torch.Generator().manual_seed(world.rank)
    batch = [torch.randn(BATCH, *shape, generator=generator), torch.randint(10, (BATCH,), generator=generator)]
    times: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    start, rounds = time.perf_counter(), 0
    while rounds % 50 or run.sum(time.perf_counter() - start) / world.size < seconds:
        for own in sides.values():
            own.ready()
        for side in draw.sample(list(sides), len(sides)):
            torch.use_deterministic_algorithms(side.startswith("R"))
            begin = time.perf_counter()
            sides[side].step(batch)
            times[side].append(time.perf_counter() - begin)
        rounds += 1
    difference = apart(sides["D"].model, sides["R"].model)
    for own in reversed(runs.values()):
        own.close()
    return {"rounds": rounds, **summary(times), "largest_weight_difference": difference}


def apart(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    kept = {side: torch.tensor(values[len(values) // 20 :]) for side, values in times.items()}  # the first 5% warm up
    ordinary, ours = (torch.stack([kept[side], kept[side + "'"]], dim=1) for side in ("D", "R"))
    return {
        "median_us": {side: 1e6 * float(values.median()) for side, values in kept.items()},
        "reproducible/ddp": interval(ours, ordinary),
        "D'/D": interval(kept["D'"], kept["D"]),
        "R'/R": interval(kept["R'"], kept["R"]),
    }


def report(name: str, result: dict) -> None:
    medians = ", ".join(f"{side} {value:.0f} us" for side, value in result["median_us"].items())
    print(f"{name}: {result['rounds']} rounds; medians {medians}")
    for ratio in ("reproducible/ddp", "D'/D", "R'/R"):
        value, low, high = result[ratio]
        print(f"  {ratio:16} {value:.3f}  [{low:.3f}, {high:.3f}]")
    print(f"  largest difference of a weight {result['largest_weight_difference']:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    results = {}
    for name, (make, shape) in MODELS.items():
        results[name] = result = measure(make, shape, args.seconds)
        if local == 0:
            report(name, result)
            print(f"  load of the machine, over the last minute: {os.getloadavg()[0]:.1f}", flush=True)
    if local == 0 and args.json:
        args.json.write_text(json.dumps({"torch": str(torch.__version__), "results": results}, indent=1))


if __name__ == "__main__":
    main()
