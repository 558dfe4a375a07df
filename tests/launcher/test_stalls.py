"""A rank that keeps the others waiting is named, with its line and the reason: real processes, a limit of seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import children

from paceline import launcher
from paceline.errors import LaunchError
from paceline.launcher import process_state, stalls
from paceline.launcher.endings import stopped_in_words
from paceline.launcher.process_state import ProcessState
from paceline.launcher.stacks import StackSample
from paceline.launcher.stalls import STALLED, Stalls, in_vain
from paceline.step.call_check import COMPARED
from paceline.step.heartbeat import Heartbeat
from paceline.torch_private.flight_recorder import Call, GroupCalls
from paceline.world import BEAT, ERROR_FILE, read_beat

LIMIT = 2.0

HEAD = """import os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
rank = int(os.environ["RANK"])
def arrived():  # when the stall begins
    open("arrived", "w").close()
def meet():  # with torch loaded: no rank shall wait for another that is still busy with that
    open(f"loaded{rank}", "w").close()
    while not all(os.path.exists(f"loaded{r}") for r in range(int(os.environ["WORLD_SIZE"]))): time.sleep(0.01)
"""
PLAIN = HEAD + "meet()\n" + 'dist.init_process_group("gloo")\ntotal = torch.ones(1)\ndist.all_reduce(total)\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run in; its `tmp` is where launches make theirs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def end(place: Path, code: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What is said of a run that only the launcher can end, since its ranks wait for ever. Nothing is left behind."""
    (place / "script.py").write_text(code)
    before = children()
    exit_code = launcher.run("script.py", nproc=2, stall_seconds=LIMIT, stall_action="end")
    err = capfd.readouterr().err
    assert exit_code == STALLED, err
    assert (place / "arrived").exists(), err
    assert set(children()) <= set(before)
    assert [path for path in (place / "tmp").rglob("*") if path.suffix != ".log" and path.is_file()] == []
    return err


def line_of(code: str, text: str) -> int:
    (number,) = (n for n, line in enumerate(code.split("\n"), 1) if text in line)
    return number


@pytest.mark.conformance
def test_a_stopped_rank(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        PLAIN
        + "if rank == 1:\n    arrived()\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.all_reduce(total)  # the next\n"
    )
    head, first, second, away, *_ = end(place, code, capfd).splitlines()
    assert re.fullmatch(r"rank 0 has waited for other ranks for \d s\.", head)
    assert first == f"  rank 0 waits at script.py, line {line_of(code, '# the next')}, in all_reduce()"
    assert re.fullmatch(r"  rank 1 is stopped by a signal; `kill -CONT \d+` resumes it", second)
    assert away == "  rank 1 has not reached that call."


@pytest.mark.conformance
def test_a_stop_is_told_long_before_the_limit(place: Path) -> None:
    """Of a rank by the launcher, and of the launcher by a rank. A process of rank 1's lets both go on."""
    code = f"""{PLAIN}
import subprocess
if rank == 1:
    launcher = os.getppid()
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {{os.getpid()}}; kill -STOP {{launcher}}; sleep 13; "
                      f"kill -CONT {{launcher}}; touch over"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists("over"): time.sleep(0.1)
"""
    (place / "script.py").write_text(code)
    started = subprocess.run(
        [sys.executable, "-c", WITH_PATIENCE, "script.py"], capture_output=True, text=True, timeout=90, check=False
    )
    assert started.returncode == 0, started.stderr
    assert re.search(r"rank 1 has been stopped for \d s\.", started.stderr)
    assert re.search(r"rank 1 is stopped by a signal; `kill -CONT \d+` resumes it", started.stderr)
    assert re.search(
        r"the launcher, process \d+, is stopped by a signal\. The ranks continue without supervision", started.stderr
    )


def test_a_stopped_rank_is_named_where_others_have_failed_for_it() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert stopped_in_words({2: process.pid}, lambda rank: "a parameter server") == ""
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10.0
        while not process_state.read_state(process.pid).stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        told = f"rank 2, a parameter server, is stopped by a signal; `kill -CONT {process.pid}` resumes it\n"
        assert stopped_in_words({2: process.pid}, lambda rank: "a parameter server") == told
    finally:
        process.kill()
        process.wait()


