"""What `paceline doctor` costs in each step of a script of plain DistributedDataParallel.

    python benchmarks/doctor_cost.py --out benchmarks/results/doctor_cost.json

A round runs, in random order, the script alone (twice, as an A/A control), and under doctor. The script measures its
steps itself; the first three do not count. Shown are the mean and the median of a run's steps: the median of all
rounds, with the smallest and the largest. Doctor records more in some steps (1 to 4, 8, 16, 32, ...), which only the
mean shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from verify_cost import SIZES, VOCABULARY, Transformer, summary, write

WARM_UP = 3


def train(size: str, steps: int, times: Path) -> None:
    """The script. It knows nothing of Paceline."""
    width, layers, tokens, examples = SIZES[size]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(width, layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    drawn = torch.randint(VOCABULARY, (examples * steps * dist.get_world_size(), tokens + 1))
    data = TensorDataset(drawn)
    loader = DataLoader(data, examples, sampler=DistributedSampler(data))
    seconds = []
    began = time.perf_counter()
    for (batch,) in loader:
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        began, ended = time.perf_counter(), began
        seconds.append(began - ended)
    if dist.get_rank() == 0:
        times.write_text(json.dumps(seconds[WARM_UP:]))
    dist.destroy_process_group()


def measure(line: list[str], times: Path) -> dict[str, float]:
    """The mean and the median of the milliseconds of a step."""
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{shlex.join(line)}\n{done.stdout}{done.stderr}")
    seconds = json.loads(times.read_text())
    return {"mean ms": 1000 * statistics.mean(seconds), "median ms": 1000 * statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", choices=SIZES)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.times)
        return
    random.seed(0)
    sizes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            times = Path(folder) / "times.json"
            script = [__file__, "--train", size, "--steps", str(options.steps), "--times", str(times)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
            doctor = [sys.executable, "-m", "paceline", "doctor", "--nproc", "2", *script]
            lines = {"script": torchrun, "script again": torchrun, "doctor": doctor}
            found: dict[str, list[dict[str, float]]] = {name: [] for name in lines}
            for _ in range(options.rounds):
                for name in random.sample(list(lines), len(lines)):
                    found[name].append(measure(lines[name], times))
                    print(size, name, found[name][-1], flush=True)
            sizes[size] = {name: {key: summary(runs, key) for key in runs[0]} for name, runs in found.items()}
            ours, alone = sizes[size]["doctor"], sizes[size]["script"]
            sizes[size]["times"] = {key: round(ours[key]["median"] / alone[key]["median"], 3) for key in alone}
    write(options, sizes)


if __name__ == "__main__":
    main()
