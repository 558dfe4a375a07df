"""The overhead of Paceline per step, compared with the same step in hand-written DDP, in one run.

    paceline run --nproc 2 benchmarks/overhead.py [--seconds 60] [--only nothing] [--peers] [--loader] [--json FILE]

For each of four models there are four trainings with the same initial state: A and A' in hand-written DDP, P and P'
under Paceline's ddp. Each round has one step of each, in a new random order (the same on all ranks), so that drift and
other programs affect all four alike. Each side runs twice because the second run of the same code in a round has warm
caches: with only A, A' and P, that would favour A. A step is: forward, loss, backward with all-reduce, optimizer step,
clearing of gradients. Batches are already in memory. Each rank is pinned to a core. Reported: medians; the ratio of P
and P' to A and A' with its 95% interval, from a bootstrap over blocks of 20 rounds; and A' / A and P' / P, which show
the resolution of the method.

`--peers` adds a training under Accelerate (C) and one under Lightning Fabric (F) to each round, each set up as its
documentation shows for this number of processes. `--loader` counts the next batch too: by hand and with the others from
a DataLoader, under Paceline from run.loader, all over the same tensors, shuffled. With one process, the step by hand
has no DistributedDataParallel.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.run import Run

BATCH = 32  # examples per process
BLOCK = 20
EXAMPLES = 32 * 64
"""Of a rank, if loaders are timed."""
PEERS = {"C": "Accelerate", "F": "Fabric"}


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


class Batches:
    """Endless batches of a DataLoader, or one ready batch."""

    def __init__(self, ready: list[Tensor], loader: Iterable[list[Tensor]] | None) -> None:
        self._ready, self._loader = ready, loader
        self._batches: Iterator[list[Tensor]] = iter(())

    def next(self) -> list[Tensor]:
        if self._loader is None:
            return self._ready
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch


class Given(NamedTuple):
    """What all sides train."""

    make: Callable[[], nn.Module]
    ready: list[Tensor]
    examples: TensorDataset  # of all ranks
    with_loader: bool
    size: int  # the number of processes

    def model(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.make()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loader(self) -> DataLoader[list[Tensor]]:
        """The loader that a script for one device has."""
        return DataLoader(self.examples, batch_size=BATCH, shuffle=True)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class ByHand:
    """A hand-written step, with torch.nn.parallel.DistributedDataParallel on several processes."""

    def __init__(self, given: Given) -> None:
        self.model, self.optimizer = given.model()
        loader: DataLoader[list[Tensor]] | None = given.loader() if given.with_loader else None
        if given.size > 1:
            self.model = DistributedDataParallel(self.model)
            if loader is not None:
                loader = DataLoader(given.examples, batch_size=BATCH, sampler=DistributedSampler(given.examples))
        self.batches = Batches(given.ready, loader)

    def step(self) -> None:
        loss = loss_fn(self.model, self.batches.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderAccelerate:
    def __init__(self, given: Given) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        assert self.accelerator.num_processes == given.size
        model, optimizer = given.model()
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, given.loader())
        self.batches = Batches(given.ready, loader if given.with_loader else None)

    def step(self) -> None:
        loss = loss_fn(self.model, self.batches.next())
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderFabric:
    def __init__(self, given: Given) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        several: dict[str, Any] = {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]} if given.size > 1 else {}
        self.fabric = Fabric(accelerator="cpu", devices=given.size, **several)
        self.fabric.launch()
        assert self.fabric.world_size == given.size
        self.model, self.optimizer = self.fabric.setup(*given.model())
        self.batches = Batches(
            given.ready, self.fabric.setup_dataloaders(given.loader()) if given.with_loader else None
        )

    def step(self) -> None:
        loss = loss_fn(self.model, self.batches.next())
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderPaceline:
    """The same under Paceline. Without `with_loader`, the yield that begins a step is made before the clock starts."""

    def __init__(self, given: Given, run: Run) -> None:
        self.run, self.given = run, given
        self.model, self.optimizer = given.model()
        self.run.prepare(self.model, self.optimizer)
        size = given.size * BATCH
        data = given.examples if given.with_loader else TensorDataset(torch.zeros(size, 1))
        self.loader = self.run.loader(data, global_batch=size, shuffle=given.with_loader)
        self.batches = Batches([], self.loader)

    def ready(self) -> None:
        if not self.given.with_loader:
            self.batches.next()

    def step(self) -> None:
        batch = self.batches.next() if self.given.with_loader else self.given.ready
        self.run.forward_backward(loss_fn, self.model, batch)
        self.run.step(self.optimizer)


def measure(
    make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float, *, peers: bool, loader: bool
) -> dict[str, object]:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    run = paceline.start(strategy="ddp:reducer=native" if several else "single", progress="off")
    world = run.world
    another = Run(world, run.settings, run.device)
    generator = torch.Generator().manual_seed(world.rank)
    ready = [torch.randn(BATCH, *shape, generator=generator), torch.randint(10, (BATCH,), generator=generator)]
    generator.manual_seed(0)
    count = EXAMPLES * world.size
    examples = torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)
    given = Given(make, ready, TensorDataset(*examples), loader, world.size)
    ours = UnderPaceline(given, run), UnderPaceline(given, another)
    sides: dict[str, Any] = {"A": ByHand(given), "A'": ByHand(given), "P": ours[0], "P'": ours[1]}
    if peers:
        sides |= {"C": UnderAccelerate(given), "F": UnderFabric(given)}
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[world.local_rank % len(cores)]})  # this thread; gloo's own stay free
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
            sides[side].step()
            times[side].append(time.perf_counter() - begin)
        rounds += 1
    counts = {side: collectives(sides[side].step, ours) for side in ("A", "P")}
    pairs = zip(sides["A"].model.parameters(), ours[0].model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    another.close()
    run.close()
    found = {"rounds": rounds, **summary(times), "collectives": counts}
    return found if loader else found | {"largest_weight_difference": difference}  # with loaders the orders differ


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    kept = {side: torch.tensor(values[len(values) // 20 :]) for side, values in times.items()}  # the first 5% warm up
    by_hand, ours = torch.stack([kept["A"], kept["A'"]], dim=1), torch.stack([kept["P"], kept["P'"]], dim=1)
    return {
        "median_us": {side: 1e6 * float(values.median()) for side, values in kept.items()},
        "added_us": 1e6 * float(ours.median() - by_hand.median()),
        "ours/by hand": interval(ours, by_hand),
        "A'/A": interval(kept["A'"], kept["A"]),
        "P'/P": interval(kept["P'"], kept["P"]),
        **{
            f"{name}/by hand": interval(kept[side], by_hand.median(dim=1).values)
            for side, name in PEERS.items()
            if side in kept
        },
    }


def collectives(step: Callable[[], None], ours: Sequence[UnderPaceline]) -> list[int]:
    """[collectives, bytes] of one step."""
    for own in ours:
        own.ready()
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
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
    parser.add_argument("--peers", action="store_true", help="measure Accelerate and Lightning Fabric too")
    parser.add_argument("--loader", action="store_true", help="time the next batch too")
    parser.add_argument("--json", type=Path, help="write what was found here")
    args = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    results = {}
    for name, (make, shape) in [*models().items(), (MANY, (lambda: Many(5000), (10,)))]:
        if args.only and name.split()[0] not in args.only:
            continue
        results[name] = result = measure(make, shape, args.seconds, peers=args.peers, loader=args.loader)
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
    for ratio in ("ours/by hand", "A'/A", "P'/P", *(f"{name}/by hand" for name in PEERS.values())):
        if ratio not in result:
            continue
        value, low, high = result[ratio]
        print(f"  {ratio:18} {value:.3f}  [{low:.3f}, {high:.3f}]")
    print(f"  added {result['added_us']:.0f} us; [collectives, bytes] {result['collectives']}", flush=True)


if __name__ == "__main__":
    main()
