"""The figures and pictures of examples/detect.py in docs/detection.md.

    python benchmarks/detection.py train --data bccd.zip        # trains on 1 process and on 2
    python benchmarks/detection.py processes --data bccd.zip    # scores of one file of weights on 1, 2 and 3 processes

`train` writes benchmarks/results/detection.json, docs/img/detect.jpg (detections of the model of 1 process) and
docs/img/detect.svg (the losses). It saves the weights of 1 process in --weights, for `processes`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from collate_draws import machine
from curves import picture, smoothed
from huggingface import RESULTS, ROOT, paceline

SETTINGS = ["--size", "160x120", "--width", "8", "--epochs", "12", "--lr", "4e-3"]
SMOOTH = 10
SCORE = re.compile(r"((?:m?AP)@\S+(?: \w+)?) (\d\.\d+)")
SCORES = RESULTS / "detection.json"


def detect(size: int, data: Path, folder: Path, *more: str) -> dict[str, dict[str, float]]:
    """Run the example. Returns the scores that it printed, by their labels."""
    settings = {"log_dir": str(folder / "logs"), "log_every": 1, "progress": "off"}
    script = str(ROOT / "examples" / "detect.py"), "--data", str(data), "--cache", str(folder.parent / "cache")
    printed = paceline(size, settings, *script, *SETTINGS, *more)
    lines = [line.split(": ", 1) for line in printed.splitlines() if "mAP@0.5 " in line]
    return {what: {name: float(score) for name, score in SCORE.findall(scores)} for what, scores in lines}


def train(data: Path, folder: Path, weights: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"settings": shlex.join(SETTINGS), "scores": {}, "losses": {}}
    for size, name in ((1, "1 process"), (2, "2 processes")):
        own = folder / str(size)
        saved = weights if size == 1 else own / "detector.safetensors"
        drawn = ["--picture", str(ROOT / "docs" / "img" / "detect.jpg")] if size == 1 else []
        found["scores"][name] = detect(size, data, own, "--every", "4", "--export", str(saved), *drawn)
        lines = [json.loads(line) for line in (own / "logs" / "metrics.jsonl").read_text().splitlines()]
        found["losses"][name] = [round(line["loss"], 4) for line in lines if "loss" in line]
        print(name, found["scores"][name], flush=True)
    drawn_losses = {name: smoothed(losses, SMOOTH) for name, losses in found["losses"].items()}
    one, two = drawn_losses.values()
    found["largest_difference_of_means"] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    title = f"detect.py: {len(one)} steps of 16 images, means over {SMOOTH} steps"
    (ROOT / "docs" / "img" / "detect.svg").write_text(picture(drawn_losses, title))
    return found


def processes(data: Path, folder: Path, weights: Path) -> dict[str, Any]:
    scores = (detect(size, data, folder / str(size), "--evaluate", str(weights)) for size in (1, 2, 3))
    return {"scores": {str(size): next(iter(found.values())) for size, found in enumerate(scores, start=1)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"train": (train, SCORES), "processes": (processes, RESULTS / "detection_processes.json")}
    parser.add_argument("part", choices=[*parts])
    parser.add_argument("--data", type=Path, required=True, help="bccd.zip")
    parser.add_argument("--weights", type=Path, default=Path("detector.safetensors"), help="written, or read")
    options = parser.parse_args()
    run, file = parts[options.part]
    command = f"python benchmarks/detection.py {options.part} --data bccd.zip"
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.data.resolve(), Path(folder) / "runs", options.weights.resolve())
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    note = {"note": "other programs computed on the machine at the same time: nothing here is a time"}
    file.write_text(
        json.dumps({"command": command, "time": time, "machine": machine() | note, **found}, indent=1) + "\n"
    )
    print(json.dumps(found["scores"], indent=1))


if __name__ == "__main__":
    main()
