"""What `paceline verify` costs on a script of plain DistributedDataParallel: time and memory.

    python benchmarks/verify_cost.py --out benchmarks/results/verify_cost.json

A round runs, in random order, the script alone (twice, as an A/A control), and verify on it, for the same number of
updates. Time is wall time with the start of the processes. Memory is the largest sum of the processes' unique set sizes
(USS), and disk the largest size of the temporary files. Both are sampled four times a second in a round of their own,
since sampling takes time from the processes. Shown are the medians of all rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import datetime
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

import psutil
import torch
import torch.distributed as dist
from collate_draws import machine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZES = {  # name -> width, layers, tokens of an example, examples of a rank
    "0.4 million parameters": (96, 3, 64, 8),
    "7 million parameters": (256, 8, 128, 8),
}
VOCABULARY = 512


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))  # type: ignore[no-any-return]


def train(size: str, steps: int) -> None:
    """The script. It knows nothing of Paceline."""
    width, layers, tokens, examples = SIZES[size]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(width, layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    drawn = torch.randint(VOCABULARY, (examples * steps * dist.get_world_size(), tokens + 1))
    data = TensorDataset(drawn)
    loader = DataLoader(data, examples, sampler=DistributedSampler(data))
    for (batch,) in loader:
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def measure(line: list[str], sampled: bool) -> dict[str, float]:
    """Seconds; or the largest memory and the largest size of the temporary files, both in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TMPDIR": folder}
        began = time.monotonic()
        done = psutil.Popen(line, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = largest(done, folder) if sampled else {}
        if done.wait():
            raise SystemExit(f"{shlex.join(line)}: exit code {done.returncode}")
        return found or {"seconds": time.monotonic() - began}


def largest(done: psutil.Popen, folder: str) -> dict[str, float]:
    """Sample until the program ends."""
    memory, disk = 0, 0
    while done.poll() is None:
        memory = max(memory, sum(map(used, [done, *done.children(recursive=True)])))
        files = (os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)
        disk = max(disk, sum(map(size_of, files)))
        time.sleep(0.25)
    return {"memory": memory / 2**20, "disk": disk / 2**20}


def used(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:  # it has ended
        return 0


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # removed meanwhile
        return 0


def summary(found: list[dict[str, float]], key: str) -> dict[str, float]:
    values = [one[key] for one in found if key in one]
    return {
        "median": round(statistics.median(values), 2),
        "least": round(min(values), 2),
        "most": round(max(values), 2),
    }


def write(options: argparse.Namespace, sizes: dict[str, Any]) -> None:
    """Print the figures, and write them with their command, machine and time to `options.out`."""
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "processes": 2,
        "steps": options.steps,
        "rounds": options.rounds,
        "sizes": sizes,
    }
    print(json.dumps(sizes, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", choices=SIZES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
        return
    random.seed(0)
    sizes: dict[str, Any] = {}
    for size in options.only:
        steps = str(options.steps)
        script = [__file__, "--train", size, "--steps", steps]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
        lines = {
            "script": torchrun,
            "script again": torchrun,
            "verify": [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", steps, *script],
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in lines}
        for sampled in [True] + options.rounds * [False]:
            for name in random.sample(list(lines), len(lines)):
                found[name].append(measure(lines[name], sampled))
                print(size, name, found[name][-1], flush=True)
        sizes[size] = {
            name: {key: summary(runs, key) for key in ("seconds", "memory", "disk")} for name, runs in found.items()
        }
        ours, alone = sizes[size]["verify"], sizes[size]["script"]
        sizes[size]["times"] = {
            key: round(ours[key]["median"] / alone[key]["median"], 2) for key in ("seconds", "memory")
        }
    write(options, sizes)


if __name__ == "__main__":
    main()
