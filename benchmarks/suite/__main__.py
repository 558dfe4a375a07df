"""`make bench`: time the contenders on each model, and write the JSON and its page.

    python -m benchmarks.suite --processes 4 --models mlp gpt --seconds 60

Each number of processes has a file: benchmarks/results/bench_4.json. A model's figures are written when it is done, and
replace its figures in the file. Results from another machine or another torch are removed first. The page shows all
files. Exit code: 0, or 1 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.__main__ import machine
from benchmarks.suite import gpu, page
from benchmarks.suite.contenders import ROOT, contenders
from benchmarks.suite.measure import LAUNCHES, measured
from benchmarks.suite.models import MODELS, NoData, Sources

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
GPU = "gpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8, 16), default=2, help="of each contender")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, GPU], default=[*MODELS, GPU])
    parser.add_argument("--contenders", nargs="+", metavar="WORDS", help="those whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=180.0, help="of rounds, for each model")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of each contender, for each model")
    parser.add_argument("--cifar10", type=Path, default=ROOT / "data" / "cifar-10-python.tar.gz", help="or cifar10.zip")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "tinyshakespeare" / "input.txt")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="a page in Markdown of all JSON files")
    parser.add_argument("--note", help="what a reader should know of this run, such as other programs beside it")
    options = parser.parse_args()
    every = contenders(options.processes)
    chosen = [
        one
        for one in every
        if not options.contenders or any(words.lower() in one.name.lower() for words in options.contenders)
    ]
    if not chosen:
        parser.error(f"--contenders {options.contenders}: the names are {', '.join(one.name for one in every)}")
    uneven = [name for name in options.models if name != GPU and MODELS[name].global_batch % options.processes]
    if uneven:
        parser.error(f"--processes {options.processes}: must divide the global batches of {', '.join(uneven)}")
    torch.set_num_threads(1)
    done = 0
    for name in options.models:
        print(f"{name}:", flush=True)
        load = os.getloadavg()[0]
        try:
            if name == GPU:
                found = gpu.measured(options.seconds)
            else:
                found = measured(
                    name, chosen, Sources(options.cifar10, options.text), options.seconds, options.launches
                )
        except (NoData, gpu.NoDevice) as error:
            found = {"left_out": str(error)}
            print(f"  left out: {error}", flush=True)
        else:
            done += 1
        shown = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]  # hide local paths
        found |= {
            "command": shlex.join(["python", "-m", "benchmarks.suite", *shown]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "load before": round(load, 1),
        }
        if options.note:
            found["note"] = options.note
        processes = 1 if name == GPU else options.processes
        write(options.results / f"bench_{processes}.json", processes, name, found)
        for line in page.said(name, found):
            print(f"  {line}", flush=True)
    page.write(options.results, options.page)
    return 0 if done else 1


def write(path: Path, processes: int, name: str, found: dict[str, Any]) -> None:
    """Put the figures of a model into the file."""
    here = machine()
    before = json.loads(path.read_text()) if path.exists() else {}
    models = before["models"] if before.get("machine") == here else {}
    if "left_out" in found and "left_out" not in models.get(name, {"left_out": ""}):
        return  # keep the earlier result
    models[name] = found
    ordered = {key: models[key] for key in [*MODELS, GPU] if key in models}
    part = path.with_name(f"part of {path.name}")
    about = {"command": found["command"], "time": found["time"], "machine": here, "processes": processes}
    document = about | {"models": ordered}
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
