"""`make chaos`: kills processes of a training at random times, starts it again, and looks at what came of it.

    python -m tests.chaos --cases 30 --seed 0                  # adds to the results; 15 s each on two cores
    python -m tests.chaos --case ddp-17                        # one case again, with all that its processes say
    python -m tests.chaos --page                               # runs nothing; writes the table of the results

A case is one training (job.py) under one strategy. Its number is the seed of everything that is drawn in it: how many
processes each start has, how often something is killed, what (a rank, several ranks, a launcher, a machine), and when.
A machine is here a launcher with its ranks; the machines meet on loopback. It has ended well if

- each start ends within its deadline,
- the model has been trained on each example once in each epoch, in the steps of a run that nobody disturbed,
- its weights are that run's: the same bits with as many processes in all starts, or with `reproducible`; else to 1e-10
  of their norm,
- no process, no folder for temporary files and nothing in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.gpu.__main__ import machine
from safetensors.torch import load_file
from tests.chaos.job import STEP_SECONDS, STEPS
from tests.ports import free_port

from paceline.world import MEMORY as MEMORY_FOLDER

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "chaos" / "job.py"
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
DEADLINE_SECONDS = 120.0  # of one start, which takes some 5 on an idle machine
MOST_KILLS = 3  # in one case
MEMORY_EVERY = 2  # steps from one checkpoint in memory to the next
MARK = "PACELINE_CHAOS"  # in the environment of all processes of a case

KEPT = "ddp, --max-restarts"
BACKGROUND = "ddp, saved in the background"
MEMORY = "fsdp, --memory-every"
MACHINES = "ddp, machines that come and go"
WAYS: dict[str, tuple[str, bool, bool]] = {
    "ddp": ("ddp", False, False),
    KEPT: ("ddp", False, False),
    BACKGROUND: ("ddp", False, False),
    "ddp, other numbers of processes": ("ddp", True, False),
    "ddp, reproducible, other numbers of processes": ("ddp", True, True),
    "fsdp, other numbers of processes": ("fsdp", True, False),
    "shared": ("shared", False, False),
    MEMORY: ("fsdp", False, False),
    MACHINES: ("ddp", True, False),
}
"""Name -> (strategy, does each start have a number of processes of its own, is it reproducible).

