"""Memory and time of checkpoints under fsdp (stage 3): each process's own slices, beside torch.distributed.checkpoint.

    python benchmarks/sharded_checkpoints.py --out benchmarks/results/sharded_checkpoints.json

Every measurement is of new processes: 100 million parameters with AdamW, float32, so that n processes hold 12 / n bytes
for each parameter. Shown is the largest process. Memory is the peak of anonymous memory (RssAnon, sampled each
millisecond) above what the process holds for the step, in bytes for each parameter of the whole model. Both libraries
save the same tensors in the same processes, in alternating order.

A background save shows how long the call stalls the script. The first of each kind allocates memory, and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import TensorDataset
from verify_cost import machine, summary

import paceline

ROUNDS = 4  # of saves in one launch; the first is left out


def anonymous() -> int:
    """This process's anonymous memory, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Peak:
    """A context that samples the peak of anonymous memory."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        self._began = time.perf_counter()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._done.set()
        self._thread.join()


def make(width: int, layers: int) -> tuple[paceline.Run, nn.Module, torch.optim.Optimizer]:
    run = paceline.start(device="cpu", progress="off", strategy="fsdp", seed=1)
    model = nn.Sequential(nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.forward = lambda x: chained(model[0], x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.prepare(model, optimizer)
    return run, model, optimizer


def chained(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


def sharded(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same tensors for torch.distributed.checkpoint."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        "model": dict(model.state_dict()),
        "optimizer": {names[p]: dict(state) for p, state in optimizer.state.items()},
    }


def train(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    for (x,) in run.loader(TensorDataset(torch.randn(8, width)), global_batch=8):
        run.backward(model(x).square().mean())
        run.step(optimizer)


@contextlib.contextmanager
def recorded(rows: list[dict[str, Any]], what: str, later: float = 0.0) -> Iterator[None]:
    """Measure a block. later: bytes that the process holds afterwards, and that do not count."""
    dist.barrier()
    with Peak() as peak:
        yield
    rows.append({"what": what, "bytes": peak.most - peak.before - later, "seconds": peak.seconds})


def measure(what: str, folder: Path, width: int, layers: int) -> None:
    """In one of the processes: write rows of figures."""
    rows: list[dict[str, Any]] = []
    run, model, optimizer = make(width, layers)
    count, size, rank = width * width * layers, dist.get_world_size(), dist.get_rank()
    order = random.Random(0)
    if what == "restore ours":
        with recorded(rows, what, later=8 * count / size):
            run.restore(folder / "ours")
    else:
        train(run, model, optimizer, width)
        state = sharded(run, model, optimizer)
        if what == "restore dcp":  # into the tensors that there are
            with recorded(rows, what):
                dcp.load(state, checkpoint_id=folder / "dcp")
        for number in range(ROUNDS if what in ("save", "background") else 0):
            for one in order.sample(["ours", "dcp"], 2):
                if what == "save":
                    with recorded(rows, f"save {one}"):
                        if one == "ours":
                            run.save(folder / "ours", keep=1)
                        else:
                            dcp.save(state, checkpoint_id=folder / "dcp")
                else:
                    future: Any = None
                    with recorded(rows, f"background {one}"):
                        if one == "ours":
                            run.save(folder / "behind", keep=1, background=True)
                        else:
                            future = dcp.async_save(state, checkpoint_id=folder / f"dcp-{number}")
                    if one == "ours":
                        run.wait_for_save()
                    else:
                        future.result()
    run.close()
    (folder / f"{what}-{rank}.json").write_text(json.dumps(rows))


def launch(what: str, folder: Path, size: int, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    script = [__file__, "--measure", what, "--folder", str(folder)]
    script += ["--width", str(options.width), "--layers", str(options.layers)]
    line = [sys.executable, "-m", "paceline", "run", "--nproc", str(size), *script]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{line}\n{done.stdout}{done.stderr}")
    ranks = [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(size)]
    found: dict[str, list[dict[str, float]]] = {}
    count = options.width**2 * options.layers
    for rows in zip(*ranks, strict=True):
        most = {"bytes per parameter": max(row["bytes"] for row in rows) / count}
        found.setdefault(rows[0]["what"], []).append({**most, "seconds": max(row["seconds"] for row in rows)})
    return {name: rows[1:] or rows for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--width", type=int, default=2890)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.folder, options.width, options.layers)
        return
    sizes: dict[str, Any] = {}
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, Any] = {}
            for what in ("save", "restore ours", "restore dcp", "background"):
                for name, rows in launch(what, Path(folder), size, options).items():
                    found[name] = {key: summary(rows, key) for key in rows[0]}
                    print(size, name, found[name], flush=True)
        sizes[f"{size} processes"] = found
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "parameters": options.width**2 * options.layers,
        "rounds": ROUNDS - 1,
        "sizes": sizes,
    }
    print(json.dumps(sizes, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
