"""The overhead of Paceline per step, compared with the same step in hand-written DDP, in one run.

    paceline run --nproc 2 benchmarks/overhead.py [--seconds 60] [--only nothing] [--json FILE]

For each of four models there are four trainings with the same initial state: A and A' in hand-written DDP, P and P'
under Paceline's ddp. Each round has one step of each, in a new random order (the same on all ranks), so that drift and
other programs affect all four alike. Each side runs twice because the second run of the same code in a round has warm
caches: with only A, A' and P, that would favour A. A step is: forward, loss, backward with all-reduce, optimizer step,
clearing of gradients. Batches are already in memory. Each rank is pinned to a core. Reported: medians; the ratio of P
and P' to A and A' with its 95% interval, from a bootstrap over blocks of 20 rounds; and A' / A and P' / P, which show
the resolution of the method.

torch's profiler counts collectives and bytes of one step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.run import Run

BATCH = 32  # examples per process
BLOCK = 20


def models() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))

    def large() -> nn.Module:
        layers: list[nn.Module] = []
        for i, o in ((3, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))

    return {
        "nothing (1 linear layer, 20 parameters)": (lambda: nn.Linear(1, 10), (1,)),
        "small (3 linear layers, 16 thousand)": (small, (64,)),
        "large (3 convolutions on 16x16, 19 thousand)": (large, (3, 16, 16)),
    }


MANY = "many (5,000 parameters of 10 numbers)"


class Many(nn.Module):
    """A model with many parameters, to show costs per parameter: (batch, 10) -> (batch, 10)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(10) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.rows)).mean(0)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class ByHand:
    """A hand-written step with torch.nn.parallel.DistributedDataParallel."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(make())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, batch: list[Tensor]) -> None:
        loss = loss_fn(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderPaceline:
    """The same under Paceline. The loader's yield, which begins a step, is not timed: both sides get ready batches."""

    def __init__(self, run: Run, make: Callable[[], nn.Module]) -> None:
        self.run = run
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.run.prepare(self.model, self.optimizer)
        size = self.run.world.size * BATCH
        data = TensorDataset(torch.zeros(size, 1))
        self.loader = self.run.loader(data, global_batch=size)
        self.batches = iter(())

    def ready(self) -> None:
        if next(self.batches, None) is None:
            self.batches = iter(self.loader)
            next(self.batches)

    def step(self, batch: list[Tensor]) -> None:
        self.run.forward_backward(loss_fn, self.model, batch)
        self.run.step(self.optimizer)


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float) -> dict[str, object]:
    run = paceline.start(strategy="ddp:reducer=native", progress="off")
    world = run.world
    another = Run(world, run.settings, run.device)
    first, second = ByHand(make), ByHand(make)
    ours = UnderPaceline(run, make), UnderPaceline(another, make)
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[world.local_rank % len(cores)]})  # this thread; gloo's own stay free
    generator = torch.Generator().manual_seed(world.rank)
    batch = [
        torch.randn(BATCH, *shape, generator=generator),
        torch.randint(10, (BATCH,), generator=generator),
    ]
    sides = {"A": first.step, "A'": second.step, "P": ours[0].step, "P'": ours[1].step}
    times: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    start, rounds = time.perf_counter(), 0
    while True:
        if rounds % 50 == 0 and run.sum(time.perf_counter() - start) / world.size > seconds:
            break
        for own in ours:
            own.ready()
        for side in draw.sample(list(sides), len(sides)):
            begin = time.perf_counter()
            sides[side](batch)
            times[side].append(time.perf_counter() - begin)
        rounds += 1
    counts = {side: collectives(sides[side], batch, ours) for side in ("A", "P")}
    pairs = zip(first.model.parameters(), ours[0].model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    another.close()
    run.close()
    return {"rounds": rounds, **summary(times), "collectives": counts, "largest_weight_difference": difference}


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    kept = {side: torch.tensor(values[len(values) // 20 :]) for side, values in times.items()}  # the first 5% warm up
    by_hand, ours = torch.stack([kept["A"], kept["A'"]], dim=1), torch.stack([kept["P"], kept["P'"]], dim=1)
    return {
        "median_us": {side: 1e6 * float(values.median()) for side, values in kept.items()},
        "added_us": 1e6 * float(ours.median() - by_hand.median()),
        "ours/by hand": interval(ours, by_hand),
        "A'/A": interval(kept["A'"], kept["A"]),
        "P'/P": interval(kept["P'"], kept["P"]),
    }


def collectives(step: Callable[[list[Tensor]], None], batch: list[Tensor], ours: Sequence[UnderPaceline]) -> list[int]:
    """[collectives, bytes] of one step."""
    for own in ours:
        own.ready()
    with torch.profiler.profile(record_shapes=True) as profile:
        step(batch)
    found = [event for event in profile.events() if event.name.startswith(("gloo:", "nccl:"))]
    size = sum(4 * torch.Size(shape).numel() for event in found for shape in event.input_shapes if shape)
    return [len(found), size]


def interval(top: Tensor, bottom: Tensor, draws: int = 2000, block: int = BLOCK) -> list[float]:
    """[ratio of medians, lower and upper end of its 95% interval]: bootstrap over blocks of rounds (dimension 0)."""
    blocks = len(top) // block
    pair = torch.stack([top[: blocks * block].reshape(blocks, -1), bottom[: blocks * block].reshape(blocks, -1)])
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(draws):
        chosen = pair[:, torch.randint(blocks, (blocks,), generator=generator)].flatten(1)
        a, b = chosen.median(dim=1).values.tolist()
        ratios.append(a / b)
    low, high = torch.tensor(ratios, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [float(top.median() / bottom.median()), float(low), float(high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--only", nargs="+", help="the first words of models; all, if not given")
    parser.add_argument("--json", type=Path, help="write what was found here")
    args = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    results = {}
    for name, (make, shape) in [*models().items(), (MANY, (lambda: Many(5000), (10,)))]:
        if args.only and name.split()[0] not in args.only:
            continue
        results[name] = result = measure(make, shape, args.seconds)
        if local == 0:
            report(name, result)
    if local == 0 and args.json:
        from collate_draws import machine  # beside this file; make gpu imports it as a part of a package

        words = ["paceline", "run", "--nproc", os.environ["WORLD_SIZE"], "benchmarks/overhead.py", *sys.argv[1:]]
        about = {
            "command": shlex.join(words),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        args.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


def report(name: str, result: dict) -> None:
    times = ", ".join(f"{side} {value:.0f} us" for side, value in result["median_us"].items())
    print(f"{name}: {result['rounds']} rounds; medians {times}")
    for ratio in ("ours/by hand", "A'/A", "P'/P"):
        value, low, high = result[ratio]
        print(f"  {ratio:12} {value:.3f}  [{low:.3f}, {high:.3f}]")
    print(f"  added {result['added_us']:.0f} us; [collectives, bytes] {result['collectives']}", flush=True)


if __name__ == "__main__":
    main()
