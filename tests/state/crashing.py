"""Kills processes that write checkpoints, and looks at what is left. A program of its own, since it forks:

    python crashing.py points DIRECTORY     kill -9 before each single call of the system that a write makes
    python crashing.py kills DIRECTORY      kill -9 at random moments
    python crashing.py background DIRECTORY kill -9 at random moments, while a thread writes and the state changes
    python crashing.py writers DIRECTORY    two writers at once, with a reader beside them

Prints what it did as one line of JSON; a failed assertion is its failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.snapshot import SnapshotBuffers


def parts(step: int, elements: int) -> dict[str, Any]:
    """A state from which one can tell at which step it was written, throughout."""
    return {
        "model": {"weight": torch.full((elements,), float(step))},
        "optimizer": {"state": {0: {"step": step, "average": torch.full((elements,), -float(step))}}},
        "data": {"loader": {"step": step}},
    }


def check_whole(path: Path) -> int:
    """The step of a checkpoint all of whose parts are of that step."""
    meta, found = checkpoint.read(path)
    step = int(meta["step"])
    expected = parts(step, found["model"]["weight"].numel())
    assert torch.equal(found["model"]["weight"], expected["model"]["weight"])
    state = found["optimizer"]["state"][0]
    assert torch.equal(state["average"], expected["optimizer"]["state"][0]["average"])
    assert state["step"] == found["data"]["loader"]["step"] == step
    return step


def save(directory: Path, step: int, elements: int, keep: int) -> None:
    checkpoint.write(
        directory, step=step, parts=parts(step, elements), meta={"step": step}, retention=checkpoint.Retention(keep)
    )


def forked(body: Callable[[], None]) -> int:
    """Runs `body` in a child of this process, which exits 0 or 1; returns its pid."""
    if pid := os.fork():
        return pid
    try:
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def die_before_call(number: int) -> None:
    """From here on, kill -9 of this process at its call `number` (from 0) that concerns files."""
    calls = 0

    def count(event: str, arguments: tuple[Any, ...] = ()) -> None:
        nonlocal calls
        if event != "os.kill" and event.startswith(("open", "os.", "fcntl.", "shutil.")):
            calls += 1
            if calls > number:
                os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync  # not audited
    os.fsync = lambda handle: (count("os.fsync"), fsync(handle))[1]  # type: ignore[assignment]
    sys.addaudithook(count)


def points(directory: Path) -> dict[str, int]:
    os.fsync = lambda handle: None  # a killed process loses nothing that the kernel has; this saves half of the time
    outcomes = {"old": 0, "new": 0}
    template = directory / "template"
    save(template, 1, 1000, keep=9)
    save(template, 2, 1000, keep=9)
    number, status = 0, -1
    while status != 0:
        place = directory / f"point-{number}"
        shutil.copytree(template, place)

        def body(place: Path = place, number: int = number) -> None:
            die_before_call(number)
            save(place, 3, 1000, keep=2)

        status = os.waitpid(forked(body), 0)[1]
        assert status in (0, signal.SIGKILL), status
        found = checkpoint.find(place)
        assert found.damage == [], found.damage
        assert check_whole(found.path) == found.step
        assert found.step == 3 or (status != 0 and found.step == 2), (number, status, found)
        assert (place / (place / "latest").read_text().strip()).is_dir()
        outcomes["new" if found.step == 3 else "old"] += 1
        save(place, 4, 10, keep=1)  # a later writer clears up after the dead one
        assert sorted(os.listdir(place)) == ["latest", "step-00000004"], os.listdir(place)
        shutil.rmtree(place)
        number += 1
    return outcomes


def save_in_background(directory: Path, first: int, acknowledge: Callable[[int], Any]) -> None:
    """One checkpoint after the other. The state is that of one step for an instant only, and then changes in place."""
    buffers, writer = SnapshotBuffers(), BackgroundWrite()
    live = parts(first, 500_000)
    for step in range(first, first + 1000):
        live["model"]["weight"].fill_(step)
        live["optimizer"]["state"][0]["average"].fill_(-step)
        live["optimizer"]["state"][0]["step"] = live["data"]["loader"]["step"] = step
        if writer.finish() is not None:
            acknowledge(step - 1)
        encoded = checkpoint.encode_parts(live, buffers)
        own = partial(checkpoint.write, directory, step=step, parts=encoded, meta={"step": step})
        writer.begin(step, partial(own, retention=checkpoint.Retention(2)))
        for _ in range(20):
            live["model"]["weight"].add_(0.25)
            live["optimizer"]["state"][0]["average"].add_(0.25)
            live["optimizer"]["state"][0]["step"] = -1


def kills(directory: Path, background: bool = False) -> dict[str, int]:
    saved, stale, chance = 0, 0, random.Random(time.time_ns())
    for _ in range(12):
        reader, writer = os.pipe()

        def body(first: int = saved + 1, writer: int = writer) -> None:
            def acknowledge(step: int) -> int:
                return os.write(writer, step.to_bytes(8, "little"))

            if background:
                save_in_background(directory, first, acknowledge)
            for step in range(first, first + 1000):
                save(directory, step, 500_000, keep=2)
                acknowledge(step)

        child = forked(body)
        os.close(writer)
        acknowledged = os.read(reader, 8)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        while more := os.read(reader, 8):
            acknowledged = more
        os.close(reader)
        found = checkpoint.find(directory)
        assert check_whole(found.path) == found.step >= int.from_bytes(acknowledged, "little") > saved, found
        stale += (directory / "latest").read_text().strip() != found.path.name
        saved = found.step
    save(directory, saved + 1, 10, keep=1)
    assert len(os.listdir(directory)) == 2, os.listdir(directory)
    return {"saved": saved, "stale_pointers": stale}


def writers(directory: Path) -> dict[str, int]:
    save(directory, 0, 1000, keep=2)
    children = [forked(lambda: [save(directory, step, 20_000, keep=2) for step in range(1, 31)] and None) for _ in "ab"]
    statuses: list[int] = []
    looks = 0
    while len(statuses) < len(children):
        for child in children:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(child, os.WNOHANG)
                statuses += [status] if pid else []
        found = checkpoint.find(directory)
        assert found.damage == [], found
        looks += 1
    assert statuses == [0, 0], statuses
    found = checkpoint.find(directory)
    assert check_whole(found.path) == found.step == 30, found
    assert sorted(os.listdir(directory))[0] == "latest", os.listdir(directory)
    return {"looks": looks}


MODES = {"points": points, "kills": kills, "background": partial(kills, background=True), "writers": writers}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(MODES[sys.argv[1]](Path(sys.argv[2]))))
