"""Measures `paceline verify` and `paceline doctor` on the corpus, and writes what they said.

    python -m tests.corpus.measure run verify RESULTS.json [NAME ...]     # or doctor; goes on where it was stopped
    python -m tests.corpus.measure table RESULTS.json                     # the rates and the misses, as in the docs

Doctor runs as the command does. Of verify the decision and its runs are those of the command, but the processes are
forked from ones that have imported torch already (tests/ranks.py): five runs of a script cost five imports otherwise.
With --command it runs as the command does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.corpus.truth import SECOND, fault_lines, fault_of, scripts

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
DEADLINE = {"verify": 240, "doctor": 90}  # seconds for one run
OF_AN_ANSWER = (
    "code", "text", "cause", "step", "quantity", "parameter", "file", "line", "source", "beside", "notes",
)  # fmt: skip
OF_A_FINDING = ("cause", "changes_model", "kind", "file", "line", "beside", "title", "evidence")
Result = dict[str, Any]


# --- running


def run_verify(script: Path) -> Result:
    """The answer's document, from runs in forked processes."""
    from tests.ranks import run_ranks

    from paceline.errors import PacelineError
    from paceline.trials.spec import TrialSpec
    from paceline.trials.start import Script, Start
    from paceline.verify.decision import decide
    from paceline.verify.runs import Runs, VerifyOptions

    class Forked(Runs):
        def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
            given = {"strategy": start.strategy and str(start.strategy), "precision": start.precision}
            settings = {key: value for key, value in given.items() if value is not None} | {"device": "cpu"}
            work = {"name": name, "script": str(script), "args": [], "settings": settings, "spec": spec.to_json()}
            try:
                found = run_ranks(start.processes, "tests.verify.job:run", json.dumps([work]), deadline=240)
            except AssertionError as error:  # its ranks went apart
                return str(error)
            return next((why for rank in found for why in rank.values()), None)

    with tempfile.TemporaryDirectory() as folder:
        options = VerifyOptions(Script(str(script), (), False, {"device": "cpu"}), PROCESSES)
        try:
            document = decide(Forked(options, PROCESSES, folder, int)).document()
        except PacelineError as error:
            return {"code": 2, "text": f"{type(error).__name__}: {error}", "cause": None}
    return {key: plain(document[key]) for key in OF_AN_ANSWER if document.get(key) is not None}


def run_doctor(script: Path) -> Result:
    """The findings, from a run in forked processes. For scripts whose collectives match: nobody ends one that hangs."""
    from tests.ranks import run_ranks

    from paceline.doctor.doctor_command import diagnose

    with tempfile.TemporaryDirectory() as folder:
        failed = run_ranks(PROCESSES, "tests.corpus.measure:watched", str(script), folder, deadline=DEADLINE["doctor"])
        _, found = diagnose(folder, PROCESSES)
    findings = [{key: finding.as_json().get(key) for key in OF_A_FINDING} for finding in found]
    return {"findings": findings, "failed": next(filter(None, failed), None)}


def watched(script: str, folder: str) -> str | None:
    """On one rank: run the script under doctor's recorders. Returns the traceback with which it failed."""
    import torch.distributed as dist

    from paceline.comm import process_group
    from paceline.doctor.recorders import install
    from paceline.launcher.worker import run_script

    process_group.leave()  # the script makes a group of its own, in the launcher's store, beside those of other scripts
    original, rank, size = dist.init_process_group, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def init_process_group(backend: str | None = None, **options: object) -> None:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        original(backend, store=dist.PrefixStore(script, store), rank=rank, world_size=size)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    os.chdir(folder)
    log = install({"directory": folder, "steps": None}, "script", script)
    failed = None
    try:
        run_script(script, [])
    except SystemExit:
        pass
    except Exception:
        failed = traceback.format_exc()
    log.finish()
    return failed


def plain(value: Any) -> Any:
    """JSON's kinds of values only: notes may be records."""
    return json.loads(json.dumps(value, default=str))


def run_command(tool: str, script: Path) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        paceline = str(Path(sys.executable).with_name("paceline"))
        command = [paceline, tool, "--nproc", str(PROCESSES), "--deadline", str(DEADLINE[tool]), "--json", str(out)]
        done = subprocess.run([*command, script.name], capture_output=True, text=True, cwd=script.parent, timeout=1500)
        if not out.exists():
            raise RuntimeError(f"{script.stem}: paceline {tool} wrote nothing: {done.stderr[-2000:]}")
        document = json.loads(out.read_text())
    if tool == "verify":
        return {key: document[key] for key in OF_AN_ANSWER if document.get(key) is not None}
    findings = [{key: finding.get(key) for key in OF_A_FINDING} for finding in document["findings"]]
    return {"code": document["exit_code"], "not_watched": document["not_watched"], "findings": findings}


