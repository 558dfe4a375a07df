"""Several scripts, one after the other, watched in the same processes: started by `paceline run`.

    paceline run --nproc 2 together.py FOLDER [--bf16]

FOLDER holds a folder for each script, `NAME/script.py`; each rank forks once for each, and the child runs it as
doctor's worker would. torch is imported once.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401  # which the first optimizer imports: once, before the forks
import torch.distributed as dist

from paceline.doctor.recorders import install
from paceline.launcher.worker import run_script

SECONDS = 120.0  # for one script, libraries that it imports included, on a busy machine


def join_apart(number: int) -> None:
    """Let the script find the launcher's store with keys of its own."""
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: object) -> None:
        environ = os.environ
        store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        original(backend, store=dist.PrefixStore(f"script {number}", store), rank=rank, world_size=size)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def child(folder: Path, number: int, args: list[str]) -> None:
    join_apart(number)
    os.chdir(folder)
    script = str(folder / "script.py")
    stacks = (folder / f"stacks-{os.environ['RANK']}").open("w")  # written where a script hangs, before it is ended
    faulthandler.dump_traceback_later(SECONDS - 10.0, file=stacks)
    log = install({"directory": str(folder), "steps": None}, "script", script)
    try:
        run_script(script, args)
    except SystemExit:
        pass
    except BaseException:  # the child ends here
        (folder / f"error-{log.shared.rank}").write_text(traceback.format_exc())
        log.stop()
        os._exit(1)
    log.finish()
    os._exit(0)


def main() -> None:
    root, args = Path(sys.argv[1]), sys.argv[2:]
    for number, folder in enumerate(sorted(root.iterdir())):
        pid = os.fork()
        if pid == 0:
            child(folder, number, args)
        deadline = time.monotonic() + SECONDS
        ended, status = 0, 0
        while ended == 0:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            ended, status = os.waitpid(pid, os.WNOHANG)
        error = folder / f"error-{os.environ['RANK']}"
        if status and not error.exists():
            seconds = time.monotonic() - deadline + SECONDS
            stacks = (folder / f"stacks-{os.environ['RANK']}").read_text()
            error.write_text(f"ended with wait status {status}, {seconds:.0f} s old\n{stacks}")


main()