WITH_PATIENCE = """import sys
from paceline import launcher
from paceline.launcher import stalls
stalls.STOPPED_SECONDS = 1.0
stalls.POLL_SECONDS = 0.5
sys.exit(launcher.run(sys.argv[1], nproc=2))
"""


@pytest.mark.full
def test_an_endless_loop(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = PLAIN + "if rank == 1:\n    arrived()\n    while True: pass  # here\ndist.all_reduce(total)\n"
    err = end(place, code, capfd)
    assert f"\n  rank 1 is computing at script.py, line {line_of(code, '# here')}\n" in err
    assert "rank 1 has not reached that call." in err


@pytest.mark.conformance
def test_a_rank_in_a_disk_wait(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After vfork the kernel holds a process in the same state, until its child ends or becomes another program."""
    code = f"""{PLAIN}
if rank == 1:
    arrived()
    import ctypes
    ctypes.PyDLL(None).vfork()
    time.sleep(300)  # the child
dist.all_reduce(total)
"""
    err = end(place, code, capfd)  # SIGTERM does not reach it: SIGKILL comes 3 s later
    kept = r"\n  rank 1 waits in the kernel for a disk or a device(, in \w+)? \(process \d+\)"
    assert re.search(rf"{kept}, at script\.py, line {line_of(code, '# the child')}\n", err), err
    assert "cannot be killed" not in err


LOADER = """
class Slow(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        if rank == 1 and i >= 4:
            arrived()
            time.sleep(300)  # here
        return torch.ones(2)
"""


@pytest.mark.full
@pytest.mark.parametrize("stop", [False, pytest.param(True, marks=pytest.mark.full)], ids=["asleep", "stopped"])
def test_a_worker_of_a_data_loader(place: Path, capfd: pytest.CaptureFixture[str], stop: bool) -> None:
    """The user's own line in it, and not that of the loader."""
    slow = LOADER.replace("time.sleep(300)", "os.kill(os.getpid(), signal.SIGSTOP)") if stop else LOADER
    code = f"""{HEAD}{slow}
import paceline, paceline.session, paceline.strategies.replicated.ddp
meet()
run = paceline.start(device="cpu", progress="off", strategy="ddp:reducer=native")
net = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for batch in run.loader(Slow(), global_batch=4, num_workers=1):  # the loop
    run.backward(model(batch).square().mean())
    run.step(optimizer)
"""
    err = end(place, code, capfd)
    loop = line_of(code, "# the loop")
    assert f"\n  rank 1 is at script.py, line {loop}, where it waits for its DataLoader\n" in err, err
    worker = r"\n    its DataLoader worker, process \d+, is "
    if stop:
        assert re.search(worker + r"stopped by a signal; `kill -CONT \d+` resumes it\n", err), err
    else:
        assert re.search(worker + rf"at script\.py, line {line_of(code, '# here')}\n", err), err


@pytest.mark.conformance
def test_a_rank_that_left_the_loop(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It goes on with something else."""
    code = f"""{PLAIN}
for step in range(9):
    if rank == 1 and step == 3:
        break
    dist.all_reduce(total)  # the loop
if rank == 1:
    arrived()
    time.sleep(300)  # elsewhere
"""
    err = end(place, code, capfd)
    assert f"\n  rank 0 waits at script.py, line {line_of(code, '# the loop')}, in all_reduce()\n" in err, err
    assert f"\n  rank 1 is at script.py, line {line_of(code, '# elsewhere')}\n" in err, err
    assert "Every rank must make the same calls in the same order" in err


@pytest.mark.full
def test_a_restart_of_a_run_that_stalls(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"""{PLAIN}
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(total)
"""
    (place / "script.py").write_text(code)
    options = {"stall_seconds": LIMIT, "stall_action": "restart", "max_restarts": 1}
    assert launcher.run("script.py", nproc=2, **options) == 0
    err = capfd.readouterr().err
    assert "rank 1 is stopped by a signal" in err
    assert err.endswith("paceline: restart 1 of 1.\n")


@pytest.mark.full
def test_a_rank_that_waits_in_every_step_is_not_accused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is found at the same line each time; its count of batches says that it moves."""
    code = f"""{HEAD}
import paceline, paceline.session, paceline.strategies.replicated.ddp
meet()
run = paceline.start(device="cpu", progress="off", strategy="ddp:reducer=native")
net = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(64, 2))
for (batch,) in run.loader(data, global_batch=4):
    if rank == 1:
        time.sleep(0.3)
    run.backward(model(batch).square().mean())
    run.step(optimizer)
"""
    (place / "script.py").write_text(code)
    assert launcher.run("script.py", nproc=2, stall_seconds=LIMIT, stall_action="end") == 0
    assert capfd.readouterr().err == ""


def test_the_limit_follows_the_usual_time_of_a_batch() -> None:
    watch = Stalls({0: "none"}, alone=False)
    assert watch.limit == stalls.STALL_SECONDS
    for beats, now in [(0, 0.0), (1, 10.0), (1, 14.0), (2, 30.0), (3, 50.0), (3, 80.0)]:
        watch._paces[0].add(beats, now)
    assert watch.limit == pytest.approx(20.0 * stalls.USUAL_TIMES)
    assert Stalls({0: "none"}, alone=False, seconds=7.0).limit == 7.0


def test_a_batch_is_counted_by_one_write_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call and no other function: the shortest step of a run takes some hundred microseconds."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    heartbeat = Heartbeat()
    called: list[str] = []
    sys.setprofile(lambda frame, event, called_: called.append(called_.__name__) if event == "c_call" else None)
    try:
        heartbeat()
    finally:
        sys.setprofile(None)
    assert called == ["pack_into", "setprofile"]
    assert read_beat(str(tmp_path / "error") + BEAT) == 1
    heartbeat.close()
    heartbeat()  # after the end of a run
    again = Heartbeat()
    again()
    assert read_beat(str(tmp_path / "error") + BEAT) == 2
    again.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stall_seconds": 0.0}, r"--stall-timeout 0: give seconds above 0, such as 300"),
        ({"stall_action": "stop"}, "--stall-action stop: unknown action. Give one of say, end, restart"),
        ({"stall_action": "restart"}, "--stall-action restart: no restart is allowed. Give --max-restarts N too"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launcher.run("script.py", **options)


# ---------------------------------------------------------------- what the kernel says


def test_states() -> None:
    stat = "12 (a (b) c) D 1 12 12 0 -1 4194304 100 0 7 0 1 2"
    assert process_state.parse_stat(stat) == ("D", 7)
    waits = ProcessState("D", wait_channel="nfs_wait")
    assert process_state.describe(12, waits) == "waits in the kernel for a disk or a device, in nfs_wait (process 12)"
    assert process_state.describe(12, ProcessState("t")) == "is stopped by a debugger (process 12)"
    assert process_state.describe(12, ProcessState("S")) == ""
    now, before = ProcessState("S", 500, 3 << 30), ProcessState("S", 100, 3 << 30)
    assert process_state.describe(12, now, before, 4.0) == (
        "is swapping: 3.0 GiB of process 12 are in swap space, 100 page faults per second"
    )
    assert process_state.describe(12, now, before, 400.0) == ""
    assert process_state.read_state(os.getpid()).code == process_state.RUNNING
    assert process_state.read_state(2**30) == ProcessState()


# ---------------------------------------------------------------- ranks that end early


@pytest.mark.full
def test_a_rank_that_left_before_the_others_came(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No connection breaks: the other waits, and the run is ended after the limit, whatever the action."""
    code = f"""{HEAD}
meet()
if rank == 1:
    arrived()
    sys.exit()  # here
dist.init_process_group("gloo")  # the meeting
"""
    (place / "script.py").write_text(code)
    assert launcher.run("script.py", nproc=2, stall_seconds=LIMIT) == 1
    story = capfd.readouterr().err.splitlines()[-1]
    assert story.startswith(
        f"rank 1 ended early, with exit code 0, by sys.exit() at script.py, line {line_of(code, '# here')}, and rank 0 "
        f"has waited since then at script.py, line {line_of(code, '# the meeting')}, in init_process_group()"
    )


LEAVING = """
for step in range(9):
    if rank == 1 and step == 3:
        {leave}  # here
    dist.all_reduce(total)
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("leave", "place_of_exit"),
    [
        ("sys.exit()", "by sys.exit() at script.py, line {here}"),
        ("os._exit(0)", "by os._exit() at script.py, line {here}"),
        ("break", "at the end of script.py"),
    ],
)
def test_the_rank_that_left_is_blamed_and_not_its_victim(
    place: Path, capfd: pytest.CaptureFixture[str], leave: str, place_of_exit: str
) -> None:
    code = PLAIN + LEAVING.format(leave=leave)
    (place / "script.py").write_text(code)
    assert launcher.run("script.py", nproc=2) == 1
    first, second, *_ = capfd.readouterr().err.splitlines()
    where = place_of_exit.format(here=line_of(code, "# here"))
    assert first.startswith(
        f"rank 1 ended early, with exit code 0, {where}, while others still needed it: do all ranks"
    )
    assert second.startswith("rank 0 failed: ")


@pytest.mark.full
def test_a_rank_that_left_a_sum_in_shared_memory(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where ddp adds in memory that the processes share."""
    code = f"""{HEAD}
import paceline, paceline.session, paceline.strategies.replicated.ddp
meet()
run = paceline.start(device="cpu", progress="off")
net = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(16, 2))
for step, (batch,) in enumerate(run.loader(data, global_batch=4)):
    if rank == 1 and step == 2:
        os._exit(0)  # here
    run.backward(model(batch).square().mean())
    run.step(optimizer)
"""
    (place / "script.py").write_text(code)
    assert launcher.run("script.py", nproc=2) == 1
    story = capfd.readouterr().err
    where = f"by os._exit() at script.py, line {line_of(code, '# here')}"
    assert f"rank 1 ended early, with exit code 0, {where}, while others still needed it" in story, story


@pytest.mark.conformance
def test_ranks_that_all_wait_for_each_other_are_told_soon(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of the same ranks, each rank in another: gloo sees no mismatch, and waits for 30 minutes."""
    monkeypatch.setattr(stalls, "DEADLOCK_SECONDS", LIMIT)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.5)
    code = PLAIN + "groups = [dist.new_group([0, 1]) for _ in range(2)]\narrived()\n"
    code += "if rank == 0:\n    dist.all_reduce(total, group=groups[0])  # zero\n"
    code += "else:\n    dist.all_reduce(total, group=groups[1])  # one\n"
    (place / "script.py").write_text(code)
    exit_code = launcher.run("script.py", nproc=2, stall_action="end")
    err = capfd.readouterr().err
    assert exit_code == STALLED, err
    assert (place / "arrived").exists(), err
    assert f"\n  rank 0 waits at script.py, line {line_of(code, '# zero')}, in all_reduce()\n" in err, err
    assert f"\n  rank 1 waits at script.py, line {line_of(code, '# one')}, in all_reduce()\n" in err, err
    assert "\n  All ranks wait for each other.\n" in err, err
    assert "Every rank must make the same calls in the same order" in err, err


@pytest.mark.conformance
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("dist.all_reduce(torch.ones(3))", id="a call"),
        pytest.param("run.backward(model(batch).square().mean())", id="a backward", marks=pytest.mark.full),
    ],
)
def test_a_call_on_one_rank_ends_the_run_where_calls_are_not_compared_any_more(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """One rank waits in a sum over shared memory, the other in a call of gloo's: nobody but the launcher can know."""
    monkeypatch.setattr(stalls, "DEADLOCK_SECONDS", LIMIT)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.5)
    script = f"""{HEAD}
import paceline, paceline.session, paceline.strategies.replicated.ddp
meet()
run = paceline.start(device="cpu", progress="off", strategy="ddp")
net = torch.nn.Linear(64, 64)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(4 * {COMPARED + 4}, 64))
for step, (batch,) in enumerate(run.loader(data, global_batch=4)):
    if step == {COMPARED + 2}:
        arrived()
        if rank == 0: {code}
    run.backward(model(batch).square().mean())
    run.step(optimizer)
"""
    (place / "script.py").write_text(script)
    assert launcher.run("script.py", nproc=2) == STALLED
    story = capfd.readouterr().err
    assert "All ranks wait for each other." in story
    assert "These call numbers can never match, so the run ends." in story


def calls(number: int, ended: int, name: str = "all_reduce", *, group: str = "0", queued: int = 1) -> GroupCalls:
    """A rank in call `number`, or 0: in none, after call `ended`."""
    title = "default_pg (gloo)" if group == "0" else f"{group} (gloo)"
    under_way = Call(number, name, "float32 [1]", False) if number else None
    made = tuple(Call(n, "all_reduce", "float32 [1]", False) for n in range(1, ended + 1))
    return GroupCalls(f"{group} gloo", title, under_way, queued if number else 0, made)


@pytest.mark.parametrize(
    ("of", "all_idle", "vain"),
    [
        ([[calls(5, 4)], [calls(0, 4)]], True, True),
        ([[calls(5, 4)], [calls(0, 4)]], False, False),  # rank 1 may still come
        ([[calls(5, 4)], [calls(5, 4)]], True, False),  # both are in it: a slow network
        ([[calls(5, 4)], [calls(4, 3, queued=2)]], True, False),  # queued behind another
        ([[calls(5, 4)], [calls(5, 4, "broadcast")]], False, True),  # other calls of one number
        ([[calls(0, 4)], [calls(0, 4)]], True, False),  # in no call of the recorder's
        ([[calls(5, 4)], []], True, True),  # of a group of all ranks
        ([[calls(5, 4, group="1")], [calls(7, 6, group="2")]], True, True),
        ([[calls(5, 4, group="1")], [calls(5, 4, group="1")], [calls(0, 1)]], True, False),  # rank 2 is no member
        ([[calls(5, 4)], [calls(5, 4)], [calls(0, 4)]], True, True),
    ],
)
def test_that_ranks_wait_in_vain_is_proved_by_numbers(of: list[list[GroupCalls]], all_idle: bool, vain: bool) -> None:
    assert in_vain(dict(enumerate(of)), range(len(of)) if all_idle else ()) == vain


def test_a_rank_that_does_not_answer_proves_nothing() -> None:
    assert not in_vain({0: [calls(5, 4)]}, range(2))
    assert not in_vain({}, range(2))


@pytest.mark.full
def test_a_call_that_was_queued_is_told_where_the_script_has_gone_on(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU: no line of rank 0 tells what it waits for."""
    code = f"""{PLAIN}
dist.broadcast(total, 0)
if rank == 0:
    works = [dist.all_reduce(torch.ones(2, 3), async_op=True), dist.all_reduce(total, async_op=True)]
    arrived()
    while not works[0].is_completed(): time.sleep(0.01)
else:
    time.sleep(300)
"""
    err = end(place, code, capfd)
    where = "in call 3, all_reduce of float32 [2, 3], with 1 more queued"
    after = "in none, after call 2, broadcast of float32 [1]"
    assert f"\n  In group default_pg (gloo): rank 0 is {where}; rank 1 is {after}.\n" in f"{err}\n", err


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("zero", "one", "told"),
    [
        (
            "dist.broadcast(total, 0)",
            "dist.all_reduce(total)",
            ["broadcast of float32 [1]", "all_reduce of float32 [1]"],
        ),
        pytest.param(
            "dist.all_reduce(total)",
            "dist.all_reduce(torch.ones(2, 2))",
            ["all_reduce of float32 [1]", "all_reduce of float32 [2, 2]"],
            marks=pytest.mark.full,
        ),
    ],
    ids=["names", "sizes"],
)
def test_calls_of_one_number_that_do_not_match_are_named(
    place: Path, capfd: pytest.CaptureFixture[str], zero: str, one: str, told: list[str]
) -> None:
    code = f"{PLAIN}arrived()\n{zero} if rank == 0 else {one}\ntime.sleep(300)\n"
    err = end(place, code, capfd)
    assert f"    Call 2 is not the same on all ranks: {told[0]} on rank 0, {told[1]} on rank 1.\n" in f"{err}\n", err


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("before", "line", "function"),
    [
        ("", "model(total).sum().backward()", "backward"),
        # In the second step the ranks agree on buckets.
        pytest.param("model(total).sum().backward()\n", "model(total)", "forward", marks=pytest.mark.full),
    ],
)
def test_a_step_of_distributed_data_parallel_on_one_rank_only(
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    line: str,
    function: str,
) -> None:
    """It waits in native code, and not in a function of torch.distributed."""
    monkeypatch.setattr(stalls, "DEADLOCK_SECONDS", LIMIT)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.5)
    code = PLAIN + f"model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n{before}arrived()\n"
    code += f"if rank == 0:\n    {line}  # zero\n"
    code += "else:\n    dist.recv(total, src=0)  # one\n"
    (place / "script.py").write_text(code)
    exit_code = launcher.run("script.py", nproc=2, stall_action="end")
    err = capfd.readouterr().err
    assert exit_code == STALLED, err
    assert (place / "arrived").exists(), err
    assert f"\n  rank 0 waits at script.py, line {line_of(code, '# zero')}, in {function}()\n" in err, err
    assert f"\n  rank 1 waits at script.py, line {line_of(code, '# one')}, in recv()\n" in err, err


@pytest.mark.full
def test_ranks_that_wait_for_a_thread_of_another_are_given_time(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All main threads wait in a collective, and one comes to its end by what a thread makes meanwhile."""
    monkeypatch.setattr(stalls, "DEADLOCK_SECONDS", LIMIT)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.5)
    code = (
        PLAIN
        + f"""import threading
group = dist.new_group([0, 1])
def work():
    time.sleep({3 * LIMIT})
    dist.all_reduce(total, group=group)
if rank == 0:
    dist.all_reduce(total, group=group)
else:
    threading.Thread(target=work).start()
dist.barrier()
"""
    )
    (place / "script.py").write_text(code)
    assert launcher.run("script.py", nproc=2, stall_action="end") == 0, capfd.readouterr().err


def test_ranks_that_all_wait_are_given_time_where_that_proves_nothing(tmp_path: Path) -> None:
    """By what the launcher knows: GPUs, other machines, a limit of the user's, a rank that uses a core."""
    torch_at = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    sample = StackSample(((torch_at, 1, "all_reduce"), ("/u/train.py", 3, "<module>")), 0.0)
    sight = stalls._Sight(sample, 0.0, sample, ProcessState("S"), ProcessState("S"), 0)
    files = {rank: str(tmp_path / str(rank)) for rank in (0, 1)}

    def deadlocked(one: stalls._Sight = sight, **options: Any) -> bool:
        watch = Stalls(files, False, **{"on_cpus": True, **options})
        watch._seen = {0: sight, 1: one}
        return watch._deadlocked(20.0)

    assert deadlocked()
    assert not deadlocked(on_cpus=False)
    assert not deadlocked(several=True)
    assert not deadlocked(seconds=60.0)
    assert not deadlocked(replace(sight, cores=0.5))
    works, waits = ("/u/train.py", 9, "listen"), ("/v/lib/python3.11/threading.py", 320, "wait")
    assert deadlocked(replace(sight, last=replace(sample, others=(waits, (torch_at, 2, "recv")))))
    assert not deadlocked(replace(sight, last=replace(sample, others=(waits, works))))
    assert not deadlocked(replace(sight, state=ProcessState("D")))
    computes = StackSample((("/u/train.py", 3, "<module>"),), 0.0)
    assert not deadlocked(replace(sight, first=computes, last=computes))


@pytest.mark.conformance
@pytest.mark.parametrize("hook_seconds", [0.0, 0.7])
def test_a_sum_on_one_rank_only(hook_seconds: float, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where calls are not compared any more gloo aborts one rank: both calls and lines are said.

    Args:
        hook_seconds: how long the script's excepthook takes on the other rank, which fails because of the abort. Until
            the hook has returned, that rank is outside its script and has recorded no exception.
    """
    code = f"""{HEAD}
import contextlib, paceline, paceline.session, paceline.strategies.replicated.ddp
meet()
slow_hook = contextlib.ExitStack()
slow_hook.callback(time.sleep, {hook_seconds})
sys.excepthook = slow_hook.__exit__
run = paceline.start(device="cpu", progress="off", strategy="ddp:reducer=native")
net = torch.nn.Linear(64, 64)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(4 * {COMPARED + 4}, 64))
for step, (batch,) in enumerate(run.loader(data, global_batch=4)):
    if rank == 0 and step == {COMPARED + 2}:
        run.sum(1.0)  # the sum
    run.backward(model(batch).square().mean())  # the backward
    run.step(optimizer)
"""
    (place / "script.py").write_text(code)
    exit_code = launcher.run("script.py", nproc=2)
    err = capfd.readouterr().err
    print(err)
    assert exit_code != 0
    assert f"  rank 0 was at script.py, line {line_of(code, '# the sum')}, in sum()" in err, err
    assert f"  rank 1 was at script.py, line {line_of(code, '# the backward')}, in backward()" in err, err
    assert "Ranks were in different collective operations." in err, err
