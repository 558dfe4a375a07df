"""Run the checks of a part, each in a process with a deadline, and write the results.

    PYTHONPATH=src python3 -m benchmarks.gpu --part right --json gpu.json     a part, on the first GPU
    PYTHONPATH=src python3 -m benchmarks.gpu --dry                           builds every check, runs none
    PYTHONPATH=src python3 -m benchmarks.gpu --device cpu                    the checks themselves, on a CPU

The part `several` needs two GPUs, and runs only if it is named.

A part ends after 9 minutes; the remaining checks are listed as not run. Results are added to the file if its results
are from the same machine and torch. "check at fault" means that a check cannot judge: plain PyTorch has failed, or does
not repeat itself. Exit code: 0, or 1 if a check has not passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import everything, page
from benchmarks.gpu.check import PARTS, TIMED, Check, Place

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = 3.0  # multiplies deadlines there, since nothing is measured
LEAST_SECONDS = 10.0  # the remaining time of a part to begin one more check
END_SECONDS = 15.0  # for a launcher to end its ranks after SIGTERM


def dry(checks: list[Check]) -> dict[str, dict[str, Any]]:
    """Build each check, and print the check that it would run."""
    results = {}
    for check in checks:
        steps = check.function(Place(torch.device("meta"), Path(), Path()))
        results[check.name] = {"part": check.part, "status": "dry", "what": next(steps)}
    return results


def run(check: Check, device: str, left: float) -> dict[str, Any]:
    """Run one check in a process, or in one process per rank. Returns its result."""
    seconds = min(check.seconds * (ON_CPU if device == "cpu" else 1.0), left)
    if seconds < LEAST_SECONDS:
        return {"part": check.part, "status": "not run", "error": "the part's minutes were over"}
    if check.part == "several" and device != "cpu":
        device = "cuda"  # each rank chooses its device
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        words = ["-m", "benchmarks.gpu.one", check.name, "--device", device, "--json", str(path)]
        if check.ranks:
            words = ["-m", "paceline", "run", "--nproc", str(check.ranks), "--device", device, *words]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        start = time.monotonic()
        try:
            output, status = process.communicate(timeout=seconds)[0], "failed"
        except subprocess.TimeoutExpired:
            output, status = _end(process), "deadline"
        result: dict[str, Any] = {"part": check.part, "status": status}
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("result.json*"))]
        if found:
            result |= {key: found[0][key] for key in ("what", "figures")}
            result["error"] = "\n".join(of_one["error"] for of_one in found if of_one["error"])
        if found and process.returncode == 0 and all(of_one["passed"] for of_one in found):
            result["status"] = "passed"
        else:
            if any(of_one.get("fault") for of_one in found):
                result["status"] = "check at fault"
            result["output"] = output[-4000:]
            result.setdefault("error", f"no result; exit code {process.returncode}")
        return result | {"seconds": round(time.monotonic() - start, 1)}


def _end(process: subprocess.Popen[str]) -> str:
    """End a check and all its child processes. Returns its output."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=END_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def machine() -> dict[str, Any]:
    """The hardware and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"processor": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0)),
             "accelerators": torch.cuda.device_count(), "torch": torch.__version__,
             "python": platform.python_version()}  # fmt: skip
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="as often as wanted; all, if not given")
    parser.add_argument("--check", action="append", choices=sorted(everything.CHECKS), help="these checks alone")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 or cpu")
    parser.add_argument("--dry", action="store_true", help="build every check and run none")
    parser.add_argument("--minutes", type=float, default=9.0, help="the most that a part takes")
    parser.add_argument("--at-once", type=int, default=1, help="checks side by side, where nothing is timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a page in Markdown of all that the JSON file then holds")
    args = parser.parse_args()
    parts = args.part or [part for part in PARTS if part != "several" or args.dry or args.check]
    chosen = [check for check in everything.CHECKS.values() if check.name in (args.check or everything.CHECKS)]
    chosen = [check for check in chosen if check.part in parts]
    results = dry(chosen) if args.dry else {}
    for name, result in results.items():
        say(name, result)
    if args.dry:
        return 0
    if args.device != "cpu" and not torch.cuda.is_available():
        print("There is no CUDA device that torch can use. --dry builds the checks; --device cpu runs them on the CPU.")
        return 2
    if args.device != "cpu" and torch.cuda.device_count() < 2 and any(check.part == "several" for check in chosen):
        print("The part `several` needs two GPUs, and torch sees one. --device cpu runs its checks on the CPU.")
        return 2
    for part in parts:
        of_part = [check for check in chosen if check.part == part]
        end = time.monotonic() + 60 * args.minutes
        with ThreadPoolExecutor(1 if part in TIMED else args.at_once) as pool:
            pending = {check: pool.submit(lambda c: run(c, args.device, end - time.monotonic()), check)  # noqa: B023
                       for check in of_part}  # fmt: skip
            for check, future in pending.items():
                results[check.name] = future.result()
                say(check.name, results[check.name])
                if args.json:  # immediately, since this command may be killed too
                    write(args.json, {check.name: results[check.name]})
    if args.json and args.page:
        page.write(args.json, args.page)
    return int(any(result["status"] != "passed" for result in results.values()))


def say(name: str, result: dict[str, Any]) -> None:
    took = f" in {result['seconds']} s" if "seconds" in result else ""
    about = result.get("error") or result.get("what") or ""
    print(f"{result['status']:8} {result['part']:6} {name}{took}: {about}", flush=True)


def write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add the results to those in the file from the same machine."""
    here, date = machine(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    before = json.loads(path.read_text()) if path.exists() else {}
    checks = before["checks"] if before.get("machine") == here else {}
    command = " ".join(["python3 -m benchmarks.gpu", *sys.argv[1:]])
    checks |= {name: result | {"command": command, "time": date} for name, result in results.items()}
    part = path.with_name(f"part of {path.name}")
    part.write_text(json.dumps({"command": command, "time": date, "machine": here, "checks": checks}, indent=1) + "\n")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
