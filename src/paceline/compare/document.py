"""The JSON document of a comparison: `--json` writes it, and the HTML page shows it."""

from __future__ import annotations

import datetime
import platform
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from paceline import __version__
from paceline.compare.cases import Case, CompareOptions, baseline_case
from paceline.compare.figures import Row
from paceline.compare.recommendation import recommend, why_none
from paceline.launcher.plan import available_cores
from paceline.trials.start import Length
from paceline.world import processor

SCHEMA = 1


def make_document(options: CompareOptions, nproc: int, length: Length, rows: Sequence[Row]) -> dict[str, Any]:
    """Build the document. docs/compare.md describes its schema."""
    chosen = recommend(rows)
    script = options.script
    return {
        "schema": SCHEMA,
        "paceline": __version__,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(options),
        "machine": _machine(),
        "script": shlex.join([*(["-m"] if script.module else []), script.path, *script.args]),
        "settings": dict(script.settings),
        "nproc": nproc,
        "steps": length.steps,
        "warmup": length.warmup,
        "rounds": options.rounds,
        "rows": [_row(row, baseline_case(row.case, [r.case for r in rows])) for row in rows],
        "no_verdict": why_none(rows) if chosen is None else None,
        "verdict": None if chosen is None else {"row": chosen[0].case.name, "sentence": chosen[1]},
    }


def command(options: CompareOptions) -> str:
    """The command line of this comparison, without --html and --json, which do not affect the figures."""
    defaults = {field.name: field.default for field in fields(options)}
    asked: dict[str, object] = {"nproc": options.nproc}
    for name in ("strategies", "precision", "global_batch", "steps", "rounds", "deadline"):
        if getattr(options, name) != defaults[name]:
            asked[name] = getattr(options, name)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (asked | dict(options.script.settings)).items()]
    script = options.script
    called = ["-m"] if script.module else []
    return shlex.join(["paceline", "compare", *flags, *called, script.path, *script.args])


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
        "note": case.alone,
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
        "loss_difference_cause": row.cause,
        "losses": [{"epoch": epoch, "step": step, "loss": loss} for (epoch, step), loss in f.losses.items()],
    }
