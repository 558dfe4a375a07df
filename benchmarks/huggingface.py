"""The figures of bert_mlm.py and finetune_lora.py in docs/examples.md.

    python benchmarks/huggingface.py curve --data wikitext-2/    # the loss of each step on 1 and on 2 processes
    python benchmarks/huggingface.py losses --data wikitext-2/   # two losses on 1, 2 and 4 processes
    python benchmarks/huggingface.py lora --data wikitext-2/ --model FOLDER     # accuracy and bytes, by strategy
    python benchmarks/huggingface.py draw                        # docs/img/bert_mlm.svg, from the JSON of `curve`

Each writes benchmarks/results/huggingface_<part>.json. `losses` trains the example twice from the same weights, in
float64: with the example's loss (the sum and the count of masked words), and with `model(**batch).loss` as a mean over
examples. It compares the exported weights with those of the same loss on one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from collate_draws import machine
from curves import picture
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "examples"))
ZERO_GRADIENT = "attention.self.key.bias", "attention.key.bias"
"""Parameters with gradients of zero, except for rounding. Adam turns that into full steps, in plain PyTorch too."""
SIZES = (1, 2, 4)
CURVE_STEPS, LOSS_STEPS = 600, 60


def paceline(processes: int, settings: dict[str, Any], *command: str) -> str:
    """Run `paceline`. Returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "settings.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        start = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--config", str(config)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*start, *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} on {processes} processes failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def make(folder: Path, data: Path, kind: str = "bert") -> None:
    import wikitext

    wikitext.make(folder, [text for _, text in wikitext.paragraphs(data)], kind)


