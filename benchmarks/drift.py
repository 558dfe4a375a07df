"""One training script on 1, 2 and 4 processes, with hand-written DDP and with Paceline: the picture on the first page.

    python benchmarks/drift.py             # benchmarks/results/drift.json and docs/img/drift.svg: three minutes
    python benchmarks/drift.py --draw      # the picture from the file; runs nothing

Both scripts are examples/before_and_after/image_before.py: the same network, digits, optimizer, schedule and seed, with
`batch_size=64`. The DDP script is written as usual: a DistributedSampler, set_epoch, and a batch size per process, so
its global batch is 64, 128 and 256. Under Paceline the global batch is 64. After each epoch rank 0 computes the loss of
the 297 held-out images.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "before_and_after"))
from image_before import digits, network  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "drift.json"
PICTURE = ROOT / "docs" / "img" / "drift.svg"
PROCESSES = (1, 2, 4)
BATCH, EPOCHS, RATE = 64, 10, 0.1  # those of image_before.py
DDP, PACELINE = "Hand-written DDP", "Paceline"


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """The mean loss of the test set."""
    images, labels = digits()[1].tensors
    model.eval()
    loss = F.cross_entropy(model(images), labels).item()
    model.train()
    return loss


def ddp() -> tuple[list[float], nn.Module, bool]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, _ = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        losses.append(held_out(model.module))
    main = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return losses, model.module, main


def with_paceline() -> tuple[list[float], nn.Module, bool]:
    import paceline

    run = paceline.start(seed=0, progress="off")
    train_set, _ = digits()
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            run.backward(loss)
            run.step(optimizer)
        scheduler.step()
        losses.append(held_out(model))
    return losses, model, run.main


SIDES: dict[str, Callable[[], tuple[list[float], nn.Module, bool]]] = {DDP: ddp, PACELINE: with_paceline}


def train(side: str, out: Path) -> None:
    """One rank of one run; rank 0 writes {"losses", "weights"} to `out`."""
    torch.set_num_threads(1)
    losses, model, main = SIDES[side]()
    if main:
        torch.save({"losses": losses, "weights": {name: part.detach() for name, part in model.named_parameters()}}, out)


def launched(side: str, processes: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{side.replace(' ', '-')}.{processes}.pt"
    launcher = {
        DDP: ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)],
        PACELINE: ["paceline", "run", "--nproc", str(processes)],
    }[side]
    command = [sys.executable, "-m", *launcher, __file__, "--side", side, "--out", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return torch.load(out, weights_only=True)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The 2-norm of the difference over that of `one`."""
    first, second = (torch.cat([part.double().flatten() for part in of.values()]) for of in (one, other))
    return float((first - second).norm() / first.norm())


def measure() -> dict[str, Any]:
    from collate_draws import machine  # beside this file

    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    losses: dict[str, dict[str, list[float]]] = {}
    apart: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            found = {processes: launched(side, processes, Path(folder)) for processes in PROCESSES}
            losses[side] = {str(processes): run["losses"] for processes, run in found.items()}
            one = found[1]
            apart[side] = {
                str(processes): {
                    "last_loss": abs(run["losses"][-1] - one["losses"][-1]),
                    "largest_loss": max(abs(a - b) for a, b in zip(run["losses"], one["losses"], strict=True)),
                    "weights": distance(one["weights"], run["weights"]),
                }
                for processes, run in found.items()
                if processes > 1
            }
    return {
        "command": shlex.join(["python", "benchmarks/drift.py"]),
        "time": when,
        "machine": machine(),
        "model": "examples/before_and_after: two convolutions with batch norm, scikit-learn's digits",
        "batch_size": BATCH,
        "learning_rate": RATE,
        "held_out_loss": losses,
        "difference_from_1_process": apart,
    }


# ---------------------------------------------------------------- the picture

