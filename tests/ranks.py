"""Functions run on several real processes, started by our own launcher, with a deadline.

    values = run_ranks(3, "tests.comm.checks:run_all", deadline=60)

starts 3 processes, calls `tests.comm.checks.run_all()` in each inside a gloo process group, and returns what each
returned (as JSON), in rank order. Starting costs some seconds, so one launch runs many checks: `run_checks`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(size: int, target: str, deadline: float = 60.0) -> list[Any]:
    """What `target` ("module:function") returned on each of `size` processes, in rank order.

    Raises AssertionError, with the tracebacks of all ranks and their last output, where one raised, died, or had not
    returned `deadline` seconds after the start (then with the line where each rank stood). No process is left.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(size)]
        command += [__file__, target, str(folder), str(time.time() + deadline)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
            late = not _ended(process, deadline)
        results = [_read(folder / f"{rank}.json") for rank in range(size)]
        if late or process.returncode != 0 or any("value" not in result for result in results):
            raise AssertionError(_story(target, folder, results, late, process.returncode))
        return [result["value"] for result in results]


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for the launcher; at the deadline end it, and with it its workers."""
    try:
        process.wait(deadline)
        return True
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel then kills the workers
            process.wait()
        return False


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _story(target: str, folder: Path, results: list[dict[str, Any]], late: bool, code: int) -> str:
    lines = [f"{target} on {len(results)} ranks: " + ("not done at the deadline" if late else f"exit code {code}")]
    for rank, result in enumerate(results):
        stood = folder / f"{rank}.stood"
        where = stood.read_text() if stood.exists() else ""
        lines.append(f"--- rank {rank}: " + ("returned" if "value" in result else result.get("error") or where or "?"))
    lines.append("--- output\n" + (folder / "output").read_text(errors="replace")[-4000:])
    return "\n".join(lines)


def run_checks(checks: Iterable[Callable[[], None]]) -> dict[str, str]:
    """Run the checks one after the other on all ranks, and return the traceback of each that failed on this rank."""
    from paceline.comm import collectives

    failed = {}
    for check in checks:
        try:
            check()
        except Exception:
            failed[check.__name__] = traceback.format_exc()
            traceback.print_exc()  # also into the output, which is what remains when the ranks now miss each other
        # Together, so that a rank that failed does not run into the next check while others are in this one.
        collectives.gather_objects(None)
    return failed


def checks_in(namespace: dict[str, Any]) -> list[Callable[[], None]]:
    """The functions of a module whose name starts with check_."""
    return [value for name, value in namespace.items() if name.startswith("check_")]


def _main() -> None:
    target, folder = sys.argv[1], Path(sys.argv[2])
    left = float(sys.argv[3]) - time.time()  # seconds
    rank = int(os.environ["RANK"])
    with open(folder / f"{rank}.stood", "w") as stood:
        faulthandler.dump_traceback_later(max(left - 2.0, 0.1), file=stood)
        import torch.distributed as dist

        from paceline.comm import process_group  # before there is a group (see there)

        result: dict[str, Any] = {}
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=max(left, 1.0)))
            module, function = target.split(":")
            result["value"] = getattr(importlib.import_module(module), function)()
        except Exception:
            result["error"] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            os._exit(1)  # no clean end: other ranks may be in a collective, and the launcher is to end them
        process_group.leave()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _main()
