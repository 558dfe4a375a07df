"""torch.compile; and verify, doctor and compare on a user's script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.gpu.jobs import Way
from benchmarks.gpu.right import trained

KILLED = Path(__file__).with_name("killed_script.py")
SCRIPT = Path(__file__).with_name("script.py")
BY_HAND = Path(__file__).with_name("script_by_hand.py")


@check("ranks", 300)
def compiled_models(place: Place) -> Steps:
    """Under torch.compile: the model, its graph breaks, and the number of recompilations."""
    from torch._dynamo.utils import counters

    yield "convolutions with batch norm, and a transformer, in both forms: compiled beside eager"
    found, wrong = {}, []
    for name, job, way in (
        ("convolutions", jobs.CONV_TO_COMPILE, Way("loop", settings={"compile": True})),
        ("convolutions, closure", jobs.CONV_TO_COMPILE, Way("closure", settings={"compile": True})),
        ("transformer", jobs.GPT, Way("loop", count="tensor", settings={"compile": True})),
        ("transformer in bf16", jobs.GPT, Way("loop", count="tensor", precision="bf16", settings={"compile": True})),
    ):
        torch._dynamo.reset()
        counters.clear()
        models, order = trained(place, job, way)
        theirs = jobs.plain(job, way, order, place.device)
        apart = jobs.apart(models, theirs, job.make())
        frames, stats = dict(counters["frames"]), dict(counters["stats"])
        breaks = {str(reason)[:120]: count for reason, count in counters["graph_break"].items()}
        found[name] = {"difference": apart, "graphs": stats.get("unique_graphs", 0), "graph breaks": breaks,
                       "frames": frames, "compiled anew": sum(counters["recompiles"].values())}  # fmt: skip
        limit = max(1e-3, jobs.limit(way.precision))  # fused kernels round less
        wrong += [f"{name}: {apart:.1e}"] * (not apart <= limit)
        wrong += [f"{name}: nothing was compiled"] * (not found[name]["graphs"])
    yield found
    assert not wrong, "differ: " + "; ".join(wrong)


def command(place: Place, *words: str, seconds: float = 240) -> tuple[int, str]:
    """Run `paceline` in the check's folder. Returns (exit code, output)."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], cwd=place.folder, capture_output=True, text=True, timeout=seconds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2] / "src"), str(SCRIPT.parents[2])])},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def chosen(place: Place) -> str:
    return "cuda:0" if place.device.type == "cuda" else "cpu"


@check("ranks", 300)
def verify_says_the_same(place: Place) -> Steps:
    yield f"paceline verify --nproc 2 --device {chosen(place)} {SCRIPT.name}"
    code, text = command(
        place, "verify", "--nproc", "2", "--device", chosen(place), "--json", "found.json", str(SCRIPT)
    )
    yield {"exit code": code, "told": text[-1500:]}
    assert code == 0, f"exit code {code}: {text[-3000:]}"


@check("ranks", 300)
def doctor_finds_nothing_in_a_right_script(place: Place) -> Steps:
    yield f"paceline doctor --nproc 1 {BY_HAND.name}: DDP by hand, over NCCL where there is a GPU"
    code, text = command(place, "doctor", "--nproc", "1", "--json", "found.json", str(BY_HAND), chosen(place))
    found = json.loads((place.folder / "found.json").read_text())["findings"] if code in (0, 1) else []
    wrong = [finding["cause"] for finding in found if finding["changes_model"]]
    yield {"exit code": code, "findings": [finding["cause"] for finding in found]}
    assert (code, wrong) == (0, []), f"exit code {code}: {text[-3000:]}"


@check("ranks", 400)
def compare_measures_strategies(place: Place) -> Steps:
    names = "ddp,fsdp:stage=3,local_sgd"
    yield f"paceline compare --nproc 2 --device {chosen(place)} --strategies {names} {SCRIPT.name}"
    code, text = command(
        place, "compare", "--nproc", "2", "--device", chosen(place), "--strategies", names, "--steps", "10", "--rounds",
        "1", "--json", "found.json", str(SCRIPT), seconds=390,
    )  # fmt: skip
    figures: dict[str, Any] = {"exit code": code, "told": text[-3000:]}
    yield figures
    assert code == 0, f"exit code {code}: {text[-3000:]}"


@check("ranks", 200)
def a_restart_goes_on_from_memory(place: Place) -> Steps:
    words = "run", "--nproc", "1", "--max-restarts", "1", "--memory-every", "4", "--device", chosen(place), str(KILLED)
    yield f"paceline {' '.join(words[:-1])} {KILLED.name}, undisturbed and killed"
    ends = []
    for step in ("-1", "14"):
        code, text = command(place, *words, step)
        assert code == 0, f"exit code {code}: {text[-3000:]}"
        ends.append(next(line for line in text.splitlines() if line.startswith("ends")).split()[1:])
    yield {"goes on after step": int(ends[1][0]), "hashes": [digest for _, digest in ends]}
    (began, straight), (resumed, restarted) = ends
    assert (began, resumed) == ("0", "12"), f"went on after steps {began} and {resumed}, not 0 and 12"
    assert straight == restarted, "other weights"
