"""verify and doctor on scripts of the corpus, in processes that are forked from others that have imported torch.

Of verify, the decision and its runs are those of the command. Five runs of a script cost five imports otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "silentdist"))
import score

PROCESSES = 2
DEADLINE_SECONDS = 240
Result = dict[str, Any]


def run_verify(script: Path) -> Result:
    """What verify named, as score.py records it."""
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
                found = run_ranks(
                    start.processes, "tests.verify.job:run", json.dumps([work]), deadline=DEADLINE_SECONDS
                )
            except AssertionError as error:  # its ranks went apart
                return str(error)
            return next((why for rank in found for why in rank.values()), None)

    with tempfile.TemporaryDirectory() as folder:
        options = VerifyOptions(Script(str(script), (), False, {"device": "cpu"}), PROCESSES)
        try:
            document = decide(Forked(options, PROCESSES, folder, int)).document()
        except PacelineError as error:
            document = {"code": 2, "text": str(error), "cause": None, "file": None, "line": None, "beside": None}
    return {"code": document["code"], "text": document["text"], **score.named("verify", document, script)}


def run_doctor(script: Path) -> Result:
    """What doctor named, as score.py records it. For scripts whose collectives match: nobody ends one that hangs."""
    from tests.ranks import run_ranks

    from paceline.doctor.doctor_command import diagnose

    with tempfile.TemporaryDirectory() as folder:
        failed = run_ranks(PROCESSES, "tests.corpus.forked:watched", str(script), folder, deadline=DEADLINE_SECONDS)
        _, found = diagnose(folder, PROCESSES)
    document = {"findings": [finding.as_json() for finding in found]}
    result = score.named("doctor", document, script)
    return {"code": int(bool(result["causes"])), "text": next(filter(None, failed), None), **result}


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