Of KEPT and MEMORY ranks alone are killed, one at a time, and the launcher starts them again: who lives hands on, or the
memory holds a checkpoint of every second step, and the disk none."""


@dataclass
class Case:
    """What became of one training.

    Attributes:
        way: of WAYS.
        number: the seed of its draws.
        kills: what was killed: "rank", "ranks", "launcher"; of MACHINES "rank", "machine", "keeper", the last being the
            machine whose launcher keeps the rendezvous.
        processes: of each start.
        seconds: of all starts.
        wrong: what was not as it must be; empty: nothing.
        lost: of KEPT and MEMORY, at each start after the first, the steps that a rank had made and that it makes again.
        said: if anything is wrong, the last lines on stderr of its starts.
    """

    way: str
    number: int
    kills: list[str] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    said: str = ""


class Folder:
    """Where a case runs: its files, and a folder for its temporary files."""

    def __init__(self, path: Path, case: str, shown: bool) -> None:
        self.path, self._mark, self._shown = path, f"{case}-{os.getpid()}", shown
        self.temporary = path / "tmp"
        self.temporary.mkdir()
        self._shared_before = set(os.listdir("/dev/shm"))

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        (self.path / "began").unlink(missing_ok=True)
        environ = {**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with (self.path / "stderr").open("a") as file:
            error = None if self._shown else file
            return subprocess.Popen(
                command,
                cwd=self.path,
                env=environ,
                text=True,
                stdout=subprocess.PIPE,
                stderr=error,
                start_new_session=True,
            )

    def said(self) -> str:
        """The last lines on stderr of all starts."""
        return (self.path / "stderr").read_text(errors="replace")[-4000:]

    def processes(self) -> list[psutil.Process]:
        """All that a start has begun, whatever became of its parents."""
        return [process for process, _ in self._marked()]

    def ranks(self, launcher: int) -> list[psutil.Process]:
        return [process for process, environ in self._marked() if process.pid != launcher and "RANK" in environ]

    def _marked(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """The processes of this start that live, with their environments: one may end at any time."""
        found = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                if environ.get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, environ))
            except (psutil.Error, OSError):
                continue
        return found

    def end_all(self) -> int:
        """Kill what is left. Returns how many that were."""
        left = self.processes()
        for process in left:
            process.kill()
        return len(left)

    def _of_others(self) -> set[str]:
        """The folders in /dev/shm of runs that are none of this case."""
        found = set()
        for process in psutil.process_iter():
            try:
                environ = process.environ()
            except (psutil.Error, OSError):
                continue
            if environ.get(MARK) != self._mark and MEMORY_FOLDER in environ:
                found.add(os.path.basename(environ[MEMORY_FOLDER]))
        return found

    def left_over(self) -> list[str]:
        deadline = time.monotonic() + 10.0  # for the kernel, and for who cleans up after a launcher that was killed
        while time.monotonic() < deadline and (self.processes() or list(self.temporary.glob("paceline*"))):
            time.sleep(0.1)
        found = [f"process {process.pid} is left: {' '.join(process.cmdline())}" for process in self.processes()]
        found += [f"{path.name} is left in TMPDIR" for path in self.temporary.glob("paceline*")]
        new = set(os.listdir("/dev/shm")) - self._shared_before - self._of_others()
        return found + [f"/dev/shm/{name} is left" for name in new if "paceline" in name]


def command_of(way: str, processes: int) -> list[str]:
    strategy, _, reproducible = WAYS[way]
    words = ["-m", "paceline", "run", "--nproc", str(processes)]
    words += ["--max-restarts", str(MOST_KILLS)] if way in (KEPT, MEMORY) else []
    words += ["--memory-every", str(MEMORY_EVERY)] if way == MEMORY else []
    words += [str(JOB), strategy, *(["4"] if reproducible else [])]
    words += {BACKGROUND: ["background"], MEMORY: ["unsaved"]}.get(way, [])
    return [sys.executable, *words]


def finished(folder: Folder, process: subprocess.Popen[str], case: Case) -> str | None:
    """What the start printed; None where it had to be ended."""
    try:
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return out
    except subprocess.TimeoutExpired:
        case.wrong.append(f"start {len(case.processes)} hung")
        folder.end_all()
        process.communicate()
        return None


def killed(folder: Folder, process: subprocess.Popen[str], what: str, draw: random.Random) -> None:
    """Kill something of a start, at a random moment of its training, or now and then before it has begun."""
    wait = draw.random() * STEPS * STEP_SECONDS * 1.5
    early = draw.random() < 0.15
    began = time.monotonic()
    while not early and not (folder.path / "began").exists() and process.poll() is None:
        if time.monotonic() - began > DEADLINE_SECONDS:
            return
        time.sleep(0.02)
    time.sleep(2 * wait if early else wait)
    if what == "launcher":
        process.kill()
        return
    ranks = folder.ranks(process.pid)
    for rank in draw.sample(ranks, min(len(ranks), 1 if what == "rank" else draw.randint(1, 4))):
        try:
            rank.kill()
        except psutil.NoSuchProcess:
            continue


def kill_ranks(folder: Folder, process: subprocess.Popen[str], case: Case, draw: random.Random) -> None:
    """Kill a rank, and with luck others after it, while the launcher starts them again."""
    for number in range(MOST_KILLS):
        if process.poll() is not None or (number and draw.random() > 0.6):
            return
        killed(folder, process, "rank", draw)
        case.kills.append("rank")
        (folder.path / "began").unlink(missing_ok=True)  # the next start makes it anew


class Machines:
    """The launchers of one training, each with a rank, which meet at 127.0.0.1 and come and go.

    Args:
        count: how many machines there are at most; one is enough.
    """

    def __init__(self, folder: Folder, count: int) -> None:
        self._folder = folder
        self._port = free_port()
        self._options = ["--nnodes", f"1:{count}", "--nproc", "1", "--max-restarts", str(4 * MOST_KILLS)]
        self._options += [
            "--rdzv-endpoint",
            f"127.0.0.1:{self._port}",
            "--rdzv-conf",
            "last_call_timeout=1,keep_alive_interval=1",
        ]
        self.started: list[subprocess.Popen[str]] = []
        for _ in range(count):
            self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "paceline", "run", *self._options, str(JOB), "ddp"]
        self.started.append(self._folder.start(command))

    def running(self) -> list[subprocess.Popen[str]]:
        return [launcher for launcher in self.started if launcher.poll() is None]

    def keeper(self) -> subprocess.Popen[str] | None:
        """Who listens where the machines meet."""
        for launcher in self.running():
            try:
                sockets = psutil.Process(launcher.pid).net_connections("tcp")
            except psutil.Error:
                continue
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == self._port for one in sockets):
                return launcher
        return None

    def kill(self, launcher: subprocess.Popen[str]) -> None:
        """The launcher and what it has started, at once."""
        try:
            started = psutil.Process(launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in [
            launcher,
            *(one for one in started if one.name() != "sh"),
        ]:  # sh: it tidies up after the launcher
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def printed(self, case: Case) -> str:
        """What all have printed, when all have ended."""
        out, deadline = "", time.monotonic() + DEADLINE_SECONDS
        for launcher in self.started:
            try:
                out += launcher.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                case.wrong.append(f"start {len(case.processes)} hung")
                self._folder.end_all()
                out += launcher.communicate()[0]
        return out


def on_machines(folder: Folder, case: Case, draw: random.Random) -> str:
    """A training of MACHINES: what was printed."""
    count, out = draw.choice([2, 3]), ""
    for attempt in range(2):  # the second where nobody was left to go on
        case.processes.append(count)
        machines = Machines(folder, count)
        for number in range(MOST_KILLS if attempt == 0 else 0):
            if number and draw.random() > 0.6:
                break
            what, wait, comes_back = draw.choice(["rank", "machine", "keeper"]), draw.random(), draw.random() < 0.7
            victim = wait_and_choose(folder, machines, what, draw)
            if victim is None:
                break
            ranks = wait_for_ranks(folder, machines, victim) if what == "rank" else []
            if what == "rank" and not ranks:
                break
            case.kills.append(what)
            (folder.path / "began").unlink(missing_ok=True)
            if ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    draw.choice(ranks).kill()
                continue
            machines.kill(victim)
            time.sleep(wait)
            if comes_back or what == "keeper" or not machines.running():
                machines.start()
        out = machines.printed(case)
        if told(out) is not None or case.wrong:
            break
    return out


def wait_and_choose(folder: Folder, machines: Machines, what: str, draw: random.Random) -> subprocess.Popen[str] | None:
    """The launcher of the machine that is to go, or one of whose ranks is to, at a random moment of the training; None:
    it has ended."""
    wait, began = draw.random() * STEPS * STEP_SECONDS, time.monotonic()
    while not (folder.path / "began").exists():
        if not machines.running() or time.monotonic() - began > DEADLINE_SECONDS:
            return None
        time.sleep(0.02)
    time.sleep(wait)
    running, keeper = machines.running(), machines.keeper()
    if not running or (what == "keeper" and keeper is None):
        return None
    if what == "keeper":
        return keeper
    others = [launcher for launcher in running if launcher is not keeper]
    return draw.choice(others if others and what == "machine" else running)


def wait_for_ranks(folder: Folder, machines: Machines, victim: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks there are; none where all machines have ended. Launchers that meet anew have none for a moment."""
    began = time.monotonic()
    while machines.running() and time.monotonic() - began < DEADLINE_SECONDS:
        if ranks := folder.ranks(victim.pid):
            return ranks
        time.sleep(0.02)
    return []


