"""Run every example, small, on 1 and on 2 processes, and under `paceline verify`: `make examples`.

    python benchmarks/all_examples.py
    python benchmarks/all_examples.py --only gan contrastive   # only these; the other rows of the JSON file are kept
    python benchmarks/all_examples.py --json benchmarks/results/examples.json --draw gan
                                         # runs nothing; docs/img/gan.svg, the loss of each step, from that file

A row is ok if both runs end, their figures differ by at most the job's tolerance, and verify finds the same model. A
row that is not ok does not stop the others; then the exit status is 1. A job without its data or its libraries is
skipped, and its row says so. --json saves figures, losses, command, machine and date; benchmarks/results/examples.json
has the figures of the docs.

The tolerances are for float32: in chaotic training (deep batch norm, a GAN) a last bit becomes visible after some
hundred steps, in plain PyTorch too (docs/examples.md). verify checks each step separately, and tests/examples compares
in float64, to show that the mathematics is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES, IMAGES = ROOT / "examples", ROOT / "docs" / "img"
RESULTS = ROOT / "build" / "examples.json"
VERIFIED = {0: "the same", 1: "different", 2: "could not tell"}
VERIFY_STEPS = 3
DEADLINE = 900.0  # seconds that one run may take, and verify
ACCURACY = r"test accuracy ([\d.]+)"
LOSS = r"held-out loss ([\d.]+)"
DATA = {"TEXT": "data/tinyshakespeare/input.txt", "CIFAR10": "data/cifar-10-python.tar.gz",
        "WIKITEXT": "data/wikitext-2", "BCCD": "data/bccd.zip"}  # fmt: skip
"""Variables of the Makefile, and of the environment: where the data are."""


@dataclass(frozen=True)
class Job:
    """An example to run.

    script: below examples/. arguments: with placeholders {data}, {model} and {scratch}. figure: its name with its unit.
    pattern: finds the figure in the output; the last match counts. tolerance: the largest allowed difference of the two
    figures. data: the variable with the path of its data. needs: further libraries. prepare: a script to run first.
    verified: arguments for verify, if seven full runs would take too long.
    """

    script: str
    arguments: str
    figure: str
    pattern: str
    tolerance: float
    data: str | None = None
    needs: tuple[str, ...] = ()
    prepare: str = ""
    verified: str = ""

    @property
    def name(self) -> str:
        return Path(self.script).stem

    def words(self, script: str, arguments: str, scratch: Path) -> list[str]:
        known = {"data": os.environ.get(self.data, DATA[self.data]) if self.data else "", "scratch": scratch}
        return [str(EXAMPLES / script), *(word.format(**known) for word in arguments.split())]

    def obstacle(self) -> str | None:
        """The reason why the job cannot run here; empty if it can."""
        if not (EXAMPLES / self.script).is_file():
            return f"there is no examples/{self.script}"
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"pip install {' '.join(missing)}"
        if self.data and not Path(path := os.environ.get(self.data, DATA[self.data])).exists():
            return f"no data at {path}: make examples {self.data}=PATH"
        return None


HUGGING_FACE = ("transformers", "datasets", "tokenizers", "peft")
BERT = "--data {data} --model {scratch}/bert"
MAKE_BERT = "wikitext.py --data {data} --save {scratch}/bert"
JOBS = [
    Job("digits.py", "--epochs 4", "test accuracy", ACCURACY, 0.01),
    Job("before_and_after/image_after.py", "--epochs 3", "test accuracy", ACCURACY, 0.01),
    Job("before_and_after/text_after.py", "--data {data} --epochs 1", "held-out loss, nats", LOSS, 0.01, "TEXT"),
    Job("migrate/ddp_after.py", "--epochs 2 --out {scratch}/ddp.out", "test accuracy", ACCURACY, 0.01),
    Job("migrate/horovod_after.py", "--epochs 2", "test accuracy", ACCURACY, 0.01),
    Job("char_gpt.py", "--data {data} --steps 150 --layers 2 --width 64 --length 64 --every 150", "held-out loss, nats",
        LOSS, 0.01, "TEXT"),
    Job("nanogpt.py", "--data {data} --steps 150 --layers 2 --width 64 --length 64 --every 150", "held-out loss, nats",
        LOSS, 0.01, "TEXT"),
    Job("cifar10_mobilenetv2.py", "--data {data} --limit 1600 --epochs 2 --width 0.25 --global-batch 32 --lr 0.02",
        "test accuracy", r"val_accuracy ([\d.]+)", 0.1, "CIFAR10"),
    Job("resnet_large_batch.py", "--data {data} --limit 1600 --epochs 4 --warmup 1 --blocks 1 --global-batch 256 "
        "--base-batch 64", "test accuracy", r"val_accuracy ([\d.]+)", 0.05, "CIFAR10"),
    Job("contrastive.py", "--data {data} --limit 1600 --epochs 6 --width 16 --global-batch 200 --every 2",
        "accuracy of nearest neighbours", r"nearest neighbours ([\d.]+)", 0.03, "CIFAR10"),
    Job("gan.py", "--epochs 30 --every 5 --sheet {scratch}/samples.png", "Frechet distance, pixels",
        r"epoch \d+: distance ([\d.]+)", 1.0, verified="--epochs 1"),
    Job("detect.py", "--data {data} --size 160x120 --width 8 --epochs 8 --every 8 --lr 4e-3 "
        "--cache {scratch}/cache",
        "mAP at 0.5", r"mAP@0.5 ([\d.]+)", 0.1, "BCCD", ("pycocotools",),
        verified="--data {data} --size 160x120 --width 8 --epochs 1 --every 1 --cache {scratch}/cache"),
    Job("bert_mlm.py", f"{BERT} --steps 60 --every 60 --length 32 --global-batch 8", "held-out perplexity",
        r"step 60: held-out perplexity ([\d.]+)", 5.0, "WIKITEXT", HUGGING_FACE, MAKE_BERT,
        f"{BERT} --steps 3 --every 3 --length 32 --global-batch 8"),
    Job("finetune_lora.py", f"{BERT} --epochs 2 --classes 5", "test accuracy", ACCURACY, 0.05, "WIKITEXT",
        HUGGING_FACE, MAKE_BERT),
]  # fmt: skip


@dataclass
class Row:
    """The result of a job.

    figures and seconds: on 1 and on 2 processes. points: the figure each time it was printed. losses: of each step.
    verify: its verdict. failed: why the row is not ok. left_out: why the job was not run.
    """

    figure: str
    tolerance: float
    command: str = ""
    time: str = ""
    figures: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    points: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    verify: str = ""
    failed: str = ""
    left_out: str = ""

    def cells(self, name: str) -> list[str]:
        one, two = ([f"{value:g}" for value in self.figures] + ["-", "-"])[:2]
        word = f"left out: {self.left_out}" if self.left_out else self.verify
        return [name, self.figure, one, two, f"{word}; FAILED: {self.failed}" if self.failed else word]


def started(command: Sequence[str]) -> tuple[int, str]:
    """Run a command. Returns its exit status and output. Uses only data sets and models on this machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return 124, f"not done after {DEADLINE:.0f} s"
    return done.returncode, done.stdout + done.stderr


