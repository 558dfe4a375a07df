"""Two minutes of training with all features of a long run, during which nothing may grow.

At the end of each epoch, after a garbage collection, a sample is taken: memory of the device and of the process, its
threads, open files and child processes. Growth is the slope by Theil and Sen (the median of the slopes between all
pairs of samples) over the last three quarters of the time, times that time. So an outlier, or a cache that fills at the
start, does not count as growth.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from itertools import combinations
from typing import Any

import psutil
import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from torch.utils.data import TensorDataset

import paceline

SECONDS = 120.0
LEAST_SAMPLES = 12
# The allowed growth of each. The allocator's reserve and the process's memory change in steps of some MB.
BARS = {
    "allocated on the device, MB": 1.0,
    "reserved on the device, MB": 16.0,
    "resident memory, MB": 16.0,
    "threads": 0.5,
    "open files": 0.5,
    "processes": 0.5,
}


def sample(device: torch.device) -> dict[str, float]:
    gc.collect()
    process = psutil.Process(os.getpid())
    found = {
        "resident memory, MB": process.memory_info().rss / 2**20,
        "threads": process.num_threads(),
        "open files": process.num_fds(),
        "processes": len(process.children()),
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["allocated on the device, MB"] = torch.cuda.memory_allocated() / 2**20
        found["reserved on the device, MB"] = torch.cuda.memory_reserved() / 2**20
    return found


def slope(times: list[float], values: list[float]) -> float:
    """The slope of the line through the points, per second, by Theil and Sen."""
    pairs = combinations(zip(times, values, strict=True), 2)
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in pairs)


def growth(times: list[float], samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each quantity: the first value, the last value, and its growth."""
    late = [number for number, at in enumerate(times) if at >= times[0] + (times[-1] - times[0]) / 4]
    chosen = late[:: max(1, len(late) // 200)]  # limits the number of pairs
    span = times[late[-1]] - times[late[0]]
    found = {}
    for name in samples[0]:
        values = [samples[number][name] for number in chosen]
        grown = slope([times[number] for number in chosen], values) * span
        found[name] = {"first": samples[0][name], "last": samples[-1][name], "grew by": grown, "bar": BARS[name]}
    return found


def text(rows: int) -> TensorDataset:
    ids = torch.randint(61, (rows, 25), generator=jobs.generator())
    return TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone())


def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    ids, targets = batch
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@check("soak", 240)
def nothing_grows(place: Place) -> Steps:
    seconds = 10.0 if place.small else SECONDS
    yield (
        f"{seconds:.0f} s of epochs of a transformer that recomputes its blocks, in bf16, clipped, with two workers; "
        "after each an evaluation, a line of the log, a save, and a sample"
    )
    run = paceline.start(device=str(place.device), progress="off", precision="bf16", log_dir=place.folder / "log")
    torch.manual_seed(0)
    model = jobs.Gpt(recompute=True) if place.small else jobs.Gpt(256, 4, 4, 24, 61, recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=place.device.type == "cuda")
    run.prepare(model, optimizer)
    loader = run.loader(text(128 if place.small else 1024), global_batch=16, shuffle=True, num_workers=2)
    held_out = run.loader(text(48), global_batch=16, train=False, name="held out")
    times: list[float] = []
    samples: list[dict[str, float]] = []
    start = time.monotonic()
    for _ in run.epochs(10**6):
        for batch in loader:
            run.log(loss=run.forward_backward(loss_fn, model, batch))
            run.step(optimizer, max_grad_norm=1.0)
        model.eval()
        with torch.no_grad():
            run.mean(torch.stack([loss_fn(model, batch) for batch in held_out]))
        model.train()
        run.save(place.folder / "saved", keep=2)
        samples.append(sample(place.device))
        times.append(time.monotonic() - start)
        if times[-1] > seconds and len(times) >= LEAST_SAMPLES:
            break
    found = growth(times, samples)
    yield {"epochs": len(times), "steps": run.steps, "over the time": found}
    run.close()
    wrong = [f"{name}: {of['grew by']:.1f}" for name, of in found.items() if not of["grew by"] <= of["bar"]]
    assert not wrong, "grew: " + "; ".join(wrong)