def steps_lost(path: Path) -> list[int]:
    """What job.note_start has written, of all starts but the first."""
    lines = (path / "starts").read_text().splitlines() if (path / "starts").exists() else []
    return [int(made) - int(step) for made, step in map(str.split, lines[1:])]


def told(out: str | None) -> dict[str, Any] | None:
    lines = [line for line in (out or "").splitlines() if line.startswith("ends ")]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix("ends ")) if lines else None
    return found


class Undisturbed:
    """Runs that nobody disturbed, each made once: what they told, and their weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    def of(self, way: str, processes: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if (way, processes) not in self._known:
            with tempfile.TemporaryDirectory() as path:
                folder = Folder(Path(path), "undisturbed", False)
                process = folder.start(command_of(way, processes))
                found = told(finished(folder, process, Case(way, 0)))
                assert found is not None, f"{way} on {processes} processes: exit {process.returncode}\n{folder.said()}"
                weights = Path(path) / "weights.safetensors"
                self._known[way, processes] = found, load_file(weights) if weights.exists() else {}
        return self._known[way, processes]


def run_case(way: str, number: int, undisturbed: Undisturbed, shown: bool = False) -> Case:
    case, draw = Case(way, number), random.Random(number)
    varies = WAYS[way][1]
    sizes = [1, 2, 4] if WAYS[way][2] else [1, 2, 3, 4]
    if way.startswith("fsdp"):  # it needs two
        sizes.remove(1)
    first = draw.choice([size for size in sizes if size > 1])
    path = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    folder = Folder(path, f"{way}-{number}", shown)
    try:
        out = on_machines(folder, case, draw) if way == MACHINES else None
        for attempt in range(MOST_KILLS + 1 if way != MACHINES else 0):
            processes = draw.choice(sizes) if varies and attempt else first
            case.processes.append(processes)
            process = folder.start(command_of(way, processes))
            if way in (KEPT, MEMORY):
                kill_ranks(folder, process, case, draw)
            elif attempt < MOST_KILLS and draw.random() < (1.0 if attempt == 0 else 0.6):
                case.kills.append(draw.choice(["rank", "ranks", "launcher"]))
                killed(folder, process, case.kills[-1], draw)
            out = finished(folder, process, case)
            if out is None or told(out) is not None:
                break
        if way in (KEPT, MEMORY):
            case.lost = steps_lost(path)
        judge(case, told(out), path, undisturbed, same_bits=not varies or WAYS[way][2])
        case.wrong += folder.left_over()
        case.said = folder.said() if case.wrong else ""
    finally:
        folder.end_all()
        shutil.rmtree(path, ignore_errors=True)
        case.seconds = round(time.monotonic() - began, 1)
    return case


def judge(case: Case, found: dict[str, Any] | None, path: Path, undisturbed: Undisturbed, *, same_bits: bool) -> None:
    """Compare with the run that nobody disturbed."""
    if found is None:
        case.wrong.append("it did not come to its end")
        return
    wanted, weights = undisturbed.of(case.way, case.processes[0])
    if found["ledger"] != wanted["ledger"]:
        case.wrong.append(f"other examples: {found['steps']} steps of {wanted['steps']}, or in another order")
    if same_bits:
        if found["weights"] != wanted["weights"]:
            case.wrong.append("other bits in the weights")
        return
    if gap := difference(load_file(path / "weights.safetensors"), weights):
        case.wrong.append(gap)


def difference(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """In words; empty: they are the same to 1e-10 of their norm."""
    gap = max(float((own[name] - value).norm() / value.norm()) for name, value in wanted.items())
    return f"weights that differ by {gap:.1e} of their norm" if gap > 1e-10 else ""


# ---------------------------------------------------------------- results


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"] if path.exists() else []


def save(path: Path, cases: list[dict[str, Any]], command: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    document = {"command": command, "time": now, "machine": machine(), "counts": counts(cases), "cases": cases}
    part = path.with_name(f"part of {path.name}")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.rename(path)


def counts(cases: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of each way: trainings, kills, those that had to be started again, and those that ended as if undisturbed.

    Ways that only the results have, such as torchrun and torchft, come last."""
    found: dict[str, dict[str, int]] = {}
    for way in dict.fromkeys([*WAYS, *(case["way"] for case in cases)]):
        own = [case for case in cases if case["way"] == way]
        found[way] = {
            "trainings": len(own),
            "kills": sum(len(case["kills"]) for case in own),
            "again": sum(len(case["processes"]) > 1 or bool(case.get("lost")) for case in own),
            "good": sum(not case["wrong"] for case in own),
        }
    return {way: count for way, count in found.items() if count["trainings"]}


