"""What lossy ways of training send, and what they reach: examples/char_gpt.py between two hosts at 20 Mbit/s. As root.

    python benchmarks/lossy.py --data FILE --json benchmarks/results/lossy.json                     # eight hours
    python benchmarks/lossy.py --data FILE --json build/short.json --steps 400 --seeds 1            # half of one

The fair baseline is ddp with a codec of bf16. Every way makes as many steps of the same global batch, with the learning
rate's course of the example. At times that fall on the end of a round, where replicas are one anyway, the loss of a
part of the held-out text is taken; the clock and the count of bytes stand still meanwhile. Bytes are those that the
first host has sent over its cable, with all headers. The target is the baseline's final loss, the mean over its seeds,
plus 1%.

A piece (a way with a seed) that stands in the file already is not measured again: what was interrupted goes on, and
`--seeds 5` adds to what `--seeds 1` has measured. `--table` prints the table of docs/slow_links.md from the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from collate_draws import machine
from lab import Link, interface_bytes, lab
from torch.optim.lr_scheduler import LambdaLR

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import char_gpt
from characters import characters

BASE = "ddp:codec=bf16"
WAYS = {
    BASE: 1,
    "ddp:codec=powersgd:rank=4": 1,
    "ddp:codec=powersgd:rank=1": 1,
    "ddp:codec=topk:ratio=0.01": 1,
    "ddp:codec=topk:ratio=0.001": 1,
    "local_sgd:every=50": 50,
    "local_sgd:every=200": 200,
    "diloco:every=50": 50,
    "diloco:every=200": 200,
    "diloco:every=200,fragments=4": 200,
    "diloco:every=200,fragments=4,delay=10": 200,  # never one by itself: each look averages them
}
"""Strategy -> steps after which its replicas are one."""

LENGTH, EVERY, HELD_OUT = 128, 50, 256  # characters of a window, steps between two looks, windows
MARK = "FOUND "


def job(options: argparse.Namespace) -> None:
    alphabet, tokens = characters(options.data, LENGTH)
    end = len(tokens) * 9 // 10
    run = paceline.start(seed=options.seed, device="cpu", strategy=options.way, progress="off")
    torch.set_num_threads(1)
    train = run.loader(char_gpt.windows(tokens[:end], LENGTH), global_batch=options.global_batch, shuffle=True)
    held_out = char_gpt.windows(tokens[end : end + HELD_OUT * LENGTH + 1], LENGTH)
    test = run.loader(held_out, global_batch=64, train=False)
    torch.manual_seed(options.seed)
    model = char_gpt.GPT(len(alphabet), LENGTH, options.layers, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def share(step: int) -> float:
        return min((step + 1) / (options.steps / 10), (1 + math.cos(math.pi * step / options.steps)) / 2)

    model, optimizer, _ = run.prepare(model, optimizer, LambdaLR(optimizer, share))
    curve: list[list[float]] = []
    seconds = sent = 0.0
    began, before = time.perf_counter(), interface_bytes("eth0")
    for _ in run.epochs(math.ceil(options.steps / train.steps)):
        for batch in train:
            if run.steps >= options.steps:
                break
            run.forward_backward(char_gpt.loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)
            if run.steps % max(EVERY, WAYS[options.way]) and run.steps < options.steps:
                continue
            seconds += time.perf_counter() - began
            sent += interface_bytes("eth0") - before
            with torch.no_grad():
                found = [char_gpt.loss_fn(model, each) for each in test]
            loss = run.ratio(sum(total.sum for total in found), sum(total.count for total in found))
            curve.append([run.steps, round(seconds, 3), round(sent), round(float(loss), 5)])
            began, before = time.perf_counter(), interface_bytes("eth0")
    if run.main:
        size = sum(p.numel() for p in model.parameters())
        print(MARK + json.dumps({"parameters": size, "curve": curve}), flush=True)


def piece(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    words = ["--job", "--way", way, "--seed", str(seed), "--data", str(options.data.resolve())]
    for name in ("steps", "global_batch", "layers", "width"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with lab(2, Link(options.mbit, 0.0)) as made:
        link = made.check(1.0)
        first, _ = made.run(str(Path(__file__).resolve()), *words, seconds=7200.0)
    return {"link": link} | json.loads(next(x for x in first.splitlines() if MARK in x).partition(MARK)[2])


def table(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Way -> its figures over all seeds: medians, and the mean of final losses with the least and the greatest."""
    by_way: dict[str, list[list[list[float]]]] = {}
    for name, one in found["pieces"].items():
        by_way.setdefault(name.rpartition(" ")[0], []).append(one["curve"])
    if BASE not in by_way:
        return {}
    target = 1.01 * statistics.mean(curve[-1][3] for curve in by_way[BASE])
    rows = {}
    for way, curves in by_way.items():
        reached = [next((at for at in curve if at[3] <= target), None) for curve in curves]
        times = [at[1] for at in reached if at is not None]
        rows[way] = {
            "seeds": len(curves),
            "mb_a_step": round(statistics.median(curve[-1][2] / curve[-1][0] for curve in curves) / 1e6, 5),
            "final_loss": [
                round(value, 3)
                for value in (
                    statistics.mean(curve[-1][3] for curve in curves),
                    min(curve[-1][3] for curve in curves),
                    max(curve[-1][3] for curve in curves),
                )
            ],
            "reached": len(times),
            "seconds_to_target": round(statistics.median(times), 1) if len(times) == len(curves) else None,
            "seconds": round(statistics.median(curve[-1][1] for curve in curves), 1),
        }
    base = rows[BASE]
    for row in rows.values():
        row["bytes_times_fewer"] = round(base["mb_a_step"] / row["mb_a_step"], 1)
        mine, theirs = row["seconds_to_target"], base["seconds_to_target"]
        row["times_faster"] = round(theirs / mine, 1) if mine and theirs else None
        row["loss_over_base"] = round(row["final_loss"][0] / base["final_loss"][0], 3)
    return {"target": round(target, 3), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/tinyshakespeare/input.txt"))
    parser.add_argument("--json", type=Path, help="write what was found here, after each piece")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--load", default="", help="what else ran on the machine, for the file")
    parser.add_argument("--table", action="store_true", help="print what the file shows, and measure nothing")
    for hidden, kind in (("--way", str), ("--seed", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options)
        return
    about: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/lossy.py", *sys.argv[1:]]),
        "machine": machine(),
        "load": options.load,
        "pieces": {},
    }
    if options.json and options.json.exists():
        about["pieces"] = json.loads(options.json.read_text())["pieces"]
    for seed in range(0 if options.table else options.seeds):
        for way in options.only:
            name = f"{way} {seed}"
            if name in about["pieces"]:
                continue
            try:
                about["pieces"][name] = piece(way, seed, options)
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{name}: {about['pieces'][name]['curve'][-1]}", flush=True)
            about["time"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            about["table"] = table(about)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(about, indent=1) + "\n")
    for way, row in table(about).items():
        print(f"{way}: {row}")


if __name__ == "__main__":
    main()
