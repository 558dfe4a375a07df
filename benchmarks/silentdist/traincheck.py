"""TrainCheck (OSDI '25) on the scripts with silent faults, beside `paceline verify` and `paceline doctor`.

    pip install traincheck==0.2.0 torch accelerate lightning transformers         # into an environment of its own
    python benchmarks/silentdist/traincheck.py --python ENVIRONMENT/bin/python --only bert_mlm_counts

TrainCheck infers invariants from the trace of a good run and checks them on another run. Here the good run is the
healthy twin, the nearest reference there is: a user has none for a script that was always wrong. The invariants are
checked on the faulty script and on a second run of the healthy one. The fault counts as found if the faulty script
violates an invariant that the second healthy run does not, the healthy twin as accused if its second run violates any.

All runs are traced in full (traincheck-collect without --invariants) on 2 processes of torchrun, with default options.
The variable of MODELS is tracked. If that stops the script, it is named again where it has its last value, and if that
stops the script too, only calls are traced; `tracked` and `untracked` tell this.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from score import RESULTS, cases, machine

OUT = RESULTS.with_name("silentdist_traincheck.json")
TEXTS = 6
_NAMES = {  # the variable that holds the model, where it is not `model`
    "net": "detector_local_boxes momentum_fsdp rank_skips_bad_micro ridge_flat speckle_workers tabular_rate",
    "ddp": "byol_average head_grown_after_wrap",
    "unet": "accelerate_unwrapped_unet",
    "policy": "arm_observations",
    "backbone": "cosface_weight_outside",
    "student": "distill_kl_local_mean",
    "head": "flow_policy",
    "tagger": "gene_windows",
}
MODELS = {case: name for name, names in _NAMES.items() for case in names.split()}


def call(python: Path, module: str, line: list[str], folder: Path, end: float) -> dict[str, float]:
    """Run a program of TrainCheck in `folder`. Returns its seconds, or raises the errors that it names."""
    began, said = time.monotonic(), folder / f"{module}.txt"
    with said.open("w") as file:
        command = [str(python), "-m", f"traincheck.{module}", *line]
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)
        timer = threading.Timer(max(0.0, end - began), os.killpg, (process.pid, signal.SIGTERM))
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if time.monotonic() > end:
        raise subprocess.SubprocessError(f"{module}: not done in time")
    if process.returncode != 0:
        words = re.sub(r"\x1b\[\d*m", "", said.read_text(errors="replace")).replace("\r", "\n").splitlines()
        errors = [text.strip() for text in words if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception)\b", text)]
        why = " | ".join(dict.fromkeys(errors))[:300]
        raise subprocess.SubprocessError(f"{module}: exit code {process.returncode}: {why}")
    return {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}


def name_again(source: str, model: str) -> str:
    """The script with `traced = model` after the last statement that assigns the model or shards it."""
    after: tuple[int, int, str] = (0, 0, "")
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            values = [one for target in node.targets for one in getattr(target, "elts", [target])]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "fully_shard" in ast.dump(node.value):
            values = node.value.args[:1]
        for text in {ast.unparse(value) for value in values} & {model, f"self.{model}"}:
            after = max(after, (node.end_lineno or 0, node.col_offset, text))
    lines = source.splitlines(keepends=True)
    lines[after[0] : after[0]] = [f"{' ' * after[1]}traced = {after[2]}\n"] * bool(after[0])
    return "".join(lines)


class Case:
    """One case in a folder of its own. `how` the model is tracked: "variable", "named again" or "calls only"."""

    def __init__(self, python: Path, path: Path, folder: Path, seconds: float) -> None:
        self.python, self.path, self.folder, self.end = python, path, folder, time.monotonic() + seconds
        self.model = MODELS.get(path.name, "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]  # the same for all runs: invariants hold arguments

    def collect(self, script: str, name: str, how: str) -> dict[str, float]:
        """Trace a script on 2 processes. The folder has its name afterwards, so that all runs have the same paths."""
        run, source = self.folder / "run", (self.path / script).read_text()
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        source = re.sub(r"^( +)(\w+\.fit\()(\w+\(\))", rf"\1{self.model} = \3\n\1\2{self.model}", source, flags=re.M)
        (run / "train.py").write_text(name_again(source, self.model) if how == "named again" else source)
        launch = f"-m torch.distributed.run --nproc_per_node 2 --master_port {self.port} train.py"
        (run / "run.sh").write_text(f"exec {shlex.quote(str(self.python))} {launch}\n")
        names = {"variable": self.model, "named again": "traced"}
        track = ["--models-to-track", names[how]] if how in names else []
        line = ["-p", "train.py", "-s", "run.sh", *track, "--output-dir", "trace"]
        seconds = call(self.python, "collect_trace", line, run, self.end)
        run.rename(self.folder / name)
        return seconds

    def infer(self) -> dict[str, float]:
        return call(self.python, "infer_engine", ["-f", "trace"], self.folder / "healthy", self.end)

    def check(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """Check a trace. Returns the seconds, and the violated invariants with their texts."""
        line = ["-f", "trace", "-i", "../healthy/invariants.json", "-o", "checked", "--no-html-report"]
        seconds = call(self.python, "checker", line, self.folder / name, self.end)
        text, found, at = (self.folder / name / "checked/trace/failed.log").read_text(), {}, 0
        while at < len(text.rstrip()):
            one, size = json.JSONDecoder().raw_decode(text[at:])
            at += size + 1
            kind = one["invariant"]
            found[json.dumps(kind, sort_keys=True)] = f"{kind['relation']}: {kind['text_description']}"[:160]
        return seconds, found

    def judge(self) -> dict[str, Any]:
        record: dict[str, Any] = {"collected": False, "seconds": {}}
        steps, source = record["seconds"], (self.path / "healthy.py").read_text()
        plain = re.search(rf"^ *(\w+, )*{self.model}(, \w+)* = |\.fit\(\w+\(\)", source, re.M)
        try:
            for how in ("variable", "named again", "calls only")[not plain :]:
                record["tracked"] = how if how == "calls only" else f"{self.model}, {how}"
                try:
                    steps["collect healthy"] = self.collect("healthy.py", "healthy", how)
                    break
                except subprocess.SubprocessError as error:
                    if how == "calls only" or time.monotonic() > self.end:
                        raise
                    record.setdefault("untracked", {})[how] = str(error).replace(str(self.folder), ".")
            with ThreadPoolExecutor(2) as pool:
                inferred = pool.submit(self.infer)
                steps["collect faulty"] = self.collect("faulty.py", "faulty", how)
                steps["collect again"] = self.collect("healthy.py", "again", how)
                steps["infer"] = inferred.result()
                record["collected"] = True
                record["invariants"] = len((self.folder / "healthy/invariants.json").read_text().splitlines())
                checks = {name: pool.submit(self.check, name) for name in ("faulty", "again")}
                steps |= {f"check {name}": check.result()[0] for name, check in checks.items()}
        except subprocess.SubprocessError as error:
            return {**record, "why": str(error).replace(str(self.folder), ".")}
        found, second = (check.result()[1] for check in checks.values())
        only = [text for kind, text in found.items() if kind not in second]
        for key, texts in (
            ("faulty", [*found.values()]),
            ("second healthy", [*second.values()]),
            ("only faulty", only),
        ):
            record[key] = {"violated": len(texts), "texts": texts[:TEXTS]}
        return {**record, "found": bool(only), "healthy accused": bool(second)}


def judge(python: Path, path: Path, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return Case(python, path, Path(folder), seconds).judge()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has TrainCheck")
    parser.add_argument("--only", nargs="+", default=[], help="in this order")
    parser.add_argument("--seconds", type=float, default=480, help="the time limit of a case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once; the seconds are longer then")
    options = parser.parse_args()
    python = options.python.absolute()
    words = [*sys.argv]
    words[words.index(str(options.python))] = "python"
    known: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {"cases": {}}
    ask = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('traincheck', 'torch', 'pandas')))"
    known["versions"] = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    known |= {"command": shlex.join(["python", *words]), "machine": machine(), "time": now}
    known.setdefault("runs", []).append({"command": known["command"], "time": now})
    todo = sorted(cases(options.only), key=lambda one: (options.only or [one[0].name]).index(one[0].name))
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(judge, python, path, options.seconds): (path, case) for path, case in todo}
        for job in as_completed(jobs):
            path, case = jobs[job]
            record = {"kind": case["kind"], "blind": case.get("blind", False), **job.result()}
            known["cases"][path.name] = {**record, "limit": options.seconds, "at_once": options.jobs}
            rows = [one for one in known["cases"].values() if "found" in one]
            known["figures"] = {"tried": len(known["cases"]), "judged": len(rows)}
            known["figures"] |= {key: sum(one[key] for one in rows) for key in ("found", "healthy accused")}
            print(path.name, *(record.get(key) for key in ("tracked", "found", "healthy accused", "why")), flush=True)
            OUT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
