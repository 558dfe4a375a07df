"""Measures each script of this folder without the doctor, and writes the numbers to cases.json.

    python tests/doctor/resume_scripts/truth.py                  every script, about two minutes each on two cores
    python tests/doctor/resume_scripts/truth.py NAME --kills 17  some, killed within these updates
    python tests/doctor/resume_scripts/truth.py --check          measures nothing: is cases.json complete?

Of each script: the undisturbed training, twice (`repeat_equal`: were both the same to the last bit?). Then for each of
some updates: a new training whose ranks are killed (SIGKILL) right after that update of the optimizer, before the
script goes on, and its resume with the case's `resume_args`. The final weights that rank 0 writes to the file FINAL are
compared with those of the undisturbed training.

Of each kill, `truth` has:
    killed_after        the update
    newest              the newest checkpoint that lay there then, and the update in its name
    resumed_updates     updates of the resumed training
    total_updates       newest + resumed_updates: differs from `updates` where the resumed training is longer or shorter
    first_difference    the first update after which rank 0's weights differ from the undisturbed training's, counting
                        from `newest`. None: no update did
    equal               are the final weights equal to the last bit, and are they as many?
    parts               of each part of FINAL: tensors, how many differ; of those with floating point, the largest
                        difference and the norm of all differences relative to that of the undisturbed training's
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CASES = HERE / "cases.json"
SECONDS = 120
KILLED_AT = (0.45, 0.71, 0.93)  # of all updates


# In each rank: the script, with a count of its updates.


def being_prepared() -> bool:
    """Is this a step by which torch.distributed.checkpoint fills an optimizer that has no state yet?"""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def rank_program(record: Path, kill_after: int, script: str, arguments: list[str]) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    rank = int(os.environ["RANK"])
    lines = (record / f"updates-{rank}.txt").open("w", buffering=1)
    first: list[object] = []
    updates = 0

    def count(optimizer, args, kwargs):
        nonlocal updates
        if being_prepared():
            return
        first.append(optimizer)
        if optimizer is not first[0]:
            return
        updates += 1
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
        print(updates, digest.hexdigest()[:16], f"{optimizer.param_groups[0]['lr']:.9g}", file=lines)
        if updates == kill_after:
            (record / f"pid-{rank}").write_text(str(os.getpid()))
            time.sleep(SECONDS)

    register_optimizer_step_post_hook(count)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


# Outside: torchrun, the kill, and the comparison.


def kill_all(process: subprocess.Popen[bytes], pids: list[int]) -> None:
    import psutil

    children = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            children += [p.pid for p in psutil.Process(pid).children(recursive=True)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids + children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def launch(script: Path, arguments: list[str], record: Path, kill_after: int = 0) -> list[list[str]]:
    """The updates of rank 0: number, digest of the weights, learning rate."""
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command += ["--rank-program", str(record), str(kill_after), str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FINAL": str(record / "final.pt")}
    with open(record / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=record, start_new_session=True
        )
        deadline = time.monotonic() + SECONDS
        marks = [record / "pid-0", record / "pid-1"]
        while process.poll() is None:
            if kill_after and all(mark.exists() and mark.read_text() for mark in marks):
                kill_all(process, [int(mark.read_text()) for mark in marks])
                break
            if time.monotonic() > deadline:
                kill_all(process, [])
                raise SystemExit(f"{script.name}: no end within {SECONDS} s, see {record}/log.txt")
            time.sleep(0.02)
    # Rarely, gloo aborts a rank at exit, after all work: what counts is that FINAL was written.
    if not kill_after and process.returncode and not (record / "final.pt").exists():
        raise SystemExit(f"{script.name}: exit {process.returncode}, see {record}/log.txt")
    if kill_after and process.returncode != -signal.SIGKILL:
        raise SystemExit(f"{script.name}: it ended before update {kill_after}, see {record}/log.txt")
    return [line.split() for line in (record / "updates-0.txt").read_text().splitlines()]


def newest_in(out: Path) -> tuple[str, int]:
    """The entry with the highest update in its name."""
    names = [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    numbered = [(int(re.findall(r"\d+", name)[-1]), name) for name in names if re.search(r"\d", name)]
    return (max(numbered)[1], max(numbered)[0]) if numbered else ("", 0)


def tensors(value: object, name: str = "") -> dict[str, object]:
    import torch

    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        return {k: t for key, item in value.items() for k, t in tensors(item, f"{name}.{key}".strip(".")).items()}
    return {name: torch.tensor(float(value))}


def compared(this: Path, that: Path) -> dict[str, dict[str, float]]:
    """Of each part of FINAL (a script with one model writes its state_dict, and the part is `model`)."""
    import torch

    a, b = torch.load(this), torch.load(that)
    if not all(isinstance(part, dict) for part in a.values()):
        a, b = {"model": a}, {"model": b}
    parts = {}
    for part in a:
        left, right = tensors(a[part]), tensors(b[part])
        assert left.keys() == right.keys()
        differ, largest, square, norm = 0, 0.0, 0.0, 0.0
        for name, x in left.items():
            y = right[name]
            differ += not torch.equal(x, y)
            if not x.is_floating_point():
                continue
            gap = x.double() - y.double()
            largest = max(largest, gap.abs().max().item() if gap.numel() else 0.0)
            square += gap.square().sum().item()
            norm += x.double().square().sum().item()
        relative = (square / norm) ** 0.5 if norm else square**0.5
        parts[part] = {
            "tensors": len(left),
            "differ": differ,
            "largest": float(f"{largest:.3g}"),
            "relative": float(f"{relative:.3g}"),
        }
    return parts


def measure(name: str, case: dict, kills: list[int], keep: Path) -> dict:
    script = HERE / f"{name}.py"

    def arguments(key: str, out: Path) -> list[str]:
        text = case[key].replace("{latest}", str(out / newest_in(out)[0])).replace("{out}", str(out))
        return text.split()

    folder = keep / name
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    whole = launch(script, arguments("args", folder / "out"), folder / "whole")
    seconds = time.monotonic() - began
    again = launch(script, arguments("args", folder / "out-again"), folder / "again")
    parts = compared(folder / "whole/final.pt", folder / "again/final.pt")
    repeat = whole == again and not any(part["differ"] for part in parts.values())
    truth: dict = {"updates": len(whole), "seconds": round(seconds, 1), "repeat_equal": repeat, "kills": []}
    for kill in kills or sorted({round(share * len(whole)) for share in KILLED_AT}):
        out, record = folder / f"out-{kill}", folder / f"killed-{kill}"
        launch(script, arguments("args", out), record, kill)
        newest, begun = newest_in(out)
        # The same folder's entries may be replaced by the resumed training: what it writes does not count as newest.
        resumed = launch(script, arguments("resume_args", out), folder / f"resumed-{kill}")
        expected = {number: digest for number, digest, _ in whole}
        first = None
        for number, digest, _ in resumed:
            if expected.get(str(begun + int(number))) != digest:
                first = begun + int(number)
                break
        parts = compared(folder / "whole/final.pt", folder / f"resumed-{kill}/final.pt")
        total = begun + len(resumed)
        truth["kills"].append(
            {
                "killed_after": kill,
                "newest": newest,
                "resumed_updates": len(resumed),
                "total_updates": total,
                "first_difference": first,
                "equal": total == len(whole) and not any(part["differ"] for part in parts.values()),
                "parts": parts,
            }
        )
    return truth


def problems(cases: dict) -> list[str]:
    """What cases.json lacks, or claims against its own numbers."""
    found = []
    scripts = {path.stem for path in HERE.glob("*.py")} - {"truth"}
    found += [f"{name}: no case" for name in sorted(scripts - cases.keys())]
    found += [f"{name}: no script" for name in sorted(cases.keys() - scripts)]
    for name in sorted(scripts & cases.keys()):
        case, lines = cases[name], (HERE / f"{name}.py").read_text().splitlines()
        if len(lines) > 100:
            found.append(f"{name}: {len(lines)} lines")
        truth = case.get("truth") or {}
        if not truth.get("kills"):
            found.append(f"{name}: not measured")
            continue
        if not truth["repeat_equal"]:
            found.append(f"{name}: two undisturbed trainings differ")
        equal = [kill["equal"] for kill in truth["kills"]]
        if case["faulty"] and all(equal):
            found.append(f"{name}: faulty, but every resume was equal")
        if not case["faulty"] and not all(equal):
            found.append(f"{name}: healthy, but a resume was not equal")
        if case["faulty"] and not (case["fault"] and 1 <= case["line"] <= len(lines)):
            found.append(f"{name}: no fault or no line")
    return found


def main() -> None:
    if sys.argv[1:2] == ["--rank-program"]:
        rank_program(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kills", type=int, nargs="*", default=[], help="updates, instead of three shares of all")
    parser.add_argument("--keep", type=Path, help="a folder for logs and checkpoints")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    cases = json.loads(CASES.read_text())
    if not options.check:
        with tempfile.TemporaryDirectory() as temporary:
            for name in options.names or sorted(cases):
                truth = measure(name, cases[name], options.kills, options.keep or Path(temporary))
                print(name, "faulty" if cases[name]["faulty"] else "healthy", json.dumps(truth), flush=True)
                cases = json.loads(CASES.read_text())
                cases[name]["truth"] = truth
                CASES.write_text(json.dumps(cases, indent=2) + "\n")
    found = problems(cases)
    print("\n".join(found) or f"{len(cases)} cases, each as cases.json says")
    raise SystemExit(bool(found) and options.check)


if __name__ == "__main__":
    main()
