"""The protocol between a contender's processes and the measuring process: lines of JSON over a Unix socket.

A process connects, and sends its rank and the losses of its first steps, or the reason why it cannot take part. Then it
answers requests: `steps` times a number of steps, `figures` returns its memory, `end` ends it. All processes of a
contender are asked at once. Between requests they wait for the next line, and use no CPU.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

SOCKET, JOB = "PACELINE_BENCH_SOCKET", "PACELINE_BENCH_JOB"
"""Environment variables of a contender's processes: the socket's path; the job, as JSON."""

CHECKED_STEPS = 4
"""The number of first steps of a contender, to compare their losses with the reference."""

Step = Callable[[], "float | Any"]


def serve(rank: int, prepare: Callable[[dict[str, Any]], tuple[Step, Callable[[], int]]]) -> None:
    """Take part as this rank.

    prepare(job) returns two functions: the first makes a step and returns its loss on this process, as anything that
    float() accepts; the second returns the number of bytes that the process has sent over TCP so far.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        lines = connection.makefile("rw")

        def say(**what: Any) -> None:
            lines.write(json.dumps({"rank": rank} | what) + "\n")
            lines.flush()

        try:
            step, sent = prepare(json.loads(os.environ[JOB]))
            say(losses=[float(step()) for _ in range(CHECKED_STEPS)])
            for line in lines:
                asked = json.loads(line)
                if asked["do"] == "end":
                    break
                if asked["do"] == "figures":
                    say(**memory())
                    continue
                before, began = sent(), time.perf_counter()
                for _ in range(asked["steps"]):
                    loss = step()
                float(loss)
                say(seconds=time.perf_counter() - began, sent=sent() - before)
        except Exception as error:
            say(failed=f"{type(error).__name__}: {error}".splitlines()[0][:300], traceback=traceback.format_exc())


def memory() -> dict[str, float]:
    """MB: the peak resident memory, and the current proportional memory (shared pages are divided)."""
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    with open("/proc/self/smaps_rollup") as file:
        proportional = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return {"peak resident MB": peak * 1024 / 1e6, "proportional MB": proportional * 1024 / 1e6}
