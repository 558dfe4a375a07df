"""The time of an empty job with `paceline run` and with torchrun, and the time of an import.

    python benchmarks/start.py --json benchmarks/results/start.json    # 5 minutes

Each round runs three jobs of two processes in a new random order, timed from the start to the end of the launcher:
Paceline's (`start`, `close`), torchrun's (`init_process_group`, `destroy_process_group`), and torchrun's again (an A/A
control). Without a launcher, each in a new interpreter: `import torch`, the same with `import paceline`, and with
everything that `paceline.start` loads.

Both wall and CPU seconds are shown, since other programs may run at the same time. A ratio is the median of the ratios
within a round, with its 95% interval from a bootstrap over rounds. Memory is that of the launcher and of a waiting
rank: resident, and proportional (shared pages are divided among the processes).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import resource
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from collate_draws import machine

JOBS = {
    "ours": "import paceline\nrun = paceline.start(progress='off')\nIDLE\nrun.close()\n",
    "torchrun": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nIDLE\ndist.destroy_process_group()\n"
    ),
}
IMPORTS = {
    "torch": "import torch",
    "torch, paceline": "import torch, paceline",
    "torch, paceline.start": "import torch, paceline; paceline.start",
}
LAUNCHERS = {
    "ours": [sys.executable, "-m", "paceline", "run", "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT"],
}


def with_port(command: list[str]) -> list[str]:
    """Add a free port: another program may use torchrun's default port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) if word == "PORT" else word for word in command]


def timed(command: list[str]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of a command, with its children."""
    command = with_port(command)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_rounds(commands: dict[str, list[str]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{name: {"s": ..., "cpu s": ...}}, with a number per round."""
    found: dict[str, dict[str, list[float]]] = {name: {"s": [], "cpu s": []} for name in commands}
    draw = random.Random(0)
    for number in range(rounds + 1):
        for name in draw.sample(list(commands), len(commands)):
            took, used = timed(commands[name])
            if number:  # the first round fills the page cache
                found[name]["s"].append(round(took, 3))
                found[name]["cpu s"].append(round(used, 3))
    return found


def compared(found: dict[str, dict[str, list[float]]], pairs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The median of each, and for each pair the median of the ratios within a round, with its interval."""
    result: dict[str, Any] = {
        name: {what: round(statistics.median(values), 3) for what, values in of.items()} for name, of in found.items()
    }
    for title, (top, bottom) in pairs.items():
        result[title] = {
            what: ratio([a / b for a, b in zip(found[top][what], found[bottom][what], strict=True)])
            for what in ("s", "cpu s")
        }
    return result


def ratio(values: list[float], draws: int = 2000) -> list[float]:
    """[median, lower and upper end of its 95% interval]."""
    of, draw = torch.tensor(values), torch.Generator().manual_seed(0)
    medians = of[torch.randint(len(of), (draws, len(of)), generator=draw)].median(dim=1).values
    low, high = medians.quantile(torch.tensor([0.025, 0.975])).tolist()
    return [round(value, 3) for value in (statistics.median(values), low, high)]


def memory(folder: Path) -> dict[str, Any]:
    """MB of the launcher and of rank 0, while the ranks wait."""
    found = {}
    for name, job in JOBS.items():
        script, ready = folder / f"idle_{name}.py", folder / f"ready_{name}"
        wait = f"import os, time; open({str(ready)!r} + os.environ['RANK'], 'w').close(); time.sleep(3)"
        script.write_text(job.replace("IDLE", wait))
        with subprocess.Popen(
            with_port([*LAUNCHERS[name], str(script)]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as launcher:
            while not all(Path(f"{ready}{rank}").exists() for rank in range(2)):
                time.sleep(0.05)
            time.sleep(1.0)
            parent = psutil.Process(launcher.pid)
            ranks = [child for child in parent.children(recursive=True) if str(script) in " ".join(child.cmdline())]
            of = {"launcher": parent, "rank": ranks[0]}
            infos = {who: process.memory_full_info() for who, process in of.items()}
            launcher.wait()
        found[name] = {
            who: {"resident MB": round(info.rss / 1e6, 1), "proportional MB": round(info.pss / 1e6, 1)}
            for who, info in infos.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {}
        for job, text in JOBS.items():
            (folder / f"{job}.py").write_text(text.replace("IDLE", ""))
            commands[job] = [*LAUNCHERS[job], str(folder / f"{job}.py")]
        commands["torchrun again"] = commands["torchrun"]
        load = [os.getloadavg()[0]]
        jobs = compared(
            in_rounds(commands, options.rounds),
            {"ours / torchrun": ("ours", "torchrun"), "torchrun again / torchrun": ("torchrun again", "torchrun")},
        )
        print(json.dumps(jobs, indent=1), flush=True)
        imports = compared(
            in_rounds({title: [sys.executable, "-c", code] for title, code in IMPORTS.items()}, options.rounds),
            {f"{title} / torch": (title, "torch") for title in list(IMPORTS)[1:]},
        )
        print(json.dumps(imports, indent=1), flush=True)
        idle = memory(folder)
        print(json.dumps(idle, indent=1), flush=True)
        load.append(os.getloadavg()[0])
    if options.json:
        about = {
            "command": shlex.join(["python", "benchmarks/start.py", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine() | {"load before and after": [round(value, 1) for value in load]},
            "rounds": options.rounds,
        }
        found = {"jobs": jobs, "imports": imports, "idle": idle}
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
