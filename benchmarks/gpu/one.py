"""Run one check in this process, and write its result.

    python -m benchmarks.gpu.one NAME --device cuda:0 --json FILE

Under `paceline run` all ranks run it, and each writes a separate file: FILE.RANK.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.gpu import everything
from benchmarks.gpu.check import Check, CheckFault, Place

Result = dict[str, object]


def run(check: Check, place: Place, keep: Callable[[Result], None]) -> None:
    """Run a check, and save its result so far and at the end.

    The result: {"passed", "fault", "what", "figures", "seconds", "error"}.
    """
    figures: dict[str, object] = {}
    what, error, fault, start = "", "", False, time.perf_counter()
    try:
        for given in check.function(place):
            if isinstance(given, str):
                what = given
            else:
                figures |= given
            so_far = {"passed": False, "what": what, "figures": figures, "seconds": time.perf_counter() - start}
            keep(so_far | {"error": "it was ended before it had come to its end"})
        if place.device.type == "cuda":
            torch.cuda.synchronize()  # a kernel's error may be raised only here
    except Exception as caught:
        message, fault = f"{type(caught).__name__}: {caught}", isinstance(caught, CheckFault)
        error = message if isinstance(caught, (AssertionError, CheckFault)) else f"{message}\n{traceback.format_exc()}"
    took = round(time.perf_counter() - start, 1)
    keep({"passed": not error, "fault": fault, "what": what, "figures": figures, "seconds": took, "error": error})
    if error:
        raise SystemExit(f"{check.name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        if device.index is None:  # each rank chooses its device
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # nothing is measured there, and other programs may run beside it
    rank = os.environ.get("RANK")
    path = args.json if rank is None else args.json.with_name(f"{args.json.name}.{rank}")
    shared = args.json.with_name("shared")
    shared.mkdir(exist_ok=True)

    def keep(result: Result) -> None:
        part = path.with_name(f"part of {path.name}")
        part.write_text(json.dumps(result, indent=1))
        part.rename(path)  # atomically, since the check may be killed at any time

    with tempfile.TemporaryDirectory() as folder:
        run(everything.CHECKS[args.name], Place(device, Path(folder), shared), keep)


if __name__ == "__main__":
    main()
