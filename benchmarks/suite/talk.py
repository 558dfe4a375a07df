"""What a contender's processes and the measuring process say to each other: lines of JSON over a Unix socket.

A process connects, says its rank and the losses of its first steps, or why it cannot take part, and then does what it
is asked: `steps` times so many steps, `figures` tells memory, `end` ends it. All processes of a contender are asked at
once; between times they wait for the next line and use no processor.
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
"""Environment variables of a contender's processes: the socket's path; what is to be trained, as JSON."""

CHECKED_STEPS = 4
"""The first steps of a contender, whose losses are compared with the reference's."""

Step = Callable[[], "float | Any"]


def serve(rank: int, prepare: Callable[[dict[str, Any]], tuple[Step, Callable[[], int]]]) -> None:
    """Take part as this rank. prepare(job): (a function that makes a step and returns its loss on this process, as
    anything that float() takes; a function that tells how many bytes the process has sent by TCP so far)."""
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
    """MB: the most that was resident; and what is now, with what is shared divided among those who share it."""
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    with open("/proc/self/smaps_rollup") as file:
        proportional = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return {"peak resident MB": peak * 1024 / 1e6, "proportional MB": proportional * 1024 / 1e6}
