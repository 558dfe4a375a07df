"""Score `paceline verify` and `paceline doctor` on scripts with silent faults of distributed training.

    python benchmarks/silentdist/score.py run       # all scripts with both tools, into results/silentdist.json
    python benchmarks/silentdist/score.py run --tools verify --sets cases --only bert_mlm_counts
    python benchmarks/silentdist/score.py table                     # the figures of docs/silentdist.md

A case is a folder of `cases` with `faulty.py`, its twin `healthy.py`, which differs in the fix only, and `case.json`:

    kind, fault       what is wrong, in a word and in a sentence
    report            the public report of this fault; the scripts are written anew
    line, also        the line to change, and further lines that show it
    truth             the fault measured without the tools: relative distance from one process, for both scripts
    blind             the case was first run when the tool was finished

`healthy` holds right scripts that look suspicious; `healthy/scripts.json` names what each follows, why it looks
suspicious, and its distance from one process.

`corpus` holds 172 scripts that are older than the cases (corpus_truth.py). Of each fault, right causes are listed: for
verify in the ported scripts, for doctor in the plain ones. A fault also counts as found if the tool names such a cause
with another exit code, as doctor does where the model is not changed.

`run` adds to what is recorded. A faulty script counts as found if the tool exits with 1, and a healthy one as a false
alarm. The line is right if it is `line` or one of `also`. The cause is right if it is listed in CAUSES for the kind.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from collate_draws import machine
from corpus_truth import fault_lines, fault_of, scripts

SETS = ("cases", "healthy", "corpus")
CORPUS = (("ported", "verify"), ("plain", "verify"), ("plain", "doctor"))  # doctor is for scripts without Paceline
HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "silentdist.json"
SECONDS = 400

_LOSS = {
    "mean-of-means",
    "weights",
    "loss_mean_of_means",
    "own_fractions",
    "term_times_processes",
    "accumulation",
    "factor",
}
_REDUCE = {
    "not-reduced",
    "rank-missing",
    "backward-lost",
    "weights",
    "not_reduced",
    "partly_reduced",
    "gradients_differ",
}
_DATA = {"same-examples", "same_examples", "same_batch", "examples_missed", "no_set_epoch", "same_in_workers"}
_RANDOM = {"same_random_numbers", "same_noise", "same_augmentations", "same_in_workers", "same_masks"}
CAUSES: dict[str, set[str]] = {  # kind -> the tools' causes that lead to the fault; written before the first run
    "loss-denominator": _LOSS,
    "second-loss-term": _LOSS,
    # left_over, norm_summed_twice and gathered_without_gradient came later, with their rules
    "gradient-accumulation": _LOSS | {"stale", "gradients_dropped", "backward-lost", "sync_off", "left_over"},
    "moe-aux-loss": _LOSS | {"batch-level"},
    "world-size-scaling": {"factor", "summed_gradients", "term_times_processes", "accumulation", "weights"},
    "wrapper-bypass": _REDUCE | {"past_ddp"},
    "parameter-outside-wrapper": _REDUCE | {"unknown_to_ddp", "past_ddp", "ranks-drift-apart", "weights_differ"},
    "rank-branch": _REDUCE | {"steps_differ", "collectives", "weights", "optimizer_differs"},
    "no-sync": _REDUCE | {"sync_off", "no_no_sync"},
    "gradient-clipping": {
        "clip_before_reduce",
        "clip_of_shards",
        "clip_before_unscale",
        "norm_summed_twice",
        "weights",
        "factor",
    },
    "same-data": _DATA | _RANDOM,
    "same-randomness": _RANDOM | _DATA,
    "set-epoch": {"no_set_epoch"},
    "padded-shards": _DATA | {"padded_evaluation", "local_metric"},
    "initial-weights": {"ranks-start-apart", "weights_differ_at_start", "weights_differ"},
    "scheduler-steps": {
        "schedule_length",
        "scheduler_steps",
        "lr_differs",
        "lr_scaled_alone",
        "lr_scaled_twice",
        "lr_not_scaled",
    },
    "lr-scaling": {"lr_scaled_twice", "lr_scaled_alone", "lr_differs", "lr_not_scaled", "factor"},
    "sharded-optimizer": {"matrix_of_shard", "optimizer_differs", "ranks-drift-apart", "weights_differ", "update"},
    "process-group": _REDUCE | {"ranks-drift-apart", "weights_differ", "factor", "collectives"},
    "ema": {"written_outside", "ranks-drift-apart", "weights_differ", "buffers_differ"},
    "batch-norm": {"batch_norm", "buffers_differ", "batch-level"},
    "weight-decay": {"factor", "weights", "summed_gradients"},
    "model-parallel": {"factor", "weights", "partly_reduced", *_REDUCE},
    "evaluation": {"padded_evaluation", "local_metric"},
    "lost-reduction": _REDUCE,
    "gather-gradient": _LOSS | _REDUCE | {"batch-level", "gathered_without_gradient"},
    "batch-statistics": _LOSS | {"batch-level", "batch_norm"},
    "router-bias": {"buffers_differ", "batch-level", "batch_norm", "ranks-drift-apart", "weights_differ"},
}


def cases(only: list[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(HERE.glob("cases/*/case.json")):
        if not only or path.parent.name in only:
            yield path.parent, json.loads(path.read_text())


def judge(tool: str, script: Path, steps: int | None) -> dict[str, Any]:
    """Run a tool on a script with 2 processes. Returns its exit code, its causes and lines (`named`), and its time."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        line = [sys.executable, "-m", "paceline", tool, "--nproc", "2", "--deadline", "120"]
        line += ["--steps", str(steps)] if steps is not None else []  # doctor watches the whole script
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*line, "--json", str(answer), str(script)], capture_output=True, text=True, cwd=folder, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"code": None, **named(tool, {}, script), "seconds": SECONDS, "text": "not done"}
        seconds = round(time.monotonic() - began, 1)
        found = json.loads(answer.read_text()) if answer.exists() else {}
    return {
        "code": done.returncode,
        **named(tool, found, script),
        "seconds": seconds,
        "text": done.stdout[:600],
    }


