"""Count Paceline's functions, files and Python calls in one training iteration, in the steady state.

    paceline run --nproc 2 benchmarks/walk.py [--strategy ddp] [--json FILE] [--list]

A small perceptron is trained in the loop form: `for batch in loader`, `run.backward(loss)`, `run.step(optimizer)`.
After WARM_UP steps a profiler counts the Python functions of Paceline that rank 0's main thread enters in COUNTED
steps. Only functions that run in every step count, so a function that logs every 10 steps does not. Comprehensions are
part of the function around them; each resumption of a generator is a call.

Reported for each part of an iteration (the loader up to its yield, the backward, the step) and for the whole:
functions, files, calls per step. --list names the functions.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WARM_UP = 40  # steps
COUNTED = 20
INLINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}  # part of the function around them
PARTS = ("loader", "backward", "step")
ROOT = str(Path(paceline.__file__).parent) + "/"


class Walk:
    """Counts calls of Paceline's functions while a part is profiled."""

    def __init__(self) -> None:
        self.steps: dict[str, list[collections.Counter[CodeType]]] = {part: [] for part in PARTS}
        self._calls: collections.Counter[CodeType] = collections.Counter()

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in INLINE:
            self._calls[code] += 1

    def start(self) -> None:
        self._calls = collections.Counter()
        sys.setprofile(self._on_event)

    def stop(self, part: str) -> None:
        sys.setprofile(None)
        self.steps[part].append(self._calls)

    def found(self, parts: tuple[str, ...]) -> dict[str, Any]:
        """{"functions", "files", "calls", "names"} of these parts of an iteration; calls: the median over the steps."""
        each: list[collections.Counter[CodeType]] = []
        for counters in zip(*(self.steps[part] for part in parts), strict=True):
            each.append(collections.Counter())
            for counter in counters:
                each[-1].update(counter)
        steady = set.intersection(*(set(counts) for counts in each))
        calls = sorted(sum(counts.values()) for counts in each)
        names = sorted(f"{code.co_filename.removeprefix(ROOT)}: {code.co_qualname}" for code in steady)
        return {
            "functions": len(steady),
            "files": len({code.co_filename for code in steady}),
            "calls": calls[len(calls) // 2],
            "names": names,
        }


def walk(strategy: str) -> dict[str, dict[str, Any]]:
    run = paceline.start(strategy=strategy, progress="off", device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    steps = WARM_UP + COUNTED + 2
    data = TensorDataset(torch.randn(steps * 8, 64), torch.randint(10, (steps * 8,)))
    batches = iter(run.loader(data, global_batch=8, shuffle=True))
    walked = Walk()
    for step in range(WARM_UP + COUNTED):
        counts = step >= WARM_UP
        if counts:
            walked.start()
        images, labels = next(batches)
        if counts:
            walked.stop("loader")
        loss = F.cross_entropy(model(images), labels)
        if counts:
            walked.start()
        run.backward(loss)
        if counts:
            walked.stop("backward")
            walked.start()
        run.step(optimizer)
        if counts:
            walked.stop("step")
    run.close()
    return {part: walked.found((part,)) for part in PARTS} | {"iteration": walked.found(PARTS)}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="name the functions")
    given = parser.parse_args()
    found = walk(given.strategy)
    if int(os.environ.get("RANK", "0")):
        return
    for part, counts in found.items():
        print(f"{part:10} {counts['functions']:4} functions {counts['files']:4} files {counts['calls']:5} calls")
        if given.list and part != "iteration":
            print("".join(f"    {name}\n" for name in counts["names"]), end="")
    if given.json is not None:
        written = {
            "command": shlex.join(
                ["paceline", "run", "--nproc", os.environ.get("WORLD_SIZE", "1"), "benchmarks/walk.py", *sys.argv[1:]]
            ),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "results": found,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
