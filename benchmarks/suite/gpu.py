"""The part of `make bench` for a machine with a CUDA device: a step under Paceline compared with a hand-written step.

benchmarks/gpu/steps.py measures and checks; this module defines the compared ways of training. Each runs in a separate
process, so that none keeps the kernels, memory or switches of another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 600.0


class NoDevice(Exception):
    """Nothing can be measured; the message has the reason."""


def ways(small: bool) -> dict[str, tuple[Any, bool]]:
    """{name: (the load of a step, whether float32 products may use TF32)}. small: models for a CPU."""
    from benchmarks.gpu import steps
    from benchmarks.gpu.check import Place

    place = Place(torch.device("cpu" if small else "cuda:0"), Path(), Path())
    gpt, resnet = steps.gpt2(place), steps.resnet50(place)
    whole = replace(gpt, precision="fp32", optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4, fused=False))
    fused = replace(whole, optimizer=gpt.optimizer)
    found = {
        "GPT-2, fp32": (whole, False),
        "GPT-2, fp32, fused AdamW": (fused, False),
        "GPT-2, tf32, fused AdamW": (fused, True),
        "GPT-2, bf16, fused AdamW": (gpt, False),
        "GPT-2, bf16, fused AdamW, compiled": (steps.gpt2(place, compiled=True), False),
        "ResNet-50, fp32": (replace(resnet, precision="fp32"), False),
        "ResNet-50, tf32": (replace(resnet, precision="fp32"), True),
        "ResNet-50, bf16": (resnet, False),
        "ResNet-50, bf16, compiled": (steps.resnet50(place, compiled=True), False),
    }
    return {name: (replace(load, about=name), tf32) for name, (load, tf32) in found.items()}


def one(name: str, seconds: float, small: bool) -> dict[str, Any]:
    """The figures of one way, in this process."""
    from benchmarks.gpu import steps
    from benchmarks.gpu.check import Place

    load, tf32 = ways(small)[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    place = Place(torch.device("cpu" if small else "cuda:0"), Path(), Path())
    return {"about": load.about} | steps.measured(load, place, seconds)


def measured(seconds: float, small: bool = False) -> dict[str, Any]:
    """The figures of all ways. Raises NoDevice without a CUDA device. seconds: for all ways together."""
    if not small and not torch.cuda.is_available():
        raise NoDevice("there is no CUDA device that torch can use")
    names = list(ways(small))
    found: dict[str, Any] = {"ways": {}, "skipped": {}}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.suite.gpu", name, str(seconds / len(names)), *["small"] * small]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=os.environ | {"PYTHONPATH": path}
            )
        except subprocess.TimeoutExpired:
            found["skipped"][name] = f"not done after {DEADLINE_SECONDS:.0f} s"
            continue
        if done.returncode == 0:
            found["ways"][name] = json.loads(done.stdout.splitlines()[-1])
        else:
            found["skipped"][name] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    return found


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], float(sys.argv[2]), sys.argv[3:] == ["small"])))