def table(cases: list[dict[str, Any]]) -> str:
    """In Markdown: a row for each way."""
    rows = [
        "| | trainings | kills | had to be started again | ended as if undisturbed | hung | left something behind |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, count in counts(cases).items():
        own = [case for case in cases if case["way"] == way]
        hung = sum(any("hung" in text for text in case["wrong"]) for case in own)
        left = sum(any("is left" in text for text in case["wrong"]) for case in own)
        looked = str(left) if way in WAYS else "not looked at"
        begun = f"| {way} | {count['trainings']} | {count['kills']} | {count['again']} | {count['good']} |"
        rows.append(f"{begun} {hung} | {looked} |")
    return "\n".join(rows)


def steps_made_again(cases: list[dict[str, Any]], way: str = KEPT) -> str:
    """Of KEPT or MEMORY, in words: what the starts after the first cost."""
    lost = sorted(steps for case in cases if case["way"] == way for steps in case.get("lost", ()))
    if not lost:
        return ""
    if way == MEMORY:
        return f"Of {len(lost)} such restarts, none repeated more than {lost[-1]} updates."
    free, more = sum(steps <= 0 for steps in lost), sum(steps > 1 for steps in lost)
    return (
        f"Of {len(lost)} such restarts, {free} repeated no update, {len(lost) - free - more} repeated one (the "
        f"interrupted step), and {more} repeated more{f': up to {lost[-1]}' if more else ''}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30, help="how many, dealt out over the ways in turn")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS], metavar="WAY")
    parser.add_argument("--case", metavar="WAY-NUMBER", help="this case alone, with what its processes say")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the results are added here")
    parser.add_argument("--page", action="store_true", help="run nothing; print the table of the results")
    options = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(130))
    if options.page:
        cases = load(options.json)
        print(table(cases), steps_made_again(cases), steps_made_again(cases, MEMORY), sep="\n\n")
        return 0
    undisturbed = Undisturbed()
    if options.case:
        way, _, number = options.case.rpartition("-")
        case = run_case(way, int(number), undisturbed, shown=True)
        print(json.dumps(asdict(case), indent=1))
        return int(bool(case.wrong))
    ways = options.ways
    cases, bad = load(options.json), 0
    done = {(case["way"], case["number"]) for case in cases}
    for index in range(options.cases):
        way, number = ways[index % len(ways)], options.seed + index
        if (way, number) in done:
            continue
        case = run_case(way, number, undisturbed)
        bad += bool(case.wrong)
        cases.append(asdict(case))
        save(options.json, cases, f"python -m tests.chaos --cases {options.cases} --seed {options.seed}")
        word = "; ".join(case.wrong) or "as if undisturbed"
        print(f"{way}-{number}: {', '.join(case.kills)} on {case.processes}, {case.seconds} s: {word}", flush=True)
    print(table(cases))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
