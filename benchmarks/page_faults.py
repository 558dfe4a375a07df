"""Page faults and time of a step on a CPU, with malloc as it is and with freed memory kept (step/freed_memory.py).

    python benchmarks/page_faults.py --cifar10 FILE --text FILE --json benchmarks/results/page_faults.json  # 3 minutes

The step is plain PyTorch on one process with all threads, for models of benchmarks/suite. Each way is launched several
times, in turn, since the same program launched again may be a tenth slower. Shown are medians over a launch's steps,
and over launches with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmarks.suite.models import MODELS, OPTIMIZERS, Sources, loss_fn, started

from paceline.step.freed_memory import keep_freed_memory

NAMES = ("mlp", "conv", "conv_bn", "gpt", "mobilenet")
WAYS = ("as it is", "kept")
LAUNCHES, SECONDS, FIRST = 4, 3.0, 4


def measure(name: str, way: str, sources: Sources) -> dict[str, float]:
    """One launch."""
    if way == "kept" and not keep_freed_memory():
        raise SystemExit("this system's malloc cannot keep freed memory, or an environment variable decides")
    model = MODELS[name]
    inputs, targets = model.data(model.global_batch, sources)
    if model.images:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    network = started(model)
    optimizer = OPTIMIZERS[model.optimizer](network)
    times: list[float] = []
    end, before = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or len(times) < 3 * FIRST:
        if len(times) == FIRST:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(network, (inputs, targets)).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    steps = len(times) - FIRST
    return {
        "ms": 1e3 * statistics.median(times[FIRST:]),
        "faults": (usage.ru_minflt - before) / steps,
        "peak resident MB": usage.ru_maxrss * 1024 / 1e6,
    }


def spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, Sources(options.cifar10, options.text))))
        return
    results: dict[str, Any] = {}
    for name in NAMES:
        launches: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(LAUNCHES):
            for way in WAYS:
                done = subprocess.run([sys.executable, *sys.argv, "--one", name, way], check=True, capture_output=True)
                launches[way].append(json.loads(done.stdout.splitlines()[-1]))
        found = {way: {key: spread([one[key] for one in of]) for key in of[0]} for way, of in launches.items()}
        pairs = zip(launches["kept"], launches["as it is"], strict=True)
        results[name] = found | {"kept / as it is": spread([kept["ms"] / other["ms"] for kept, other in pairs])}
        print(name, results[name], flush=True)
    if options.json:
        from benchmarks.collate_draws import machine

        shown = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        about = {
            "command": shlex.join(["python", "benchmarks/page_faults.py", *shown]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "threads": torch.get_num_threads(),
            "load before": round(os.getloadavg()[0], 1),
        }
        options.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
