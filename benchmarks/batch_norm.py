"""The cost of batch norm over the global batch, compared with DDP and torch's batch norm over each shard, in one run.

    paceline run --nproc 2 benchmarks/batch_norm.py [--seconds 60] [--json FILE]

Rounds of one step each, in a new random order every round, as in overhead.py:

    A, A'   hand-written DDP with torch's batch norm over the shard
    F       the same, with two all-reduces per batch norm, in the forward and in the backward, of the number of bytes
            that batch norm over the global batch must exchange: the lower bound with torch.distributed
    S       Paceline's ddp with batch_norm="shard"
    P       Paceline's ddp with batch_norm="global"

Reported: medians; A'/A, F/A, S/A and P/A with 95% intervals from a bootstrap over blocks of rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import ByHand, UnderPaceline, interval
from torch import Tensor, nn

import paceline
from paceline.run import Run

SIDES = ("A", "A'", "F", "S", "P")
BLOCK = 5  # rounds per bootstrap block; small, since a step of ResNet-18 is slow


def digits(width: int = 32) -> nn.Module:
    """The network of examples/digits.py."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.SiLU()]

    body = [*block(1, width), *block(width, 2 * width), nn.AvgPool2d(2), *block(2 * width, 2 * width)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.past = (
            nn.Identity()
            if stride == 1 and channels_in == channels_out
            else nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.past(x)).relu()


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32 images: He et al. 2016, with the first layer for small images (a 3 x 3 convolution)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(before, channels, stride), Residual(channels, channels, 1)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Floor(ByHand):
    """DDP, with the communication of batch norm over the global batch before and after each batch norm."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(self.forwards)
                module.register_full_backward_hook(self.backwards)

    @staticmethod
    def forwards(module: nn.Module, _: Any, __: Any) -> None:
        dist.all_reduce(torch.zeros(dist.get_world_size(), 2 + 2 * module.num_features, dtype=torch.float64))  # type: ignore[operator]

    @staticmethod
    def backwards(module: nn.Module, _: Any, __: Any) -> None:
        dist.all_reduce(torch.zeros(2, module.num_features))  # type: ignore[call-overload]


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], each: int, seconds: float) -> dict[str, Any]:
    run = paceline.start(strategy="ddp:reducer=native", progress="off")
    by_shard = Run(run.world, dataclasses.replace(run.settings, batch_norm="shard"), run.device)
    first, second, floor = ByHand(make), ByHand(make), Floor(make)
    ours = UnderPaceline(by_shard, make), UnderPaceline(run, make)
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[run.world.local_rank % len(cores)]})  # this thread; gloo's own stay free
    generator = torch.Generator().manual_seed(run.world.rank)
    batch = [torch.randn(each, *shape, generator=generator), torch.randint(10, (each,), generator=generator)]
    steps = dict(zip(SIDES, (first.step, second.step, floor.step, ours[0].step, ours[1].step), strict=True))
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    draw = random.Random(0)
    start, rounds = time.perf_counter(), 0
    while True:
        if rounds % 10 == 0 and run.sum(time.perf_counter() - start) / run.world.size > seconds:
            break
        for own in ours:
            own.ready()
        for side in draw.sample(SIDES, len(SIDES)):
            begin = time.perf_counter()
            steps[side](batch)
            times[side].append(time.perf_counter() - begin)
        rounds += 1
    by_shard.close()
    run.close()
    kept = {side: torch.tensor(values[len(values) // 20 :]) for side, values in times.items()}  # the first 5% warm up
    return {
        "rounds": rounds,
        "median_us": {side: 1e6 * float(values.median()) for side, values in kept.items()},
        **{f"{side}/A": interval(kept[side], kept["A"], block=BLOCK) for side in SIDES[1:]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    main_process = os.environ.get("LOCAL_RANK", "0") == "0"
    torch.set_num_threads(1)
    results = {}
    for name, make, shape, each in (
        ("digits, 32 images a process", digits, (1, 8, 8), 32),
        ("ResNet-18, 4 images of 32 x 32 a process", resnet18, (3, 32, 32), 4),
    ):
        results[name] = result = measure(make, shape, each, args.seconds)
        if main_process:
            times = ", ".join(f"{side} {value:.0f} us" for side, value in result["median_us"].items())
            print(f"{name}: {result['rounds']} rounds; medians {times}")
            for side in SIDES[1:]:
                value, low, high = result[f"{side}/A"]
                print(f"  {side}/A".ljust(8) + f"{value:.3f}  [{low:.3f}, {high:.3f}]", flush=True)
    if main_process and args.json:
        hardware = f"{cores} cores, {platform.processor() or platform.machine()}, torch {torch.__version__}"
        args.json.write_text(json.dumps({"hardware": hardware, "results": results}, indent=1))


if __name__ == "__main__":
    main()