def last_line(printed: str) -> str:
    return (printed.strip().splitlines() or ["nothing was printed"])[-1]


def run(job: Job, scratch: Path) -> Row:
    row = Row(job.figure, job.tolerance, left_out=job.obstacle() or "")
    if row.left_out:
        return row
    row.time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    paceline = [sys.executable, "-m", "paceline"]
    if job.prepare and not (scratch / "bert").is_dir():
        code, printed = started([sys.executable, *job.words(*job.prepare.split(maxsplit=1), scratch)])
        if code:
            row.failed = f"{job.prepare.split()[0]}: {last_line(printed)}"
            return row
    words = job.words(job.script, job.arguments, scratch)
    row.command = shlex.join(["examples/" + job.script, *job.arguments.split()])
    for size in (1, 2):
        logs = scratch / f"{job.name}.{size}"
        settings = scratch / f"{job.name}.{size}.toml"
        settings.write_text(f'log_dir = {json.dumps(str(logs))}\nlog_every = 1\nprogress = "lines"\n')
        began = time.perf_counter()
        code, printed = started([*paceline, "run", "--nproc", str(size), "--config", str(settings), *words])
        found = [float(value) for value in re.findall(job.pattern, printed)]
        if code or not found:
            row.failed = f"{size} of 2 runs: " + (last_line(printed) if code else "no figure was printed")
            return row
        row.seconds.append(round(time.perf_counter() - began, 1))
        row.figures.append(found[-1])
        row.points.append(found)
        lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        row.losses.append([round(line["loss"], 6) for line in lines if "loss" in line])
    if abs(row.figures[0] - row.figures[1]) > job.tolerance:
        row.failed = f"{row.figures[0]:g} and {row.figures[1]:g} are more than {job.tolerance:g} apart"
    words = job.words(job.script, job.verified or job.arguments, scratch)
    code, printed = started([*paceline, "verify", "--nproc", "2", "--steps", str(VERIFY_STEPS), *words])
    row.verify = VERIFIED.get(code, f"exit status {code}")
    if code:
        row.failed = "; ".join(filter(None, [row.failed, f"verify: {last_line(printed)}"]))
    return row


def table(rows: dict[str, Row]) -> str:
    head = ["job", "figure", "1 process", "2 processes", "verify (2 processes, 3 steps)"]
    cells = [head, *(row.cells(name) for name, row in rows.items())]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head) - 1)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[-1]]) for line in cells)


def write(file: Path, kept: dict[str, Any], rows: dict[str, Row]) -> None:
    from collate_draws import machine

    note = {"note": "each job has the time of its own run", "load_over_15_minutes": round(os.getloadavg()[2], 1)}
    result = {
        "command": "make examples",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | note,
        "jobs": kept | {name: dataclasses.asdict(row) for name, row in rows.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result) + "\n")


def draw(document: dict[str, Any], names: Sequence[str]) -> None:
    from curves import picture

    for name in names:
        row = document["jobs"][name]
        curves = dict(zip(("1 process", "2 processes"), row["losses"], strict=True))
        (IMAGES / f"{name}.svg").write_text(picture(curves, row["command"].split()[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], metavar="JOB", help="these jobs alone")
    parser.add_argument("--json", type=Path, default=RESULTS, help="what was found is kept here")
    parser.add_argument("--draw", nargs="+", metavar="JOB", help="run nothing; draw the loss curves of these")
    parser.add_argument("--keep", type=Path, help="leave what the scripts write in this folder")
    options = parser.parse_args()
    document = json.loads(options.json.read_text()) if options.json.is_file() else {}
    if options.draw:
        draw(document, options.draw)
        return 0
    began = time.perf_counter()
    rows: dict[str, Row] = {}
    kept: dict[str, dict[str, Any]] = document.get("jobs", {}) if options.only else {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for job in JOBS:
            if options.only is None or job.name in options.only:
                rows[job.name] = run(job, scratch)
                print("  ".join(rows[job.name].cells(job.name)), flush=True)
                write(options.json, kept, rows)  # save the results so far, in case a later job hangs
    print(f"\n{table(rows)}\n\n{time.perf_counter() - began:.0f} s; {options.json}")
    return int(any(row.failed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
