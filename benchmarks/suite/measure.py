"""Start the contenders of a model, check that they compute the same, and time them alternately.

All contenders are started first, and wait. Each round asks each contender for a block of steps, in a new random order.
A block has the number of steps that take BLOCK_SECONDS by hand. While one contender computes, the others block on a
read, and use no CPU. The seconds of a block are those of its slowest process. Speeds are compared within a round.

All of that is done LAUNCHES times, since the speed of a process also depends on where its memory lies: the same
program, started again, may be a tenth slower.

The losses of the first steps, as means over processes, are compared with the reference: one process over the whole
global batch. Contenders with batch norm over a shard are compared with hand-written DDP instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import torch
from benchmarks.suite.contenders import (
    AGAIN,
    BY_HAND,
    KINDS,
    ONE_THREAD,
    REFERENCE,
    ROOT,
    Contender,
    tensorflow_python,
)
from benchmarks.suite.figures import Launches, interval, middle, ratios
from benchmarks.suite.models import BATCHES, MODELS, Model, Sources, started
from benchmarks.suite.talk import JOB, SOCKET

BLOCK_SECONDS = 0.4
LAUNCHES = 4
LEAST_ROUNDS = 5  # of a launch
START_SECONDS = 240.0  # DeepSpeed compiles an extension at its first use
EXTENSIONS = ROOT / "build" / "torch_extensions"  # a separate folder, so that no other program waits for the same files
ROOM_MB = 1500.0  # memory that must be free after a contender has started


class Failed(Exception):
    """A contender cannot be measured; the message has the reason."""


class Group:
    """The processes of one contender."""

    def __init__(self, contender: Contender, model: str, folder: Path) -> None:
        self.contender, self._folder = contender, folder
        self._path = str(folder / f"{abs(hash(contender.name))}.sock")
        self._lines: list[IO[str]] = []
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        of = MODELS[model]
        job = {
            "model": model,
            "kind": contender.kind,
            "strategy": contender.strategy,
            "batch_norm": contender.batch_norm,
            "threads": contender.threads,
            "devices": contender.devices,
            "folder": str(folder),
            "batch": of.global_batch,
            "optimizer": of.optimizer,
        }
        for lock in EXTENSIONS.glob("*/*/lock"):  # left by a killed process; others would wait forever
            lock.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen(contender.processes)
            log = open(folder / f"{Path(self._path).stem}.log", "wb")  # noqa: SIM115  # the processes keep it
            with log:
                port = _free_port()
                for rank in range(contender.processes):
                    self._processes.append(
                        subprocess.Popen(
                            self._command(),
                            env=self._environment(rank, port) | {SOCKET: self._path, JOB: json.dumps(job)},
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
            self._accept(listener)
        try:
            told = self._hear(START_SECONDS)
        except Failed:
            self.close()
            raise
        # the loss of the global batch in each of the first steps
        self.losses = [sum(step) / len(step) for step in zip(*(one["losses"] for one in told), strict=True)]

    def _command(self) -> list[str]:
        if self.contender.kind == "tensorflow":
            return [str(tensorflow_python()), str(Path(__file__).with_name("tensorflow_worker.py"))]
        return [sys.executable, "-m", "benchmarks.suite.torch_worker"]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        size = str(self.contender.processes)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        added = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "bench",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": str(self.contender.threads), "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # ninja
        }  # fmt: skip
        if self.contender.processes == 1 and self.contender.kind != "paceline":
            added = {name: value for name, value in added.items() if not name.startswith("TORCHELASTIC")}
        return os.environ | added

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(1.0)
        end = time.monotonic() + START_SECONDS
        while len(self._connections) < self.contender.processes:
            try:
                self._connections.append(listener.accept()[0])
                self._lines.append(self._connections[-1].makefile("rw"))
            except TimeoutError:
                ended = [process for process in self._processes if process.poll() is not None]
                if ended or time.monotonic() > end:
                    why = f"exit code {ended[0].returncode}" if ended else f"nothing in {START_SECONDS:.0f} s"
                    said = self._said()
                    self.close()
                    raise Failed(f"its processes did not begin ({why}): {said}") from None

    def _said(self) -> str:
        text = (self._folder / f"{Path(self._path).stem}.log").read_text(errors="replace").strip()
        return text.splitlines()[-1][:300] if text else "no word"

    def _hear(self, seconds: float) -> list[dict[str, Any]]:
        """Read a line from each process."""
        told: list[dict[str, Any]] = []
        end = time.monotonic() + seconds
        for connection, lines in zip(self._connections, self._lines, strict=True):
            ready = select.select([connection], [], [], max(end - time.monotonic(), 0.0))[0]
            line = lines.readline() if ready else ""
            one = json.loads(line) if line else {"failed": self._said() if ready else f"silent for {seconds:.0f} s"}
            if "failed" in one:
                raise Failed(str(one["failed"]))
            told.append(one)
        return told

    def ask(self, seconds: float = 120.0, **what: Any) -> list[dict[str, Any]]:
        """Ask all processes. Returns their answers."""
        for lines in self._lines:
            lines.write(json.dumps(what) + "\n")
            lines.flush()
        return self._hear(seconds)

    def close(self) -> None:
        for lines in self._lines:
            with contextlib.suppress(OSError, ValueError):
                lines.write(json.dumps({"do": "end"}) + "\n")
                lines.flush()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self._connections:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measured(
    name: str, contenders: Sequence[Contender], sources: Sources, seconds: float, launches: int = LAUNCHES
) -> dict[str, Any]:
    """The figures of a model. seconds: begin rounds for this long, in all launches together. Raises NoData."""
    model, skipped = MODELS[name], dict[str, str]()
    made: list[dict[str, Any]] = []
    for number in range(launches):
        left = [one for one in contenders if one.name not in skipped]
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, contextlib.ExitStack() as stack:
            _write(Path(folder), model, sources)
            groups, failed = _started(name, left, Path(folder), stack, quiet=number > 0)
            skipped |= failed
            apart = _apart(model, groups, skipped)
            found = _rounds(groups, model, seconds / launches, skipped, seed=number)
            memory = {title: group.ask(do="figures") for title, group in groups.items() if title in found["seconds"]}
            made.append(found | {"memory": memory, "apart": apart})
    return {
        "about": model.about,
        "parameters": sum(p.numel() for p in started(model).parameters()),
        "global_batch": model.global_batch,
        "optimizer": model.optimizer,
        "batch_norm": model.batch_norm,
        "skipped": skipped,
        **_summary(model, made),
    }


def _write(folder: Path, model: Model, sources: Sources) -> None:
    inputs, targets = model.data(model.global_batch * BATCHES, sources)
    torch.save((inputs, targets), folder / "data.pt")
    np.savez(folder / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    weights = {key: value.detach().numpy() for key, value in started(model).named_parameters()}
    np.savez(folder / "weights.npz", **weights)


def _started(
    model: str, contenders: Sequence[Contender], folder: Path, stack: contextlib.ExitStack, quiet: bool
) -> tuple[dict[str, Group], dict[str, str]]:
    """The contenders that can be measured, and the reasons why others cannot."""
    groups: dict[str, Group] = {}
    skipped: dict[str, str] = {}
    largest = 0.0
    for contender in contenders:
        why = contender.missing()
        before = psutil.virtual_memory().available / 1e6
        if why is None and before - largest < ROOM_MB:
            why = f"{before:,.0f} MB of memory are left; take fewer contenders at once (make bench CONTENDERS=...)"
        if why is None:
            try:
                groups[contender.name] = group = Group(contender, model, folder)
                stack.callback(group.close)
                largest = max(largest, sum(one["proportional MB"] for one in group.ask(do="figures")))
            except Failed as error:
                why = str(error)
        if why is not None:
            skipped[contender.name] = why
        if why is not None or not quiet:
            print(f"  {contender.name}: {'ready' if why is None else f'left out: {why}'}", flush=True)
    return groups, skipped


def _apart(model: Model, groups: dict[str, Group], skipped: dict[str, str]) -> dict[str, float]:
    """The largest relative difference of the first losses from the reference.

    A contender outside of the model's tolerance is not measured.
    """
    found = {}
    for title, group in list(groups.items()):
        shard = model.batch_norm and group.contender.batch_norm == "shard"
        whole = model.batch_norm and group.contender.batch_norm == "global"
        reference = groups.get(BY_HAND if shard else REFERENCE, group if whole else groups.get(BY_HAND, group))
        pairs = zip(group.losses, reference.losses, strict=True)
        differences = [abs(a - b) / abs(b) for a, b in pairs]
        found[title] = max(differences) if all(map(math.isfinite, differences)) else math.inf
        if not found[title] <= model.tolerance:
            skipped[title] = f"computes something else: its losses are {found[title]:.1e} from the reference's"
            print(f"  {title}: {skipped[title]}", flush=True)
            del groups[title]
    return found


def _rounds(
    groups: dict[str, Group], model: Model, seconds: float, skipped: dict[str, str], seed: int
) -> dict[str, Any]:
    """Seconds per step and bytes sent per step, for each contender and round."""
    steps = 3
    for _ in range(2):  # warm up, and find the number of steps in a block
        took = {}
        for title, group in list(groups.items()):
            with _or_left_out(title, groups, skipped):
                took[title] = max(one["seconds"] for one in group.ask(do="steps", steps=steps)) / steps
        steps = max(3, round(BLOCK_SECONDS / took.get(BY_HAND, min(took.values()))))
    times: dict[str, list[float]] = {title: [] for title in groups}
    sent: dict[str, float] = {}
    draw, end = random.Random(seed), time.monotonic() + seconds
    while groups and (time.monotonic() < end or len(times[next(iter(groups))]) < LEAST_ROUNDS):
        for title in draw.sample(list(groups), len(groups)):
            with _or_left_out(title, groups, skipped):
                told = groups[title].ask(do="steps", steps=steps)
                times[title].append(max(one["seconds"] for one in told) / steps)
                sent[title] = sum(one["sent"] for one in told) / len(told) / steps
    times = {title: values for title, values in times.items() if title in groups}
    return {"seconds": times, "sent": sent, "steps": steps}


@contextlib.contextmanager
def _or_left_out(title: str, groups: dict[str, Group], skipped: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (Failed, OSError) as error:
        skipped[title] = f"failed while it was measured: {error}"
        print(f"  {title}: {skipped[title]}", flush=True)
        del groups[title]


def best(speeds: Mapping[str, Launches]) -> dict[str, Any]:
    """The fastest of Paceline's strategies and of the other libraries.

    With ratios of examples/s within rounds, to each other and to the hand-written contenders, with 95% intervals.
    """
    ours = [title for title in speeds if KINDS[title].kind == "paceline"]
    peers = [title for title in speeds if KINDS[title].peer]
    found: dict[str, Any] = {}
    if BY_HAND in speeds and AGAIN in speeds:
        found["control"] = ratios(speeds[AGAIN], speeds[BY_HAND])
    if not ours:
        return found
    first = found["ours"] = max(ours, key=lambda title: middle(speeds[title]))
    if peers:
        found["peer"] = max(peers, key=lambda title: middle(speeds[title]))
        found["ours / peer"] = ratios(speeds[first], speeds[found["peer"]])
    for key, title in (("by hand", BY_HAND), ("all threads", REFERENCE), ("one thread", ONE_THREAD)):
        if title in speeds:
            found[f"ours / {key}"] = ratios(speeds[first], speeds[title])
    return found


def _summary(model: Model, made: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all launches. Contenders that did not take part in each of them are left out."""
    rows = {}
    titles = [title for title in made[0]["seconds"] if all(title in launch["seconds"] for launch in made)]
    times: dict[str, list[list[float]]] = {title: [launch["seconds"][title] for launch in made] for title in titles}
    speeds = {title: [[model.global_batch / value for value in of] for of in times[title]] for title in titles}
    for title, values in speeds.items():
        processes = [one for launch in made for one in launch["memory"][title]]
        together = [sum(one["proportional MB"] for one in launch["memory"][title]) for launch in made]
        rows[title] = {
            "examples/s": [round(value, 2) for value in interval(values)],
            "sent MB a step, each process": round(made[0]["sent"][title] / 1e6, 3),
            "peak resident MB, a process": round(max(one["peak resident MB"] for one in processes), 1),
            "proportional MB, all processes": round(max(together), 1),
            "losses apart": max(launch["apart"][title] for launch in made),
        }
        for name in (BY_HAND, REFERENCE):
            if name in speeds:
                rows[title][f"x {name}"] = ratios(values, speeds[name])
    return {
        "launches": len(made),
        "rounds": sum(len(next(iter(launch["seconds"].values()))) for launch in made),
        "best": best(speeds),
        "steps_of_a_block": made[0]["steps"],
        "contenders": rows,
        "seconds_a_step": {title: [[round(value, 6) for value in of] for of in times[title]] for title in titles},
    }
