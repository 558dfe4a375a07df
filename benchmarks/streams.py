"""Reading a stream whole on each process, and in shards: examples per second and how often each example is read.

    python benchmarks/streams.py --json benchmarks/results/streams.json    # a minute

A reader that waits 1 ms per example gives 16 shards of 100 examples, in global batches of 64, on 1, 2 and 4 processes,
as one stream and as shards. Each way is read once to warm up (2 global batches), and then once whole. There is no
training. Seconds are those of rank 0, from the first request to the end of the pass, which all ranks reach together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from collate_draws import machine
from torch import Tensor

import paceline

SHARDS, EACH, BATCH, SECONDS = 16, 100, 64, 0.001


class Shards:
    """Counts the examples that this process reads."""

    shards = SHARDS

    def __init__(self) -> None:
        self.count = 0

    def read(self, shard: int, position: int) -> Iterator[Tensor]:
        for place in range(position, EACH):
            time.sleep(SECONDS)
            self.count += 1
            yield torch.tensor(shard * EACH + place)


class Stream:
    """The same examples as one stream."""

    def __init__(self) -> None:
        self.source = Shards()

    def __iter__(self) -> Iterator[Tensor]:
        for shard in range(SHARDS):
            yield from self.source.read(shard, 0)


def measure(run: paceline.Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stream, shards = Stream(), Shards()
    ways: list[tuple[str, Any, Shards]] = [("stream", stream, stream.source), ("shards", shards, shards)]
    for way, dataset, source in ways:
        for _ in run.loader(dataset, global_batch=BATCH, limit_batches=2, train=False, name=f"{way} warm"):
            pass
        source.count = 0
        run.wait()
        began = time.perf_counter()
        for _ in run.loader(dataset, global_batch=BATCH, train=False, name=way):
            pass
        run.wait()
        took = time.perf_counter() - began
        reads = sum(run.gather([source.count]))
        found[way] = {
            "examples_per_second": round(SHARDS * EACH / took, 1),
            "reads_of_each_example": round(reads / (SHARDS * EACH), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(1)
        run = paceline.start(device="cpu", progress="off")
        found = measure(run)
        if run.main:
            options.measure.write_text(json.dumps(found))
        run.close()
        return
    results: dict[str, Any] = {}
    for count in (1, 2, 4):
        file = Path(tempfile.gettempdir(), f"streams-{count}.json")
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(count), __file__, "--measure", str(file)]
        subprocess.run(command, check=True, timeout=300)
        results[f"{count} processes"] = json.loads(file.read_text())
        file.unlink()
        print(count, results[f"{count} processes"], flush=True)
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/streams.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        options.json.write_text(json.dumps(about | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