def named(tool: str, found: dict[str, Any], script: Path) -> dict[str, Any]:
    """The causes and the lines of the script that a tool named in its JSON.

    "notes" are the lines of doctor's findings that do not change the model, by cause.
    """
    answers, notes = [found] if found else [], []
    if tool == "doctor":
        answers = [one for one in found.get("findings", []) if one["changes_model"]]
        notes = [one for one in found.get("findings", []) if not one["changes_model"]]
    return {
        "causes": [one["cause"] for one in answers],
        "lines": [line for one in answers for line in lines_of(one, script)],
        "notes": {one["cause"]: lines_of(one, script) for one in notes},
    }


def lines_of(answer: dict[str, Any], script: Path) -> list[int]:
    """The lines of the script that an answer names: one, or two."""
    beside, _, line = (answer["beside"] or "").rpartition(":")
    named = [(answer["file"] or "", answer["line"]), (beside, line)]
    return [int(line) for file, line in named if line and Path(file).name == script.name]


def suspicious(only: list[str]) -> Iterator[Path]:
    """The right scripts that look suspicious."""
    for name in json.loads((HERE / "healthy" / "scripts.json").read_text()):
        if not only or name in only:
            yield HERE / "healthy" / f"{name}.py"


def run(tools: list[str], sets: list[str], only: list[str], steps: int, jobs: int) -> None:
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    known |= {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "steps": steps, "time": now}
    known.setdefault("runs", []).append({"command": known["command"], "time": now})
    todo: list[tuple[dict[str, Any], str, str, Path, int | None]] = []  # a script's record, its entry, what to run
    compared = {"verify": steps, "doctor": None}
    for folder, case in cases(only) if "cases" in sets else ():
        record = known["cases"].setdefault(folder.name, {"kind": case["kind"]})
        record["blind"] = case.get("blind", False)
        twins = ("faulty", "healthy")
        todo += [
            (record, f"{tool} {twin}", tool, folder / f"{twin}.py", compared[tool]) for tool in tools for twin in twins
        ]
    for script in suspicious(only) if "healthy" in sets else ():
        record = known.setdefault("healthy", {}).setdefault(script.stem, {})
        todo += [(record, tool, tool, script, compared[tool]) for tool in tools]
    for part, tool in CORPUS if "corpus" in sets else ():
        for script in scripts(part):
            if tool in tools and (not only or script.stem in only):
                record = known.setdefault("corpus", {}).setdefault(part, {}).setdefault(script.stem, {})
                todo.append((record, tool, tool, script, None))  # verify's own number of steps
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda one: judge(*one[2:]), todo)
        for (record, entry, _, script, _), found in zip(todo, made, strict=True):
            record[entry] = {**found, "at_once": jobs}
            place = "/".join(script.parts[-2:])
            print(place, entry, found["code"], found["causes"], found["lines"], found["seconds"], flush=True)
            known["figures"] = all_figures(known)
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")


COLUMNS = (
    "cases",
    "found",
    "right cause",
    "right line",
    "cannot judge",
    "healthy accused",
    "healthy, cannot judge",
    "median s",
)


