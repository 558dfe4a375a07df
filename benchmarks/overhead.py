"""What Paceline adds to a step: beside the same step in hand-written DDP, in one run.

    paceline run --nproc 2 benchmarks/overhead.py [--seconds 60] [--json FILE]

For each of three models there are three training states that start alike: A and A' in hand-written DDP, P under
Paceline's ddp. Rounds of one step each, in an order drawn anew every round (the same on all ranks), so that drift and
neighbours hit all three alike. A step is: forward, loss, backward with all-reduce, optimizer step, gradients cleared;
the batch is there. A rank is pinned to a core. Reported: medians; the ratio P / A with its 95% interval, from a
bootstrap over blocks of 20 rounds of the ratio of medians; and A' / A beside it, which shows what the method can
resolve.

Collectives and bytes of one step are counted by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline

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


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class ByHand:
    """The step as one writes it with torch.nn.parallel.DistributedDataParallel."""

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
    """The same under Paceline. The loader's yield, which opens a step, is not timed: batches come ready-made to
    both."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...], name: str) -> None:
        self.run = paceline.start(strategy="ddp")
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.run.prepare(self.model, self.optimizer)
        size = self.run.world.size * BATCH
        data = TensorDataset(torch.zeros(size, 1))
        self.loader = self.run.loader(data, global_batch=size, name=name)
        self.batches = iter(())

    def ready(self) -> None:
        if next(self.batches, None) is None:
            self.batches = iter(self.loader)
            next(self.batches)

    def step(self, batch: list[Tensor]) -> None:
        self.run.forward_backward(loss_fn, self.model, batch)
        self.run.step(self.optimizer)


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float, name: str) -> dict[str, object]:
    ours = UnderPaceline(make, shape, name)
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[ours.run.world.local_rank % len(cores)]})  # this thread; gloo's own stay free
    run, world = ours.run, ours.run.world
    first, second = ByHand(make), ByHand(make)
    generator = torch.Generator().manual_seed(world.rank)
    batch = [
        torch.randn(BATCH, *shape, generator=generator),
        torch.randint(10, (BATCH,), generator=generator),
    ]
    sides = {"A": first.step, "A'": second.step, "P": ours.step}
    times: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    start, rounds = time.perf_counter(), 0
    while True:
        if rounds % 50 == 0 and run.sum(time.perf_counter() - start) / world.size > seconds:
            break
        ours.ready()
        for side in draw.sample(list(sides), 3):
            begin = time.perf_counter()
            sides[side](batch)
            times[side].append(time.perf_counter() - begin)
        rounds += 1
    counts = {side: collectives(sides[side], batch, ours) for side in sides}
    kept = {side: values[rounds // 20 :] for side, values in times.items()}  # the first 5% warm up
    difference = max(
        float((a - b).abs().max()) for a, b in zip(first.model.parameters(), ours.model.parameters(), strict=True)
    )
    run.close()
    return {
        "rounds": rounds,
        "median_us": {side: 1e6 * median(values) for side, values in kept.items()},
        "P/A": interval(kept["P"], kept["A"]),
        "A'/A": interval(kept["A'"], kept["A"]),
        "added_us": 1e6 * (median(kept["P"]) - median(kept["A"])),
        "collectives": counts,
        "largest_weight_difference": difference,
    }


def collectives(step: Callable[[list[Tensor]], None], batch: list[Tensor], ours: UnderPaceline) -> list[int]:
    """[collectives, bytes] of one step."""
    ours.ready()
    with torch.profiler.profile(record_shapes=True) as profile:
        step(batch)
    found = [event for event in profile.events() if event.name.startswith(("gloo:", "nccl:"))]
    size = sum(4 * torch.Size(shape).numel() for event in found for shape in event.input_shapes if shape)
    return [len(found), size]


def median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())


def interval(top: list[float], bottom: list[float], draws: int = 2000) -> list[float]:
    """[ratio of medians, lower and upper end of its 95% interval]: bootstrap over blocks of rounds."""
    blocks = len(top) // BLOCK
    pair = torch.tensor([top[: blocks * BLOCK], bottom[: blocks * BLOCK]], dtype=torch.float64).view(2, blocks, BLOCK)
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(draws):
        chosen = pair[:, torch.randint(blocks, (blocks,), generator=generator)].reshape(2, -1)
        a, b = chosen.median(dim=1).values.tolist()
        ratios.append(a / b)
    low, high = torch.tensor(ratios, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [median(top) / median(bottom), float(low), float(high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    results = {}
    for name, (make, shape) in models().items():
        results[name] = result = measure(make, shape, args.seconds, name)
        if local == 0:
            report(name, result)
    if local == 0 and args.json:
        hardware = f"{len(cores)} cores, {platform.processor() or platform.machine()}, torch {torch.__version__}"
        args.json.write_text(json.dumps({"hardware": hardware, "results": results}, indent=1))


def report(name: str, result: dict) -> None:
    times = ", ".join(f"{side} {value:.0f} us" for side, value in result["median_us"].items())
    print(f"{name}: {result['rounds']} rounds; medians {times}")
    for ratio in ("P/A", "A'/A"):
        value, low, high = result[ratio]
        print(f"  {ratio:5} {value:.3f}  [{low:.3f}, {high:.3f}]")
    print(f"  added {result['added_us']:.0f} us; [collectives, bytes] {result['collectives']}", flush=True)


if __name__ == "__main__":
    main()
