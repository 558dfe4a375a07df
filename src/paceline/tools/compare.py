"""paceline compare: the same script under each strategy for a few steps, and one table.

1. Everything that can be seen beforehand is checked: the script, the names, the numbers.
2. Trials in rounds: in each round every case once, in fresh processes, one after the other. The next round begins with
   another one, so that none has always the same place, and a machine that others use is as noisy for all. A case that
   fails is not tried again.
3. The table, what failed and why, and a sentence: which one to take.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline import __version__
from paceline.errors import SettingError
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.plan import available_cores, count_processes
from paceline.tools import cases as of
from paceline.tools.cases import Case
from paceline.tools.files import check_writable, write_json
from paceline.tools.results import examples_per_second, figures, loss_difference
from paceline.tools.table import number, table
from paceline.tools.trials import Length, Record, Script, check, check_script, run_trial
from paceline.tools.verdict import Row, verdict
from paceline.world import processor

LEAST_STEPS = 3
SCHEMA = 1


@dataclass(frozen=True)
class Question:
    """What the command line asks for. strategies, precision, global_batch: names or numbers with commas between them,
    None where they were not given. rounds: how often each case is tried. deadline: seconds for one trial."""

    script: Script
    nproc: str | int
    strategies: str | None = None
    precision: str | None = None
    global_batch: str | None = None
    steps: int = 30
    rounds: int = 3
    deadline: float = 300.0
    json_file: str | None = None
    html_file: str | None = None


def compare(question: Question) -> int:
    """Prints the table and writes the files. Returns the exit code: 0, 1 where nothing ran, 128 + n for signal n.

    Raises LaunchError or SettingError for what cannot work.
    """
    length = _length(question)
    check_script(question.script)  # before torch is loaded
    nproc = count_processes(question.nproc, available_cores(), _device_count)
    asked = _cases(question, nproc)
    check(question.script, asked, length, named=question.strategies is not None)
    for path in filter(None, (question.json_file, question.html_file)):
        check_writable(path)
    if question.html_file is not None:
        from paceline.tools.page import check_plotly

        check_plotly()
    with Interrupts() as interrupts:
        try:
            rows = _trials(question, asked, length, interrupts)
        except Stopped as stopped:
            return stopped.report()
    document = report(question, nproc, length, rows)
    sys.stdout.write("\n" + table(rows))
    if document["verdict"] is not None:
        sys.stdout.write(f"\n{document['verdict']['sentence']}\n")
    sys.stdout.flush()
    if question.json_file is not None:
        write_json(question.json_file, document)
    if question.html_file is not None:
        from paceline.tools.page import page

        with open(question.html_file, "w", encoding="utf-8") as file:
            file.write(page(document))
    return 0 if any(row.figures is not None for row in rows) else 1


def _length(question: Question) -> Length:
    for name, value, least in (("--steps", question.steps, LEAST_STEPS), ("--rounds", question.rounds, 1)):
        if value < least:
            raise SettingError(f"{name} {value}: at least {least} are needed.")
    if question.deadline <= 0:
        raise SettingError(f"--deadline {question.deadline:g}: give seconds, above 0, such as 300.")
    return Length(question.steps, max(1, min(5, question.steps // 4)), question.deadline)


def _cases(question: Question, nproc: int) -> list[Case]:
    return of.make_cases(
        of.read_strategies(question.strategies),
        of.read_precisions(question.precision),
        of.read_batches(question.global_batch),
        nproc,
        of.devices(str(question.script.settings.get("device") or ""), nproc, _device_count),
    )


def _device_count() -> int:
    from paceline.launcher.supervise import device_count

    return device_count()


def _trials(question: Question, asked: Sequence[Case], length: Length, interrupts: Interrupts) -> list[Row]:
    rounds: dict[str, list[list[Record]]] = {case.name: [] for case in asked}
    failed: dict[str, str] = {}
    for turn in range(question.rounds):
        for case in _order(asked, turn):
            if case.name in failed:
                continue
            _say(f"round {turn + 1} of {question.rounds}: {case.name} ... ")
            found = run_trial(question.script, case, length, interrupts)
            if isinstance(found, str):
                failed[case.name] = found
                _say("failed\n")
            else:
                rounds[case.name].append(found)
                _say(f"{number(examples_per_second(found))} examples/s\n")
    return _rows(asked, rounds, failed)


def _order(asked: Sequence[Case], turn: int) -> Iterator[Case]:
    """Each once, from another first one on in every round."""
    for place in range(len(asked)):
        yield asked[(place + turn) % len(asked)]


def _rows(asked: Sequence[Case], rounds: Mapping[str, list[list[Record]]], failed: Mapping[str, str]) -> list[Row]:
    measured = {case.name: figures(rounds[case.name]) for case in asked if case.name not in failed}
    rows = []
    for case in asked:
        if case.name in failed:
            rows.append(Row(case, failed=failed[case.name]))
            continue
        own, base = measured[case.name], measured.get(of.reference(case, asked).name)
        difference = None if base is None else loss_difference(own.losses, base.losses)
        rows.append(Row(case, own, difference=difference))
    return rows


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def report(question: Question, nproc: int, length: Length, rows: Sequence[Row]) -> dict[str, Any]:
    """What `--json` writes (docs/compare.md has the schema) and the page shows."""
    chosen = verdict(rows)
    script = question.script
    return {
        "schema": SCHEMA,
        "paceline": __version__,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(question),
        "machine": _machine(),
        "script": shlex.join([*(["-m"] if script.module else []), script.path, *script.args]),
        "settings": dict(script.settings),
        "nproc": nproc,
        "steps": length.steps,
        "warmup": length.warmup,
        "rounds": question.rounds,
        "rows": [_row(row, of.reference(row.case, [r.case for r in rows])) for row in rows],
        "verdict": None if chosen is None else {"row": chosen[0].case.name, "sentence": chosen[1]},
    }


def command(question: Question) -> str:
    """The command line that asks this question; without --html and --json, which change no figure."""
    defaults = {field.name: field.default for field in fields(question)}
    asked: dict[str, object] = {"nproc": question.nproc}
    for name in ("strategies", "precision", "global_batch", "steps", "rounds", "deadline"):
        if getattr(question, name) != defaults[name]:
            asked[name] = getattr(question, name)
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in (asked | dict(question.script.settings)).items()
    ]
    script = question.script
    called = ["-m"] if script.module else []
    return shlex.join(["paceline", "compare", *options, *called, script.path, *script.args])


def _machine() -> dict[str, Any]:
    import torch

    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "accelerators": accelerators,
        "accelerator": torch.cuda.get_device_name(0) if accelerators and torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _row(row: Row, reference: Case) -> dict[str, Any]:
    case, f = row.case, row.figures
    known = {
        "name": case.name,
        "strategy": str(case.spec),
        "processes": case.processes,
        "servers": case.servers,
        "precision": case.precision,
        "global_batch": case.global_batch,
        "failed": row.failed,
    }
    if f is None:
        return known
    return known | {
        "examples_per_second": f.examples_per_second,
        "examples_per_second_by_round": list(f.rounds),
        "step_seconds": {"median": f.step_seconds, "p95": f.p95_seconds, "mean": f.mean_seconds},
        "mean_step": {
            "compute_seconds": f.compute,
            "waiting_for_data_seconds": f.waiting,
            "communicating_seconds": f.communicating,
            "communicating_behind_compute_seconds": f.hidden,
        },
        "peak_memory_bytes_by_rank": list(f.memory),
        "peak_memory_kind": f.memory_kind,
        "parameter_bytes": f.parameter_bytes,
        "wire_bytes_per_step": f.wire,
        "start_up_seconds": f.start_up,
        "loss_difference": row.difference,
        "loss_difference_from": reference.name,
        "losses": [{"epoch": epoch, "step": step, "loss": loss} for (epoch, step), loss in f.losses.items()],
    }
