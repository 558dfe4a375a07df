"""parameter_server with one slow worker: sync compared with async.

    python benchmarks/parameter_server.py [--rounds 3] [--epochs 12]

Two workers and a server train a small network on scikit-learn's digits. A batch takes 10 ms on one worker and 40 ms on
the other. (They sleep, so that the result depends on waiting and not on this machine's cores.) Each round runs both
modes. For each mode, prints examples/s in the training loop (median, minimum and maximum over the rounds), the accuracy
on 297 held-out digits, and the number of parts that each worker computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 0.010
SLOWER = 4
BATCH = 50


def worker(folder: Path, epochs: int) -> None:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn

    import paceline

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    run = paceline.start(progress="off")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
    loader = run.loader(torch.utils.data.TensorDataset(images[:1500], labels[:1500]), global_batch=BATCH, shuffle=True)
    parts, seconds = 0, 0.0
    for _ in run.epochs(epochs):
        began = time.perf_counter()
        for x, y in loader:
            time.sleep(SECONDS * (SLOWER if run.world.rank == 1 else 1))
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            parts += 1
        seconds += time.perf_counter() - began
    guessed = run.predict(model, images[1500:], global_batch=100, fn=lambda m, x: m(x).argmax(1))
    told = {
        "rate": 1500 * epochs / seconds,
        "accuracy": float((guessed == labels[1500:]).double().mean()),
        "parts": run.gather([parts]),
    }
    if run.main:
        (folder / "told.json").write_text(json.dumps(told))


def measured(mode: str, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "3"]
        command += [
            "--strategy",
            f"parameter_server:mode={mode}",
            __file__,
            "--worker",
            folder,
            "--epochs",
            str(epochs),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads((Path(folder) / "told.json").read_text())
        return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.epochs)
        return
    found: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
    for _ in range(options.rounds):
        for mode, results in found.items():
            results.append(measured(mode, options.epochs))
    for mode, results in found.items():
        rates = sorted(result["rate"] for result in results)
        accuracy = statistics.median(result["accuracy"] for result in results)
        parts = " and ".join(map(str, results[-1]["parts"]))
        print(
            f"{mode:6} {statistics.median(rates):6.0f} examples/s ({rates[0]:.0f} to {rates[-1]:.0f}), accuracy "
            f"{accuracy:.3f}, parts computed by the workers: {parts}"
        )
    gain = [b["rate"] / a["rate"] for a, b in zip(found["sync"], found["async"], strict=True)]
    print(f"async / sync: {statistics.median(gain):.2f} ({min(gain):.2f} to {max(gain):.2f})")


if __name__ == "__main__":
    main()
