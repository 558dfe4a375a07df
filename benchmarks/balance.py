"""balance=True with one process throttled to a third of a core. Needs root and a cgroup with the CPU controller.

    sudo python benchmarks/balance.py --json benchmarks/results/balance.json    # ten minutes

Two processes of one thread each train a small network on this machine. A cgroup gives the throttled process 2 of every
6 ms. Each job goes through these phases, in all ROUNDS rounds:

1. Rank 1 is throttled. Both train together for STEPS updates under ddp.
2. Each rank trains alone, at the same time as the other, without any exchange: the sum of their speeds is what two
   processes can reach at most.
3. The throttle moves to rank 0, in mid-run, and both phases are repeated.

In each round a job is run without `balance`, with it, and once without both throttle and `balance`: the control, which
shows what processes of equal speed reach. The speed of a phase is that of its last half, which begins after 50 steps at
the latest. The models with and without `balance` are compared at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from collate_draws import machine
from torch import Tensor, nn

import paceline

ROUNDS, STEPS, BATCH, ALONE_SECONDS = 5, 120, 192, 5.0
PERIOD, QUOTA = 6_000, 2_000  # microseconds


class Throttle:
    """A cgroup for this process. Of version 1 or 2, whichever this machine has."""

    def __init__(self, name: str) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self._old = first.is_dir()
        self._root = first if self._old else Path("/sys/fs/cgroup")
        self._group = self._root / name
        self._group.mkdir(exist_ok=True)

    def on(self) -> None:
        if self._old:
            (self._group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self._group / "cpu.cfs_quota_us").write_text(str(QUOTA))
        else:
            (self._group / "cpu.max").write_text(f"{QUOTA} {PERIOD}")
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def off(self) -> None:
        (self._root / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        self.off()
        self._group.rmdir()


class Net(nn.Module):
    """Some 60,000 parameters, and many operations on each of them: the exchange is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.Tanh(), nn.Conv2d(24, 48, 3, stride=2), nn.Tanh(),
            nn.Conv2d(48, 96, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(96 * 16, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def data() -> torch.utils.data.TensorDataset:
    g = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH * 20, 1, 21, 21, generator=g, dtype=torch.float64)
    return torch.utils.data.TensorDataset(images, torch.randint(10, (len(images),), generator=g))


def alone(run: paceline.Run, examples: torch.utils.data.TensorDataset) -> float:
    """Examples per second of all ranks together, each of which trains alone on its part."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = examples[: BATCH // run.world_size]
    run.wait()
    speed = 0.0
    for seconds in (1.0, ALONE_SECONDS):  # the first warms up
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            done += len(x)
        speed = done / (time.perf_counter() - began)
    run.wait()
    return float(run.sum(speed))


def job(file: Path, throttles: bool) -> None:
    torch.set_num_threads(1)
    run = paceline.start(device="cpu", progress="off", nonfinite_every=1)
    throttle = Throttle(f"paceline-balance-{os.getpid()}")
    try:
        if throttles and run.rank == 1:
            throttle.on()
        examples = data()
        sums = []
        net = Net().double()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        loader = run.loader(examples, global_batch=BATCH, shuffle=True)
        moments, own = [time.perf_counter()], []
        for _ in run.epochs(2 * STEPS // len(loader)):
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)
                moments.append(time.perf_counter())
                own.append(len(x))
                if run.steps == STEPS:
                    sums.append(alone(run, examples))
                    throttle.on() if throttles and run.rank == 0 else throttle.off()
        sums.append(alone(run, examples))
        weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()
        if run.main:
            speeds = [BATCH * (end - start) / (moments[end] - moments[start])
                      for start, end in ((STEPS // 2, STEPS), (STEPS + STEPS // 2, 2 * STEPS))]  # fmt: skip
            found = {"sum_of_speeds": sums, "speeds": speeds, "examples_of_rank_0": own, "weights": weights}
            file.write_text(json.dumps(found))
    finally:
        throttle.close()
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-throttle", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job, not options.no_throttle)
        return
    ways: dict[str, tuple[list[str], list[str]]] = {
        "control": ([], ["--no-throttle"]), "equal": ([], []), "balance": (["--balance"], []),
    }  # fmt: skip
    found: dict[str, list[Any]] = {way: [] for way in ways}
    said: list[str] = []
    apart = 0.0
    for number in range(ROUNDS):
        weights = {}
        for way in list(ways)[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "found.json")
                command = [
                    sys.executable,
                    "-m",
                    "paceline",
                    "run",
                    "--nproc",
                    "2",
                    *ways[way][0],
                    __file__,
                    *ways[way][1],
                ]
                done = subprocess.run(
                    [*command, "--job", str(file)], check=True, timeout=300, stderr=subprocess.PIPE, text=True
                )
                said += [line for line in done.stderr.splitlines() if "balance, step" in line]
                result = json.loads(file.read_text())
            weights[way] = torch.tensor(result.pop("weights"), dtype=torch.float64)
            found[way].append(result)
            print(
                number,
                way,
                [round(s) for s in result["sum_of_speeds"]],
                [round(s) for s in result["speeds"]],
                flush=True,
            )
        apart = max(apart, (weights["equal"] - weights["balance"]).abs().max().item())
    results: dict[str, Any] = {"largest_difference_of_weights": apart}
    for way, rounds in found.items():
        for phase, name in enumerate(("rank 1 throttled", "then rank 0")):
            parts = [one["speeds"][phase] / one["sum_of_speeds"][phase] for one in rounds]
            recut = [_settled(one["examples_of_rank_0"][phase * STEPS : (phase + 1) * STEPS]) for one in rounds]
            results[f"{way}, {name}"] = {
                "examples_per_second": round(statistics.median(one["speeds"][phase] for one in rounds)),
                "sum_of_speeds": round(statistics.median(one["sum_of_speeds"][phase] for one in rounds)),
                "part_of_the_sum": [round(part, 3) for part in (statistics.median(parts), min(parts), max(parts))],
                "examples_of_rank_0": rounds[0]["examples_of_rank_0"][(phase + 1) * STEPS - 1],
                "first_new_cut_after_steps": recut,
            }
    print(json.dumps(results, indent=1))
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/balance.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        options.json.write_text(json.dumps({**about, **results, "lines": said}, indent=1) + "\n")


def _settled(own: list[int]) -> int | None:
    """The number of steps until the first new cut; None: there was none."""
    return next((step for step, count in enumerate(own) if count != own[0]), None)


if __name__ == "__main__":
    main()
