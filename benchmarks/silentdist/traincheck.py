"""TrainCheck (OSDI '25) on the scripts with silent faults, beside `paceline verify` and `paceline doctor`.

    pip install traincheck==0.2.0 torch accelerate lightning transformers         # into an environment of its own
    python benchmarks/silentdist/traincheck.py --python ENVIRONMENT/bin/python --only bert_mlm_counts

TrainCheck infers invariants from the trace of a good run and checks them on another run. Here the good run is the
healthy twin, the nearest reference there is: a user has none for a script that was always wrong. The invariants are
checked on the faulty script and on a second run of the healthy one. The fault counts as found if the faulty script
violates an invariant that the second healthy run does not, the healthy twin as accused if its second run violates any.

All runs are traced in full (traincheck-collect without --invariants) on 2 processes of torchrun, with default options,
in the same folder and with the same port: invariants hold arguments. The variable of MODELS is tracked. If that stops
the script, it is named again where it has its last value, and if that stops the script too, only calls are traced;
`tracked` and `untracked` tell this.
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
    if process.returncode != 0:
        if time.monotonic() > end:
            raise subprocess.SubprocessError(f"{module}: not done in time")
        words = re.sub(r"\x1b\[\d*m|\r", "", said.read_text(errors="replace"))
        errors = re.findall(r"^(?:\[rank\d\]: )?[\w.]*(?:Error|Exception)\b.*|Signal \d+ \(\w+\)", words, re.M)
        raise subprocess.SubprocessError(f"{module}: " + " | ".join(dict.fromkeys(errors))[:300])
    return {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}


def name_again(source: str, model: str) -> str:
    """The script with `traced = model` after the last statement that assigns the model or shards it."""
    after = []
    for node in ast.walk(ast.parse(source)):
        values = [one for target in getattr(node, "targets", []) for one in getattr(target, "elts", [target])]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "fully_shard" in ast.dump(node.value):
            values = node.value.args[:1]
        names = {ast.unparse(value) for value in values} & {model, f"self.{model}"}
        after += [(node.end_lineno, f"{' ' * node.col_offset}traced = {name}\n") for name in names]
    lines = source.splitlines(keepends=True)
    for number, text in sorted(after)[-1:]:
        lines.insert(number, text)
    return "".join(lines)


def unordered(value: Any) -> Any:
    """The value with its lists sorted: TrainCheck writes sets, in another order in every process."""
    if isinstance(value, dict):
        return {name: unordered(one) for name, one in value.items()}
    return sorted(json.dumps(unordered(one), sort_keys=True) for one in value) if isinstance(value, list) else value


def judge(python: Path, path: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """One case, in an empty folder."""
    model, end, healthy = MODELS.get(path.name, "model"), time.monotonic() + seconds, (path / "healthy.py").read_text()
    plain = re.search(rf"^ *(\w+, )*{model}(, \w+)* = |\.fit\(\w+\(\)", healthy, re.M)
    record: dict[str, Any] = {"collected": False, "seconds": {}}
    steps = record["seconds"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launch = f"-m torch.distributed.run --nproc_per_node 2 --master_port {free.getsockname()[1]} train.py"

    def collect(script: str, name: str, how: str) -> None:
        run, source = folder / "run", (path / script).read_text()
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        source = re.sub(r"^( +)(\w+\.fit\()(\w+\(\))", rf"\1{model} = \3\n\1\2{model}", source, flags=re.M)
        (run / "train.py").write_text(name_again(source, model) if how == "named again" else source)
        (run / "run.sh").write_text(f"exec {shlex.quote(str(python))} {launch}\n")
        track = {"variable": ["--models-to-track", model], "named again": ["--models-to-track", "traced"]}.get(how, [])
        line = ["-p", "train.py", "-s", "run.sh", *track, "--output-dir", "trace"]
        steps[f"collect {name}"] = call(python, "collect_trace", line, run, end)
        run.rename(folder / name)

    def infer() -> None:
        steps["infer"] = call(python, "infer_engine", ["-f", "trace"], folder / "healthy", end)

    def check(name: str) -> dict[str, str]:
        line = ["-f", "trace", "-i", "../healthy/invariants.json", "-o", "checked", "--no-html-report"]
        steps[f"check {name}"] = call(python, "checker", line, folder / name, end)
        text, violated, at = (folder / name / "checked/trace/failed.log").read_text(), {}, 0
        while at < len(text.rstrip()):
            one, size = json.JSONDecoder().raw_decode(text[at:])
            at += size + 1
            kind = one["invariant"]
            key = json.dumps([kind["relation"], kind["params"], unordered(kind["precondition"])], sort_keys=True)
            violated[key] = f"{kind['relation']}: {kind['text_description']}"[:160]
        return violated

    try:
        for how in ("variable", "named again", "calls only")[not plain :]:
            record["tracked"] = how if how == "calls only" else f"{model}, {how}"
            try:
                collect("healthy.py", "healthy", how)
                break
            except subprocess.SubprocessError as error:
                if how == "calls only" or time.monotonic() > end:
                    raise
                record.setdefault("untracked", {})[how] = str(error).replace(str(folder), ".")
        with ThreadPoolExecutor(2) as pool:
            inferred = pool.submit(infer)
            collect("faulty.py", "faulty", how)
            collect("healthy.py", "again", how)
            record["collected"] = True
            inferred.result()
            record["invariants"] = len((folder / "healthy/invariants.json").read_text().splitlines())
            found, second = pool.map(check, ("faulty", "again"))
    except subprocess.SubprocessError as error:
        return {**record, "why": str(error).replace(str(folder), ".")}
    only = [text for kind, text in found.items() if kind not in second]
    for key, texts in (("faulty", [*found.values()]), ("second healthy", [*second.values()]), ("only faulty", only)):
        record[key] = {"violated": len(texts), "texts": texts[:TEXTS]}
    return {**record, "found": bool(only), "healthy accused": bool(second)}


def judge_in_folder(python: Path, path: Path, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return judge(python, path, seconds, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has TrainCheck")
    parser.add_argument("--only", nargs="+", default=[], help="in this order")
    parser.add_argument("--seconds", type=float, default=480, help="the time limit of a case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once; the seconds are longer then")
    options = parser.parse_args()
    python = options.python.absolute()
    command = shlex.join(["python", *("python" if word == str(options.python) else word for word in sys.argv)])
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    ask = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('traincheck', 'torch', 'pandas')))"
    known: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {"cases": {}}
    known |= {"command": command, "machine": machine(), "time": now}
    known["versions"] = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    known.setdefault("runs", []).append({"command": command, "time": now})
    todo = sorted(cases(options.only), key=lambda one: (options.only or [one[0].name]).index(one[0].name))
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(judge_in_folder, python, path, options.seconds): (path, case) for path, case in todo}
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