def figures(known: dict[str, Any], tool: str, blind: bool | None = None) -> dict[str, int] | None:
    """The figures of a tool, over all recorded cases, or those that are blind or not; None if there are none."""
    of = {folder.name: case for folder, case in cases([])}
    rows = [
        (of[name], record[f"{tool} faulty"], record[f"{tool} healthy"])
        for name, record in known["cases"].items()
        if {f"{tool} faulty", f"{tool} healthy"} <= record.keys() and blind in (None, record["blind"])
    ]
    if not rows:
        return None
    found = [(case, faulty) for case, faulty, _ in rows if faulty["code"] == 1]
    cause = [1 for case, faulty in found if set(faulty["causes"]) & CAUSES.get(case["kind"], set())]
    line = [1 for case, faulty in found if {case["line"], *case["also"]} & set(faulty["lines"])]
    seconds = sorted(one["seconds"] for _, *both in rows for one in both)
    values = (
        len(rows),
        len(found),
        len(cause),
        len(line),
        sum(faulty["code"] not in (0, 1) for _, faulty, _ in rows),
        sum(healthy["code"] == 1 for *_, healthy in rows),
        sum(healthy["code"] not in (0, 1) for *_, healthy in rows),
        round(seconds[len(seconds) // 2]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def healthy_figures(known: dict[str, Any], tool: str) -> dict[str, int] | None:
    """The figures of a tool on the right scripts that look suspicious; None if none was run."""
    rows = [record[tool] for record in known.get("healthy", {}).values() if tool in record]
    if not rows:
        return None
    seconds = sorted(one["seconds"] for one in rows)
    return {
        "healthy scripts": len(rows),
        "healthy accused": sum(one["code"] == 1 for one in rows),
        "healthy, cannot judge": sum(one["code"] not in (0, 1) for one in rows),
        "median s": round(seconds[len(seconds) // 2]),
    }


CORPUS_COLUMNS = (
    "faults",
    "found",
    "right cause",
    "right line",
    "cannot judge",
    "healthy scripts",
    "healthy accused",
    "healthy, cannot judge",
    "median s",
)


def corpus_figures(known: dict[str, Any], part: str, tool: str) -> dict[str, int | None] | None:
    """The figures of a tool on a part of the corpus; None if none was run."""
    found = {script: known.get("corpus", {}).get(part, {}).get(script.stem, {}).get(tool) for script in scripts(part)}
    rows = [(script, record) for script, record in found.items() if record is not None]
    if not rows:
        return None
    faulty = [judged(script, record) for script, record in rows if fault_of(script)]
    healthy = [record["code"] for script, record in rows if not fault_of(script)]
    seconds = sorted(record["seconds"] for _, record in rows)
    values = (
        len(faulty),
        sum(one["found"] for one in faulty),
        sum(one["cause"] for one in faulty) if (part, tool) != ("plain", "verify") else None,
        sum(one["line"] for one in faulty),
        sum(not one["found"] and one["unclear"] for one in faulty),
        len(healthy),
        healthy.count(1),
        sum(code not in (0, 1) for code in healthy),
        round(seconds[len(seconds) // 2]),
    )
    return dict(zip(CORPUS_COLUMNS, values, strict=True))


def judged(script: Path, record: dict[str, Any]) -> dict[str, bool]:
    """Whether the fault of a faulty script of the corpus was found, with its cause and its line."""
    fault = fault_of(script)
    assert fault is not None
    notes = {cause: lines for cause, lines in record["notes"].items() if cause in fault.causes}
    right = bool({*record["causes"], *notes} & set(fault.causes))
    lines = {*record["lines"], *(line for lines in notes.values() for line in lines)}
    found = record["code"] == 1 or right
    return {
        "found": found,
        "cause": right,
        "line": found and bool(lines & fault_lines(script)),
        "unclear": record["code"] not in (0, 1),
    }


def all_figures(known: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    """ "TOOL, CASES" -> the figures."""
    found: dict[str, Any] = {
        f"{tool}, {title}": figures(known, tool, blind)
        for tool in ("verify", "doctor")
        for title, blind in (("blind", True), ("seen", False), ("all", None))
    }
    found |= {f"{tool}, right scripts": healthy_figures(known, tool) for tool in ("verify", "doctor")}
    found |= {f"{tool}, {part} scripts of the corpus": corpus_figures(known, part, tool) for part, tool in CORPUS}
    return {name: values for name, values in found.items() if values is not None}


def table(known: dict[str, Any]) -> str:
    """The figures as Markdown: a table of the cases, one of the right scripts, and one of the corpus."""
    lines: list[str] = []
    columns: tuple[str, ...] = ()
    for name, found in all_figures(known).items():
        if tuple(found) != columns:
            columns = tuple(found)
            lines += ["", "| tool, cases | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        lines.append(f"| {name} | " + " | ".join("" if n is None else str(n) for n in found.values()) + " |")
    return "\n".join(lines).lstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--tools", nargs="+", default=["verify", "doctor"])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=1, help="scripts at once; the seconds are longer then")
    options = parser.parse_args()
    if options.what == "run":
        run(options.tools, options.sets, options.only, options.steps, options.jobs)
        return
    print(table(json.loads(RESULTS.read_text())), end="")


if __name__ == "__main__":
    main()
