"""The cost of reading an example with run.loader and with torch's DataLoader.

    python benchmarks/data_path.py --json benchmarks/results/data_path.json    # two minutes
    python benchmarks/data_path.py --memory                                    # memory of an epoch's order

One process with one thread reads each data set in global batches of 256, shuffled. Each round has a pass with
run.loader, one with torch's DataLoader, and a second with the DataLoader (an A/A control), in a new random order. Shown
are the medians of the ratios of seconds within a round, with the 5th and 95th percentile. There is no training.

    tensors     TensorDataset of two tensors, default_collate
    numpy       rows of an array, by `__getitems__`, stacked by a collate function
    augmented   images, flipped and cropped by torch's random numbers in `__getitem__`
    datasets    Hugging Face's, in the format "torch" (where it is installed)
    jpeg        decoded by Pillow, with two workers (where it is installed)
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import io
import json
import random
import shlex
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collate_draws import machine
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.data import order
from paceline.data.batch_plan import GlobalBatches

BATCH, ROUNDS = 256, 15


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x = np.random.default_rng(0).random((count, 32), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return list(self.x[indices])


def stacked(rows: list[Any]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


class Augmented(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.images = torch.rand(count, 3, 36, 36)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        top, left, flip = torch.randint(4, (3,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return image.flip(2) if flip < 2 else image


class Jpeg(Dataset[Any]):
    def __init__(self, count: int) -> None:
        from PIL import Image

        self.files = []
        draw = np.random.default_rng(0)
        for _ in range(count):
            file = io.BytesIO()
            pixels = draw.integers(0, 255, (8, 8, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
            Image.fromarray(pixels).save(file, "jpeg")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return torch.from_numpy(np.asarray(Image.open(io.BytesIO(self.files[index]))).copy())


def hugging_face(count: int) -> Any:
    from datasets import Dataset as Table

    draw = np.random.default_rng(0)
    rows = {"x": draw.random((count, 32), dtype=np.float32).tolist(), "y": draw.integers(0, 9, count).tolist()}
    return Table.from_dict(rows).with_format("torch")


CASES: dict[str, tuple[Callable[[int], Any], int, dict[str, Any], str | None]] = {
    "tensors": (lambda n: TensorDataset(torch.rand(n, 32), torch.arange(n)), 40 * BATCH, {}, None),
    "numpy": (Rows, 40 * BATCH, {"collate_fn": stacked}, None),
    "augmented": (Augmented, 10 * BATCH, {}, None),
    "datasets": (hugging_face, 10 * BATCH, {}, "datasets"),
    "jpeg": (Jpeg, 10 * BATCH, {"num_workers": 2}, "PIL"),
}
"""Name -> (makes a data set of a given size, the size, options of the loaders, a library that it needs)."""


def seconds(loader: Any) -> float:
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def spread(values: list[float]) -> list[float]:
    """[median, 5th percentile, 95th percentile]."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [round(value, 3) for value in (statistics.median(values), cuts[0], cuts[-1])]


def measure(name: str, rounds: int) -> dict[str, Any]:
    make, count, options, library = CASES[name]
    if library and importlib.util.find_spec(library) is None:
        return {"left_out": f"{library} is not installed"}
    dataset = make(count)
    run = paceline.start(device="cpu", progress="off")
    theirs = DataLoader(dataset, batch_size=BATCH, shuffle=True, **options)
    ways = {
        "ours": run.loader(dataset, global_batch=BATCH, shuffle=True, train=False, name=name, **options),
        "torch": theirs,
        "again": theirs,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in random.sample(list(ways), len(ways)):
            took = seconds(ways[way])
            if number:  # the first round warms up
                times[way].append(took)
    run.close()
    ratios = {
        way: spread([one / other for one, other in zip(times[way], times["torch"], strict=True)])
        for way in ("ours", "again")
    }
    each = {way: round(statistics.median(times[way]) / count * 1e6, 2) for way in ("ours", "torch")}
    return {"us_an_example": each, "ratio": ratios["ours"], "control": ratios["again"]}


def memory() -> dict[str, Any]:
    """The peak bytes of an epoch's order while its first, middle and last 10 global batches are made."""
    found = {}
    for exponent in range(4, 11):
        length = 10**exponent
        tracemalloc.start()
        began = time.perf_counter()
        batches = GlobalBatches(order.order_of(length, 0, "train", 1), BATCH, -(-length // BATCH))
        for first in (0, len(batches) // 2, len(batches) - 10):
            for step in range(first, first + 10):
                batches[step]
        took = time.perf_counter() - began
        found[f"1e{exponent}"] = {"bytes": tracemalloc.get_traced_memory()[1], "seconds": round(took, 4)}
        tracemalloc.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory", action="store_true", help="of the order alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"order": memory()}
    for length, taken in found["order"].items():
        print(f"order of {length} examples: {taken['bytes']:,} bytes, {taken['seconds']} s", flush=True)
    for name in () if options.memory else options.only:
        found[name] = measure(name, options.rounds)
        print(f"{name}: {found[name]}", flush=True)
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/data_path.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