def curve(data: Path, folder: Path, model: Path | None) -> dict[str, Any]:
    """Run bert_mlm.py. Returns the loss of each step, and its held-out results. Saves the model in `model`."""
    given = folder / "untrained"
    make(given, data)
    found: dict[str, Any] = {"steps": CURVE_STEPS, "losses": {}, "held_out_perplexity": {}}
    for size in (1, 2):
        saved = model if model and size == 1 else folder / f"trained.{size}"
        logs = folder / f"logs.{size}"
        script = [str(ROOT / "examples" / "bert_mlm.py"), "--data", str(data), "--model", str(given)]
        settings = {"log_dir": str(logs), "log_every": 1, "progress": "off"}
        printed = paceline(size, settings, *script, "--steps", str(CURVE_STEPS), "--every", "100", "--save", str(saved))
        lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        name = "1 process" if size == 1 else f"{size} processes"
        found["losses"][name] = [round(line["loss"], 8) for line in lines if "loss" in line]
        points = re.findall(r"step (\d+): held-out perplexity (\S+)", printed)
        found["held_out_perplexity"][name] = {step: float(value) for step, value in points}
        print(name, found["held_out_perplexity"][name], flush=True)
    one, two = found["losses"].values()
    found["largest_difference"] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The 2-norm of the difference, divided by the 2-norm of all weights."""
    names = [name for name in one if not name.endswith(ZERO_GRADIENT)]
    apart = sum(float((one[name] - other[name]).square().sum()) for name in names)
    return math.sqrt(apart / sum(float(one[name].square().sum()) for name in names))


def train_with_both(data: Path, folder: Path) -> None:
    """The worker of `losses`: the example with each loss, in this process group."""
    import bert_mlm

    torch.set_default_dtype(torch.float64)
    exact = bert_mlm.loss_fn

    def mean_of_means(model: Any, batch: Any) -> Any:
        return model(**batch).loss if model.training else exact(model, batch)

    losses: dict[str, Any] = {"total": exact, "mean": mean_of_means}
    for kind in ("bert", "albert"):
        for name, loss_fn in losses.items():
            bert_mlm.loss_fn = loss_fn
            saved = folder / f"{kind}.{name}.{os.environ.get('WORLD_SIZE', '1')}"
            options = ["--data", str(data), "--model", str(folder / kind), "--global-batch", "8", "--length", "32"]
            sys.argv = ["bert_mlm.py", *options, "--steps", str(LOSS_STEPS), "--every", "1000", "--save", str(saved)]
            bert_mlm.main()


def losses(data: Path, folder: Path, model: Path | None) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    for kind in ("bert", "albert"):
        make(folder / kind, data, kind)
    found: dict[str, Any] = {"steps": LOSS_STEPS, "dtype": "float64", "distance_from_1_process": {}, "perplexity": {}}
    for size in SIZES:
        worker = [str(Path(__file__)), "worker", "--data", str(data), "--folder", str(folder)]
        printed = paceline(size, {"progress": "off"}, *worker)
        perplexity = [float(value) for value in re.findall(rf"step {LOSS_STEPS}: held-out perplexity (\S+)", printed)]
        runs = [f"{kind}, {name}" for kind in ("bert", "albert") for name in ("total", "mean")]
        for run, value in zip(runs, perplexity, strict=True):
            name = run.replace(", ", ".")
            one, own = (load_file(folder / f"{name}.{n}" / "model.safetensors") for n in (1, size))
            found["distance_from_1_process"].setdefault(run, {})[str(size)] = distance(one, own)
            found["perplexity"].setdefault(run, {})[str(size)] = value
        print(size, {run: values[str(size)] for run, values in found["distance_from_1_process"].items()}, flush=True)
    return found


def lora(data: Path, folder: Path, model: Path | None) -> dict[str, Any]:
    if model is None:
        raise SystemExit("lora needs --model, a folder that `curve --model` or bert_mlm.py --save has written")
    found: dict[str, Any] = {"runs": {}}
    script = [str(ROOT / "examples" / "finetune_lora.py"), "--data", str(data), "--model", str(model), "--save"]
    first: dict[str, torch.Tensor] = {}
    for size, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        saved = folder / f"{strategy}.{size}"
        settings = {"progress": "off", "strategy": strategy}
        printed = paceline(size, settings, *script, str(saved), "--checkpoints", str(saved / "checkpoints"))
        trained = re.search(r"([\d,]+) of ([\d,]+) parameters", printed)
        assert trained is not None
        adapter = load_file(saved / "adapter_model.safetensors")
        first = first or adapter
        newest = max((saved / "checkpoints").glob("*/"), key=lambda path: path.stat().st_mtime)
        found["runs"][f"{size}, {strategy}"] = {
            "trained": int(trained[1].replace(",", "")),
            "parameters": int(trained[2].replace(",", "")),
            "accuracy": [float(value) for value in re.findall(r"test accuracy (\S+)", printed)],
            "distance_from_1_process": distance(first, adapter),
            "adapter_bytes": (saved / "adapter_model.safetensors").stat().st_size,
            "export_bytes": (saved / "whole" / "model.safetensors").stat().st_size,
            "checkpoint_bytes": sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()),
        }
        print(f"{size}, {strategy}", found["runs"][f"{size}, {strategy}"], flush=True)
    return found


def draw() -> None:
    found = json.loads((RESULTS / "huggingface_curve.json").read_text())
    steps = min(len(losses) for losses in found["losses"].values())  # a stopped run has fewer
    title = f"bert_mlm.py: {steps} steps of 16 x 64 tokens of WikiText-2"
    drawn = {name: losses[:steps] for name, losses in found["losses"].items()}
    (ROOT / "docs" / "img" / "bert_mlm.svg").write_text(picture(drawn, title))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"curve": curve, "losses": losses, "lora": lora}
    parser.add_argument("part", choices=[*parts, "draw", "worker"])
    parser.add_argument("--data", type=Path, help="WikiText-2, a folder")
    parser.add_argument("--model", type=Path, help="curve: leave the trained model here; lora: start from it")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "draw":
        draw()
        return
    if options.data is None:
        parser.error("--data is missing: a folder with the texts of WikiText-2")
    if options.part == "worker":
        train_with_both(options.data, options.folder)
        return
    command = "python benchmarks/huggingface.py " + options.part + " --data wikitext-2/"
    command += " --model FOLDER" * (options.model is not None)
    about = {"command": command, "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    with tempfile.TemporaryDirectory() as folder:
        found = parts[options.part](options.data, Path(folder), options.model)
    note = {"note": "other programs computed on the machine at the same time: nothing here is a time"}
    result = {**about, "machine": machine() | note, **found}
    (RESULTS / f"huggingface_{options.part}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
