"""Traffic and loss of lossy training: examples/char_gpt.py between two hosts at 20 Mbit/s. Needs root.

    python benchmarks/lossy.py --data FILE --json benchmarks/results/lossy.json                     # three hours
    python benchmarks/lossy.py --data FILE --json build/short.json --steps 200 --seeds 1 --rounds 1   # ten minutes

The baseline is ddp with a bf16 codec. Every strategy makes the same number of steps with the same global batch and the
example's learning rate schedule. Two things are measured separately, to save time:

- Losses: of each strategy with each seed, on unlimited cables, since the loss does not depend on them. At the end of a
  round, when replicas are averaged anyway, the loss of a part of the held-out text is computed.
- Seconds and bytes of a step: of each strategy, some steps after the tenth on cables of 20 Mbit/s, in rounds over all
  strategies. Bytes are counted on the first host's cable, including headers.

The target is the baseline's final loss (mean over its seeds) plus 1%. The time to the target is the number of steps
until the loss is reached, times the seconds of a step. Cheaper steps allow more of them: `--beside FILE` takes the
baseline's losses and the costs of steps from that file.

    python benchmarks/lossy.py --steps 2000 --rounds 0 --beside benchmarks/results/lossy.json --only diloco:every=50 ...

Results that are already in the file are not measured again: an interrupted benchmark resumes, and `--seeds 5` adds to
the results of `--seeds 1`. `--table` prints the table of docs/slow_links.md from the file.
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
    "diloco:every=200,fragments=4,delay=10": 200,  # never synchronized by itself: each evaluation averages the replicas
}
"""Strategy -> steps between synchronizations of its replicas."""

LENGTH, EVERY, HELD_OUT = 128, 50, 256  # characters per window, steps between evaluations, windows
WARM = 10  # untimed steps at the start; the longest delay, so that whole exchanges are counted
MARK = "FOUND "


def job(options: argparse.Namespace) -> None:
    """Train all steps for their losses, or only `--timed` steps after the warm-up."""
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
    last = WARM + options.timed if options.timed else options.steps
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "curve": []}
    began, before = 0.0, 0
    for _ in run.epochs(math.ceil(last / train.steps)):
        for batch in train:
            if run.steps >= last:
                break
            if run.steps == WARM:
                began, before = time.perf_counter(), interface_bytes("eth0")
            run.forward_backward(char_gpt.loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)
            if options.timed and run.steps == last:
                sent = interface_bytes("eth0") - before
                cost = {"steps": options.timed, "seconds": round(time.perf_counter() - began, 3), "bytes": sent}
                found = {"parameters": found["parameters"], **cost}
            elif not options.timed and (run.steps % max(EVERY, WAYS[options.way]) == 0 or run.steps == last):
                with torch.no_grad():
                    totals = [char_gpt.loss_fn(model, each) for each in test]
                loss = run.ratio(sum(total.sum for total in totals), sum(total.count for total in totals))
                found["curve"].append((run.steps, round(float(loss), 5)))
    if run.main:
        print(MARK + json.dumps(found), flush=True)


def measure(way: str, seed: int, options: argparse.Namespace, timed: int = 0) -> dict[str, Any]:
    """Measure one strategy. timed: the number of steps at 20 Mbit/s to time; 0: all steps, for their losses."""
    words = ["--job", "--way", way, "--seed", str(seed), "--data", str(options.data.resolve()), "--timed", str(timed)]
    for name in ("steps", "global_batch", "layers", "width"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with lab(2, Link(options.mbit if timed else None, 0.0)) as made:
        link = {"link": made.check(1.0)} if timed else {}
        first, _ = made.run(str(Path(__file__).resolve()), *words, seconds=7200.0)
    return link | json.loads(next(x for x in first.splitlines() if MARK in x).partition(MARK)[2])


def table(found: dict[str, Any], beside: dict[str, Any] | None) -> dict[str, Any]:
    """Strategy -> its figures: losses over all seeds, and the medians of seconds and bytes per step.

    beside: the content of another file, to take baseline and costs from.
    """
    if beside is not None:
        baseline = {name: one for name, one in beside["losses"].items() if name.rpartition(" ")[0] == BASE}
        found = {"losses": {**baseline, **found["losses"]}, "times": beside["times"]}
    by_way: dict[str, list[list[tuple[int, float]]]] = {}
    for name, one in found["losses"].items():
        by_way.setdefault(name.rpartition(" ")[0], []).append(one["curve"])
    if BASE not in by_way or BASE not in found["times"]:
        return {}
    target = 1.01 * statistics.mean(curve[-1][1] for curve in by_way[BASE])
    rows: dict[str, dict[str, Any]] = {}
    for way, curves in by_way.items():
        if way not in found["times"]:
            continue
        took = [one["seconds"] / one["steps"] for one in found["times"][way]]
        last = [curve[-1][1] for curve in curves]
        reached = [next((step for step, loss in curve if loss <= target), None) for curve in curves]
        steps = [step for step in reached if step is not None]
        sent = statistics.median(one["bytes"] / one["steps"] for one in found["times"][way])
        rows[way] = {
            "seeds": len(curves),
            "mb_a_step": round(sent / 1e6, 5),
            "ms_a_step": [round(1e3 * value, 1) for value in (statistics.median(took), min(took), max(took))],
            "final_loss": [round(value, 3) for value in (statistics.mean(last), min(last), max(last))],
            "reached": len(steps),
            "steps_to_target": statistics.median(steps) if len(steps) == len(curves) else None,
        }
    base = rows[BASE]
    for row in rows.values():
        row["bytes_times_fewer"] = round(base["mb_a_step"] / row["mb_a_step"], 1)
        row["mb_to_target"] = None
        if row["steps_to_target"] is not None:
            row["mb_to_target"] = round(row["steps_to_target"] * row["mb_a_step"], 2)
        row["loss_over_base"] = round(row["final_loss"][0] / base["final_loss"][0], 3)
        row["seconds_to_target"] = row["times_faster"] = None
        if row["steps_to_target"] is not None:
            row["seconds_to_target"] = round(row["steps_to_target"] * row["ms_a_step"][0] / 1e3, 1)
    for row in rows.values():
        if row["seconds_to_target"] and base["seconds_to_target"]:
            row["times_faster"] = round(base["seconds_to_target"] / row["seconds_to_target"], 1)
    return {"target": round(target, 3), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/tinyshakespeare/input.txt"))
    parser.add_argument("--json", type=Path, help="write what was found here, after each piece")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way's steps are timed")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--beside", type=Path, help="a file with the baseline and with the cost of steps")
    parser.add_argument("--load", default="", help="what else ran on the machine, for the file")
    parser.add_argument("--table", action="store_true", help="print what the file shows, and measure nothing")
    hidden = (("--way", str, ""), ("--seed", int, 0), ("--timed", int, 0))
    for name, kind, default in hidden:
        parser.add_argument(name, type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options)
        return
    about: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/lossy.py", *sys.argv[1:]]),
        "machine": machine(),
        "load": options.load,
        "losses": {},
        "times": {},
    }
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        about |= {kind: before[kind] for kind in ("losses", "times")}
    beside = json.loads(options.beside.read_text()) if options.beside else None
    wanted = [(way, None) for _ in range(options.rounds) for way in options.only]
    wanted += [(way, seed) for seed in range(options.seeds) for way in options.only]
    for way, seed in [] if options.table else wanted:
        times = about["times"].get(way, [])
        if f"{way} {seed}" in about["losses"] or (seed is None and len(times) >= options.rounds):
            continue
        try:
            if seed is None:
                about["times"][way] = [*times, measure(way, 0, options, max(EVERY, WAYS[way]))]
            else:
                about["losses"][f"{way} {seed}"] = measure(way, seed, options)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{way} {seed}: left out: {error}", file=sys.stderr, flush=True)
            continue
        about["time"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about["table"] = table(about, beside)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(about, indent=1) + "\n")
        print(f"{way} {'timed' if seed is None else seed}: done {time.strftime('%H:%M:%S')}", flush=True)
    for way, row in table(about, beside).items():
        print(f"{way}: {row}")


if __name__ == "__main__":
    main()