def circumstances(command: str) -> Result:
    """What a file of results says of itself, in the words of `paceline compare --json`."""
    import torch

    from paceline.launcher.plan import available_cores

    processors = Path("/proc/cpuinfo").read_text().splitlines()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "command": command,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "machine": {
            "processor": next((line.split(": ")[1] for line in processors if line.startswith("model name")), "?"),
            "cores": available_cores(),
            "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def run(tool: str, path: Path, names: Iterable[str], command: bool) -> None:
    """Runs every script that has no result yet (or those that are named), and writes the file after each."""
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    document |= circumstances(f"python -m tests.corpus.measure run {tool}")
    document["tool"] = tool
    names = set(names)
    for script in scripts(tool):
        if (names and script.stem not in names) or (not names and script.stem in document["results"]):
            continue
        began = time.monotonic()
        by_fork = tool == "verify" and not command
        result = run_verify(script) if by_fork else run_command(tool, script)
        result |= {"how": "forked" if by_fork else "command", "commit": document["commit"]}
        if "ModuleNotFoundError" in json.dumps(result):
            print(f"{script.stem:36} left out: a library is missing", flush=True)
            continue
        document["results"][script.stem] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        document["rates"] = parts(document)
        path.write_text(json.dumps(document, indent=1) + "\n")
        verdict = judged(tool, script.stem, result)
        print(f"{script.stem:36} {time.monotonic() - began:4.0f} s  {summary(verdict)}", flush=True)


# --- judging


def script_of(tool: str, name: str) -> Path:
    return Path(__file__).parent / tool / f"{name}.py"


def judged(tool: str, name: str, result: Result) -> Result:
    """Of one script: is the fault found, with the right cause, at the right line; of a healthy one: is it accused.

    found: verify says "different" (or, where the truth says so, "not deterministic"); doctor has a finding that changes
    the model, or one that names the fault. cause: one of those that truth.py takes for right. line: a marked one is
    shown with such a cause; verify may show two ("At ...", "with ...").
    """
    script = script_of(tool, name)
    fault, marked = fault_of(script), fault_lines(script)
    if tool == "verify":
        said = [result] if result.get("code") == 1 or (fault and result.get("cause") in fault.causes) else []
        accused = result.get("code") == 1
    else:
        right = fault.causes if fault else ()
        said = [f for f in result.get("findings", []) if f["changes_model"] or f["cause"] in right]
        accused = any(f["changes_model"] for f in said)
    if fault is None:
        unclear = result.get("code") == 2 and not accused
        return {"fault": False, "accused": accused, "unclear": unclear, "causes": [f.get("cause") for f in said]}
    right = [f for f in said if f.get("cause") in fault.causes]
    lines = [f for f in right if any(file == script.name and number in marked for file, number in places(f))]
    return {
        "fault": True,
        "found": bool(said),
        "cause": bool(right),
        "line": bool(lines),
        "unclear": not said and result.get("code") == 2,
        "causes": [f.get("cause") for f in said],
        "besides": sorted({f["cause"] for f in said if f not in right}) if right and tool == "doctor" else [],
    }


def places(said: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The lines that an answer shows: that of the fault, and the one that verify sets beside it."""
    beside, _, number = (said.get("beside") or "").rpartition(":")
    claim_from = [(said.get("file") or "", said.get("line") or 0), (beside, int(number or 0))]
    return [(Path(file).name, line) for file, line in claim_from if file]


def summary(verdict: Mapping[str, Any]) -> str:
    causes = ", ".join(map(str, verdict["causes"])) or "-"
    if not verdict["fault"]:
        return ("ACCUSED " if verdict["accused"] else "could not tell " if verdict["unclear"] else "ok ") + causes
    marks = "".join("+" if verdict[key] else "." for key in ("found", "cause", "line"))
    return f"{marks} {causes}" + (" (could not tell)" if verdict["unclear"] else "")


def rates(document: Result, among: Callable[[str], bool] = lambda name: True) -> Result:
    """Counts, and who is counted, of the scripts that have a result."""
    tool = document["tool"]
    verdicts = {name: judged(tool, name, r) for name, r in document["results"].items() if among(name)}
    faulty = {name: v for name, v in verdicts.items() if v["fault"]}
    healthy = {name: v for name, v in verdicts.items() if not v["fault"]}
    return {
        "faulty": len(faulty),
        "found": sum(v["found"] for v in faulty.values()),
        "cause": sum(v["cause"] for v in faulty.values()),
        "line": sum(v["line"] for v in faulty.values()),
        "healthy": len(healthy),
        "accused": sum(v["accused"] for v in healthy.values()),
        "unclear": sum(v["unclear"] for v in healthy.values()),
        "who is accused": sorted(name for name, v in healthy.items() if v["accused"]),
        "who is unclear": sorted(name for name, v in healthy.items() if v["unclear"]),
        "not found": sorted(name for name, v in faulty.items() if not v["found"]),
        "other cause": sorted(name for name, v in faulty.items() if v["found"] and not v["cause"]),
        "other line": sorted(name for name, v in faulty.items() if v["cause"] and not v["line"]),
    }


def parts(document: Result) -> dict[str, Result]:
    """The rates of each set of which the document has results."""
    second = SECOND[document["tool"]]
    sets: dict[str, Callable[[str], bool]] = {
        "first set": lambda name: name not in second,
        "second set": lambda name: name in second,
    }
    return {title: rates(document, among) for title, among in sets.items() if any(map(among, document["results"]))}


# --- the docs


def table(document: Result) -> str:
    """Markdown: the rates, a row for each set. The document lists the misses by name."""
    columns = (
        ("faults found", "found", "faulty"),
        ("right cause", "cause", "faulty"),
        ("right line", "line", "faulty"),
        ("healthy accused", "accused", "healthy"),
        ("healthy, could not tell", "unclear", "healthy"),
    )
    rows = ["| | " + " | ".join(words for words, _, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for title, found in parts(document).items():
        cells = (f"{found[key]} of {found[total]}" for _, key, total in columns)
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    running = commands.add_parser("run")
    running.add_argument("tool", choices=["verify", "doctor"])
    running.add_argument("file", type=Path)
    running.add_argument("names", nargs="*")
    running.add_argument("--command", action="store_true", help="verify as the command does")
    commands.add_parser("table").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.what == "run":
        run(options.tool, options.file, options.names, options.command)
        return
    print(table(json.loads(options.file.read_text())), end="")


if __name__ == "__main__":
    main()
