"""The size of exported files, and the difference of ONNX files from the model.

    python benchmarks/export.py [--json FILE]

The models of the two larger examples, with their initial weights, saved by run.save and exported by `paceline export`.
The differences are those of --check, at batches of 1 and 7.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import paceline
from paceline.export.export_command import ExportOptions, export
from paceline.world import processor

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = {  # name -> the model, and its --input
    "MobileNetV2": ("cifar10_mobilenetv2:mobilenet_v2", "1x3x32x32"),
    "GPT": ("export:gpt", "1x128:int64:65"),
}


def gpt() -> torch.nn.Module:
    from char_gpt import GPT

    return GPT(65, 128, 4, 192)


def measured(name: str, folder: Path) -> list[dict[str, Any]]:
    target, given = MODELS[name]
    module, _, function = target.partition(":")
    torch.manual_seed(0)
    model = getattr(__import__(module), function)()
    run = paceline.start(progress="off", device="cpu")
    run.prepare(model)
    run.save(folder / name)
    run.close()
    rows = []
    for kind in ("safetensors", "torch", "onnx"):
        for dtype in ("fp32", "fp16"):
            file = folder / f"{name}.{dtype}.{kind}"
            own: dict[str, Any] = {"model": target, "input": [given], "check": True} if kind == "onnx" else {}
            said: list[str] = []
            export(ExportOptions(str(folder / name), to=kind, dtype=dtype, output=str(file), **own), said.append)
            row = {
                "model": name,
                "to": kind,
                "dtype": dtype,
                "bytes": file.stat().st_size,
            }
            if kind == "onnx":
                numbers = re.search(r"difference (\S+) at batch 1, (\S+) at batch 7 \(outputs up to (\S+)\)", said[-1])
                assert numbers is not None, said
                row |= dict(zip(("batch_1", "batch_7", "largest_output"), map(float, numbers.groups()), strict=True))
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory() as folder:
        exports = [row for name in MODELS for row in measured(name, Path(folder))]
    document = {
        "command": "python benchmarks/export.py --json benchmarks/results/export.json",
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
        },
        "exports": exports,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
