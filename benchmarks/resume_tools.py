"""Run `paceline doctor --resume` on tests/doctor/resume_scripts, and make the table of docs/resume_check.md.

    python benchmarks/resume_tools.py run        # all scripts with 2 processes, into results/resume_tools.json
    python benchmarks/resume_tools.py run --only weather_lit
    python benchmarks/resume_tools.py table

A script that loses something when it resumes counts as found if doctor exits with 1. A script that resumes exactly is
accused if doctor exits with 1. `truth.py` there has measured which script is which, without doctor.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from collate_draws import machine

SCRIPTS = Path(__file__).parents[1] / "tests" / "doctor" / "resume_scripts"
RESULTS = Path(__file__).parent / "results" / "resume_tools.json"
LIBRARIES = ("torch", "accelerate", "lightning", "transformers")
SECONDS = 600


def judge(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """What doctor says of a script: its exit code, causes and time."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        line = [sys.executable, "-m", "paceline", "doctor", "--resume", "--nproc", "2", "--seed", "1"]
        line += ["--checkpoints", "out", "--resume-args", case["resume_args"].replace("{out}", "out")]
        line += ["--json", str(answer), str(SCRIPTS / f"{name}.py"), *case["args"].replace("{out}", "out").split()]
        began = time.monotonic()
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=SECONDS)
        found = json.loads(answer.read_text()) if answer.exists() else {}
    return {
        "tool": case["tool"],
        "faulty": case["faulty"],
        "fault": case["fault"],
        "code": done.returncode,
        "causes": [one["cause"] for one in found.get("findings", [])],
        "not_compared": found.get("not_compared"),
        "seconds": round(time.monotonic() - began, 1),
    }


def run(only: list[str]) -> None:
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scripts": {}}
    known |= {
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    for name, case in sorted(json.loads((SCRIPTS / "cases.json").read_text()).items()):
        if only and name not in only:
            continue
        known["scripts"][name] = judge(name, case)
        print(name, known["scripts"][name], flush=True)
        known["figures"] = figures(known)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def figures(known: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The counts and the seconds of each tool, and of all."""
    scripts = list(known["scripts"].values())
    found: dict[str, dict[str, int]] = {}
    for tool in [*sorted({one["tool"] for one in scripts}), "all"]:
        own = [one for one in scripts if tool in ("all", one["tool"])]
        faulty, exact = ([one for one in own if one["faulty"] is kind] for kind in (True, False))
        found[tool] = {
            "scripts with a fault": len(faulty),
            "found": sum(one["code"] == 1 for one in faulty),
            "exact scripts": len(exact),
            "accused": sum(one["code"] == 1 for one in exact),
            "median s": round(sorted(one["seconds"] for one in own)[len(own) // 2]),
        }
    return found


def table(known: dict[str, Any]) -> str:
    """The figures of each tool, as Markdown."""
    found = figures(known)
    rows = ["| tool | " + " | ".join(found["all"]) + " |", "|---|" + "---|" * len(found["all"])]
    rows += [f"| {tool} | " + " | ".join(map(str, values.values())) + " |" for tool, values in found.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    if options.what == "run":
        run(options.only)
    else:
        print(table(json.loads(RESULTS.read_text())), end="")


if __name__ == "__main__":
    main()
