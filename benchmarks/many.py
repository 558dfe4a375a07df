"""ddp on more than two processes of one machine, compared with hand-written DDP over gloo, in one run.

    OMP_NUM_THREADS=2 paceline run --nproc 8 benchmarks/many.py [--seconds 20] [--only gpt] [--cpu-time] [--json FILE]

For each of three models all variants start with the same weights: A and A' in hand-written DDP, and ddp with the
reducers `default`, `native` and `shared_memory`. In each round every variant runs a block of steps, in a new random
order (the same on all ranks), with a barrier before each block. Batches are already in memory, so no data loading is
timed; Paceline's steps include the loader's yield, as in a script. Reported: the median seconds of a step on rank 0, of
its backward (with forward and all-reduce) and of its update; the ratio to A and A' with its 95% interval; A' / A as the
control.

`--cpu-time` counts CPU seconds of rank 0's threads instead of wall time. With fewer cores than processes only CPU time
is meaningful. It does not include waits, and so shows no overlap.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import interval
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.config import parse_strategy
from paceline.run import Run

Batch = list[Tensor]
Clock = Callable[[], float]
STEPS = 3  # of a block
REDUCERS = ("default", "native", "shared_memory")


@dataclass(frozen=True)
class Load:
    """A model, and the batch of one rank."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Batch]


class Gpt(nn.Module):
    """Four layers of a causal transformer: (batch, 128) -> (batch, 128, 5000). 10.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 384)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(384, 5000)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(128))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(ids), mask=self.mask, is_causal=True))
        return logits


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


LOADS = {
    "convolutions": Load(
        convolutions,
        lambda g: [torch.randn(32, 3, 32, 32, generator=g), torch.randint(10, (32,), generator=g)],
    ),
    "gpt": Load(Gpt, lambda g: [torch.randint(5000, (8, 128), generator=g) for _ in range(2)]),
    "perceptron": Load(
        lambda: nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)),
        lambda g: [torch.randn(32, 2048, generator=g), torch.randint(10, (32,), generator=g)],
    ),
}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


class ByHand:
    def __init__(self, load: Load) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(load.make())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def ready(self) -> None:
        pass

    def backward(self, batch: Batch) -> None:
        loss_fn(self.model, batch).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class UnderPaceline:
    def __init__(self, run: Run, load: Load, examples: int) -> None:
        torch.manual_seed(0)
        self.run, self.model = run, load.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        run.prepare(self.model, self.optimizer)
        size = run.world.size * examples
        self.loader = run.loader(TensorDataset(torch.zeros(4 * size, 1)), global_batch=size)
        self.batches: Any = iter(())

    def ready(self) -> None:
        if next(self.batches, None) is None:
            self.batches = iter(self.loader)
            next(self.batches)

    def backward(self, batch: Batch) -> None:
        self.run.forward_backward(loss_fn, self.model, batch)

    def update(self) -> None:
        self.run.step(self.optimizer)


def measure(load: Load, seconds: float, clock: Clock) -> dict[str, Any]:
    run = paceline.start(strategy="ddp:reducer=native", progress="off")
    batch = load.inputs(torch.Generator().manual_seed(run.world.rank))
    runs = {name: Run(run.world, replace(run.settings, strategy=parse_strategy(f"ddp:reducer={name}")), run.device)
            for name in REDUCERS}  # fmt: skip
    sides: dict[str, Any] = {"A": ByHand(load), "A'": ByHand(load)}
    sides |= {name: UnderPaceline(of, load, len(batch[0])) for name, of in runs.items()}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    draw, start = random.Random(0), time.perf_counter()
    for rounds in range(10**6):
        going = torch.tensor(float(rounds < 4 or time.perf_counter() - start < seconds))
        dist.broadcast(going, 0)
        if not going:
            break
        for name in draw.sample(list(sides), len(sides)):
            times[name].append(block(sides[name], batch, clock))
    weights = {name: torch.cat([p.detach().flatten() for p in side.model.parameters()]) for name, side in sides.items()}
    apart = {name: float((weights[name] - weights["A"]).norm() / weights["A"].norm()) for name in sides}
    for of in runs.values():
        of.close()
    run.close()
    return summary(times) | {"weights from A's": apart}


def block(side: Any, batch: Batch, clock: Clock) -> tuple[float, float, float]:
    """Seconds a step: whole, of the backward, of the update."""
    dist.barrier()
    whole = backward = 0.0
    for _ in range(STEPS):
        began = clock()
        side.ready()
        opened = clock()
        side.backward(batch)
        computed = clock()
        side.update()
        whole += clock() - began
        backward += computed - opened
    return whole / STEPS, backward / STEPS, (whole - backward) / STEPS


def summary(times: dict[str, list[tuple[float, float, float]]]) -> dict[str, Any]:
    kept = {name: torch.tensor(values[1:], dtype=torch.float64) for name, values in times.items()}  # the first warms up
    by_hand = torch.stack([kept["A"][:, 0], kept["A'"][:, 0]], 1)
    found: dict[str, Any] = {"rounds": len(kept["A"])}
    for name, values in kept.items():
        whole, backward, rest = (1e3 * values.median(0).values).tolist()
        ratio = interval(torch.stack([values[:, 0]] * 2, 1), by_hand, block=1)
        found[name] = {
            "step, ms": whole,
            "backward, ms": backward,
            "yield and update, ms": rest,
            "step / by hand": ratio,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model")
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--cpu-time", action="store_true", help="seconds of computing, in place of the clock's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    found = {name: measure(LOADS[name], args.seconds, clock) for name in args.only}
    if int(os.environ.get("RANK", "0")) != 0:
        return
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = {
        "command": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} paceline run --nproc "
        f"{os.environ.get('WORLD_SIZE', '1')} benchmarks/many.py {shlex.join(sys.argv[1:])}".strip(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": next((line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "threads of a process": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps({"about": about, "models": found}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