WIDTH, TOP, HIGH, PLOT = 760, 84, 218, 302
LEFTS = {DDP: 62, PACELINE: 440}
COLOURS = {1: "#e8912d", 2: "#2f6fbf", 4: "#5b2a86"}
STROKES = {PACELINE: {1: 8.0, 2: 4.0, 4: 1.4}, DDP: {1: 2.2, 2: 2.2, 4: 2.2}}  # wide to narrow: all three stay visible
INK, SOFT, GRID = "#1d2a33", "#4d5d68", "#e3e8eb"
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def picture(document: dict[str, Any]) -> str:
    """Two panels with the same axes: the held-out loss by epoch, logarithmic, one line for each number of processes."""
    curves = document["held_out_loss"]
    values = [value for side in curves.values() for line in side.values() for value in line]
    low, high = (math.floor(math.log10(min(values)) * 5) / 5, math.ceil(math.log10(max(values)) * 5) / 5)

    def y(value: float) -> float:
        return TOP + HIGH * (1 - (math.log10(value) - low) / (high - low))

    bottom = TOP + HIGH
    parts = []
    ticks = [tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if low <= math.log10(tick) <= high]
    for side, left in LEFTS.items():
        last = len(curves[side]["1"])
        parts.append(text(left, 26, side, 16, bold=True))
        batches = ", ".join(str(document["batch_size"] * (n if side == DDP else 1)) for n in PROCESSES)
        same = document["batch_size"] if side == PACELINE else batches
        label = f"same script, n = {', '.join(map(str, PROCESSES))}: global batch {same}"
        parts.append(text(left, 44, label, 12, ink=SOFT))
        for tick in ticks:
            parts.append(f'<path d="M{left} {y(tick):.1f}h{PLOT}" stroke="{GRID}"/>')
            parts.append(text(left - 7, y(tick) + 4, f"{tick:g}", 11, at="end", ink=SOFT))
        for epoch in (1, *range(5, last + 1, 5)):
            x = left + PLOT * (epoch - 1) / (last - 1)
            parts.append(text(x, bottom + 16, str(epoch), 11, at="middle", ink=SOFT))
        parts.append(text(left + PLOT / 2, bottom + 33, "epoch", 12, at="middle", ink=SOFT))
        parts.append(f'<rect x="{left}" y="{TOP}" width="{PLOT}" height="{HIGH}" fill="none" stroke="#b9c3ca"/>')
        for place, n in enumerate(PROCESSES):
            stroke = f'stroke="{COLOURS[n]}" stroke-width="{STROKES[side][n]:g}"'
            line = enumerate(curves[side][str(n)])
            points = " ".join(f"{left + PLOT * epoch / (last - 1):.1f},{y(value):.1f}" for epoch, value in line)
            parts.append(f'<polyline fill="none" stroke-linejoin="round" {stroke} points="{points}"/>')
            at = left + 78 * place
            parts.append(f'<path d="M{at} 66h24" {stroke}/>')
            parts.append(text(at + 30, 70, f"n = {n}", 12))
    middle = TOP + HIGH / 2
    turned = f' transform="rotate(-90 16 {middle:g})"'
    parts.append(text(16, middle, "held-out loss", 12, at="middle", ink=SOFT, more=turned))
    height = bottom + 46
    head = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}"'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f7f9fa"/>'
    panels = [f'<rect x="{left}" y="{TOP}" width="{PLOT}" height="{HIGH}" fill="#ffffff"/>' for left in LEFTS.values()]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {head}>', ground, *panels, *parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, size: int, *, bold: bool = False, at: str = "start", ink: str = INK, more: str = ""
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    start = f'<text x="{x:g}" y="{y:.1f}" font-size="{size}" text-anchor="{at}" fill="{ink}"'
    return f"{start}{weight}{more}>{words}</text>"


def drift() -> str:
    """The picture of the committed file."""
    return picture(json.loads(RESULTS.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the picture from the file, and train nothing")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        train(args.side, args.out)
        return
    if not args.draw:
        document = measure()
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(document["difference_from_1_process"], indent=1))
    PICTURE.write_text(drift(), encoding="utf-8")


if __name__ == "__main__":
    main()
