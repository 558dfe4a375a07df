"""`paceline run` with real processes. Every wait has a deadline, and no launch may leave a process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from tests.launcher.launches import DEADLINE_SECONDS, Launches, marked, wait_for
from tests.ranks import children

from paceline import launcher
from paceline.errors import LaunchError
from paceline.launcher import process_state, processes
from paceline.launcher.interrupts import Interrupts, Stopped

# ---------------------------------------------------------------- a good run


def test_script_runs_as_with_plain_python(launches: Launches) -> None:
    """Arguments, path, names, settings and environment; also that lines of two ranks never mix."""
    (launches.directory / "inner").mkdir()
    (launches.directory / "inner" / "beside.py").write_text("HERE = True")
    code = """
        import atexit, json, os, sys
        import beside
        class Thing: pass
        atexit.register(lambda: print("at exit", sys.modules["__main__"].Thing.__module__))
        value: int = 3
        facts = dict(argv=sys.argv, path=sys.path[0], name=__name__, file=__file__, annotations=str(__annotations__),
                     stdout=[sys.stdout.line_buffering, sys.stdout.write_through],
                     environ={name: os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS", "PACELINE_SETTINGS")})
        if __name__ == "__main__":
            with open(f"facts{os.environ.get('RANK', '')}.json", "w") as file:
                json.dump(facts, file)
        for _ in range(200):
            print("a" * 10, "b" * 10, "c" * 10)
    """
    script = launches.script(code, "inner/script.py")
    arguments = ["--epochs", "3", "--nproc", "7", "--", "a b", "--help"]
    plain = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=launches.directory,
        env=launches.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    launches.environ |= {"RANK": "5", "PACELINE_SETTINGS": '{"seed": 1}', "PYTHONUNBUFFERED": "1"}
    launches.environ.pop("OMP_NUM_THREADS", None)
    code_, out, err = launches.run("--nproc", "2", "--tee", "1", "--strategy", "ddp", script, *arguments)

    assert (code_, err) == (0, "")
    lines = plain.stdout.splitlines()
    assert [line for line in out.splitlines() if not line.startswith("[")] == lines
    assert [line for line in out.splitlines() if line.startswith("[")] == [f"[rank 1] {line}" for line in lines]
    expected = json.loads((launches.directory / "facts.json").read_text())
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in ("0", "1"):
        facts = json.loads((launches.directory / f"facts{rank}.json").read_text())
        assert facts.pop("environ") == {
            "RANK": rank,
            "OMP_NUM_THREADS": threads,
            "PACELINE_SETTINGS": '{"strategy": "ddp"}',
        }
        assert facts.pop("stdout") == [True, False]  # each line in one piece
        assert facts == {name: value for name, value in expected.items() if name not in ("environ", "stdout")}


def test_only_loopback_listens(launches: Launches) -> None:
    code = """
        import os, pathlib, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.new_group([0, 1])
        pathlib.Path(f"ready{dist.get_rank()}").write_text(str(int(total)))
        while not os.path.exists("go"):
            time.sleep(0.02)
    """
    process = launches.start("--nproc", "2", launches.script(code))
    launches.wait_for_file("ready0", "ready1")
    tree = marked(launches.mark)
    listening = {c.laddr.ip for p in tree for c in p.net_connections("all") if c.status == psutil.CONN_LISTEN}
    bound = {c.laddr.ip for p in tree for c in p.net_connections("inet")}
    (launches.directory / "go").touch()
    assert launches.end(process) == (0, "", "")
    assert len(tree) == 5  # the launcher, two ranks, and two shells that tidy up should the launcher be killed
    assert listening == {"127.0.0.1"}
    assert bound <= {"127.0.0.1", "::ffff:127.0.0.1"}  # the second: a client by way of an IPv6 socket
    assert (launches.directory / "ready0").read_text() == "2"


def test_open_process_group_is_closed(launches: Launches, capfd: pytest.CaptureFixture[str]) -> None:
    """After the script's own exit functions. Left open, gloo aborts the process every other time."""
    code = """
        import atexit, sys, types
        yes = lambda: True
        sys.modules["torch.distributed"] = types.SimpleNamespace(
            is_available=yes, is_initialized=yes, destroy_process_group=lambda: print("closed"))
        atexit.register(print, "at exit")
        print("end")
    """
    assert launcher.run(str(launches.directory / launches.script(code))) == 0
    assert capfd.readouterr().out.split("\n") == ["end", "at exit", "closed", ""]


# ---------------------------------------------------------------- failures


def test_a_rank_that_leaves_with_a_failing_exit_code_does_not_wait_for_the_others(launches: Launches) -> None:
    """Its collective is under way, and the others do not come to it: closing the process group would wait for them."""
    code = """
        import sys, time
        import torch, torch.distributed as dist
        import paceline.world
        paceline.world.FAILED_SECONDS = 1.0
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            time.sleep(300)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        sys.exit(3)
    """
    exit_code, _, err = launches.run("--nproc", "2", launches.script(code))
    assert exit_code != 0
    assert "rank 1 ended with exit code" in err


def test_failing_rank_is_shown_once_and_the_stubborn_ends(launches: Launches) -> None:
    code = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "0":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # ignores SIGTERM too
            open("ready", "w").close()
            time.sleep(300)
        while not os.path.exists("ready"):
            time.sleep(0.02)
        def load(path):
            raise ValueError(f"bad data in {path}")
        load("shard-3")
    """
    result = launches.run("--nproc", "2", launches.script(code))
    path = launches.directory / "script.py"
    expected = f"""\
        rank 1 failed: ValueError: bad data in shard-3
        Traceback (most recent call last):
          File "{path}", line 12, in <module>
            load("shard-3")
          File "{path}", line 11, in load
            raise ValueError(f"bad data in {{path}}")
        ValueError: bad data in shard-3
    """
    shown = re.sub(r"\n +[~^]+(?=\n)", "", result[2])  # from Python 3.11 on it points at the part of a line that failed
    assert (*result[:2], shown) == (1, "", textwrap.dedent(expected))


def test_a_killed_rank_is_named_and_not_its_victim(launches: Launches, capfd: pytest.CaptureFixture[str]) -> None:
    """Gloo tells the survivor within milliseconds that its peer has gone. (From here on most launches are made in
    this process, which has torch already; `paceline run` calls the same function.)"""
    code = """
        import os, signal
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    """
    assert launcher.run(str(launches.directory / launches.script(code)), nproc=2) == 137
    assert capfd.readouterr() == ("", "rank 1 was killed by SIGKILL (perhaps out of memory)\n")


def test_a_rank_that_leaves_early_is_named(launches: Launches, capfd: pytest.CaptureFixture[str]) -> None:
    """Also that gloo's own words are known as a consequence: only then are the others looked at."""
    code = """
        import os
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            os._exit(0)
        dist.all_reduce(torch.ones(1))
    """
    assert launcher.run(str(launches.directory / launches.script(code)), nproc=2) == 1
    err = capfd.readouterr().err
    first, second, *_ = err.splitlines()
    assert first == (
        "rank 0 ended early, with exit code 0, by os._exit() at script.py, line 7, while others still needed it: do "
        "all ranks take the same number of steps?"
    )
    assert second.startswith("rank 1 failed: RuntimeError: ")
    assert err.count("Traceback") == 1


VICTIM_FIRST = """
    import os, sys, time
    there = __file__ + ".there"
    if os.environ["RANK"] == "0":
        while not os.path.exists(there): time.sleep(0.01)
        raise RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1")
    open(there, "w").close()
    time.sleep(0.5)
    {end}
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("code", "exit_code", "first_line"),
    [
        pytest.param(
            VICTIM_FIRST.format(end="raise ValueError('why')"), 1, "rank 1 failed: ValueError: why", id="error"
        ),
        pytest.param(VICTIM_FIRST.format(end="sys.exit(3)"), 3, "rank 1 ended with exit code 3", id="exit code"),
        pytest.param(
            VICTIM_FIRST.format(end="os.kill(os.getpid(), 11)"),
            139,
            "rank 1 was killed by SIGSEGV (a crash in native code)",
            id="signal",
        ),
        pytest.param(  # it has failed, and has not ended yet
            VICTIM_FIRST.format(end="import atexit; atexit.register(time.sleep, 300); raise ValueError('why')"),
            1,
            "rank 1 failed: ValueError: why",
            id="error and a slow end",
        ),
        pytest.param(
            VICTIM_FIRST.format(end="import atexit; atexit.register(time.sleep, 300); sys.exit(3)"),
            3,
            "rank 1 ended with exit code 3",
            id="exit code and a slow end",
        ),
        pytest.param(
            VICTIM_FIRST.format(end="time.sleep(300)"), 1, "rank 0 failed: RuntimeError: [pair.cc]", id="nothing else"
        ),
        pytest.param("import sys; sys.exit('no data')", 1, "rank 0 ended with exit code 1", id="exit with words"),
        pytest.param("import sys; sys.exit(0)", 0, "", id="exit code 0"),
        pytest.param("raise KeyboardInterrupt", 130, "rank 0 ended with exit code 130\n", id="interrupt of a rank"),
        pytest.param(  # a BaseException that is no Exception
            "import asyncio; raise asyncio.CancelledError('task')",
            1,
            "rank 0 failed: asyncio.exceptions.CancelledError: task",
            id="cancelled",
        ),
        pytest.param("print('a'\n", 1, "rank 0 failed: ", id="syntax error"),
    ],
)
def test_cause(
    launches: Launches, capfd: pytest.CaptureFixture[str], code: str, exit_code: int, first_line: str
) -> None:
    script = str(launches.directory / launches.script(code))
    before = children()
    nproc = 2 if "RANK" in code else 1
    assert launcher.run(script, nproc=nproc) == exit_code
    err = capfd.readouterr().err
    if "no data" in code:
        assert err.startswith("no data\n")
        err = err.removeprefix("no data\n")
    assert err.startswith(first_line)
    assert "worker.py" not in err
    assert set(children()) <= set(before)


@pytest.mark.parametrize("session", [False, True], ids=["", "session of its own"])
def test_failure_ends_what_the_rank_started(
    launches: Launches, capfd: pytest.CaptureFixture[str], session: bool
) -> None:
    """A killed rank cannot end its own children."""
    code = f"""
        import os, subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        child = subprocess.Popen(sleep, start_new_session={session})
        open("child", "w").write(str(child.pid))
        os.kill(os.getpid(), 9)
    """
    script = launches.script(code)
    os_cwd = os.getcwd()
    os.chdir(launches.directory)
    try:
        assert launcher.run(script) == 137
    finally:
        os.chdir(os_cwd)
    pid = int((launches.directory / "child").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the end of the child")


DAEMON = """
    import os, subprocess, sys, time
    rank = os.environ["RANK"]
    if rank == "0":
        command = ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $! > child"]  # no process has it for a child
        subprocess.run(command, start_new_session=True)
        open("left", "w").close()
        sys.exit()
    while not os.path.exists("left"): time.sleep(0.01)
    time.sleep(0.5)
    sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 3], ids=["a run that ends well", "a run that fails"])
def test_a_daemon_of_a_rank_that_ended_well(launches: Launches, code: int) -> None:
    """It ends with a run that fails. One that ends well leaves it, as a server may be meant to stay, and says so."""
    process = launches.start("--nproc", "2", launches.script(DAEMON.format(code=code)))
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, err
    pid = int((launches.directory / "child").read_text())
    if code:
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "its end", 5)
        return
    assert f"paceline: a child process of a rank is still running: {pid} (sleep)." in err
    psutil.Process(pid).kill()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "its end", 5)


# ---------------------------------------------------------------- signals

WAITING = """
    import os, pathlib, time
    rank = os.environ["RANK"]
    try:
        pathlib.Path("ready" + rank).touch()
        time.sleep(300)
    finally:
        pathlib.Path("cleaned" + rank).touch()
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("signum", "to_group", "exit_code", "line"),
    [
        (signal.SIGINT, True, 130, "paceline: interrupted; all ranks have ended.\n"),
        (signal.SIGINT, False, 130, "paceline: interrupted; all ranks have ended.\n"),
        (signal.SIGTERM, False, 143, "paceline: stopped by SIGTERM; all ranks have ended.\n"),
    ],
)
def test_signals_end_all(launches: Launches, signum: int, to_group: bool, exit_code: int, line: str) -> None:
    process = launches.start("--nproc", "2", launches.script(WAITING))
    launches.wait_for_file("ready0", "ready1")
    (os.killpg if to_group else os.kill)(process.pid, signum)
    assert launches.end(process) == (exit_code, "", line)
    cleaned = [(launches.directory / f"cleaned{rank}").exists() for rank in (0, 1)]
    assert cleaned == [signum == signal.SIGINT] * 2  # Ctrl-C lets a script's `finally` run, as in plain python


def test_interrupts() -> None:
    """At once while there are no workers; afterwards only when asked."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        interrupts.received.clear()
        interrupts.deferred = True
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        assert not interrupts.impatient
        signal.raise_signal(signal.SIGINT)
        assert interrupts.impatient
        with pytest.raises(Stopped) as caught:
            interrupts.check()
        assert caught.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_does_not_wait(launches: Launches) -> None:
    code = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path("heard").touch())
        pathlib.Path("ready").touch()
        while True:
            time.sleep(1)
    """
    patient = (
        "from paceline import cli; from paceline.launcher import processes; processes.GRACE_SECONDS = 600; cli.main()"
    )
    process = launches.start(launches.script(code), program=("-c", patient))
    launches.wait_for_file("ready")
    process.send_signal(signal.SIGINT)
    launches.wait_for_file("heard")
    process.send_signal(signal.SIGINT)
    assert launches.end(process)[0] == 130


def test_ctrl_c_before_there_are_workers(launches: Launches) -> None:
    process = launches.start(launches.script(WAITING))
    wait_for(lambda: any("libtorch" in m.path for m in psutil.Process(process.pid).memory_maps()), "import torch")
    process.send_signal(signal.SIGINT)
    exit_code, _, err = launches.end(process)
    assert exit_code == 130
    assert err.splitlines()[-1] == "paceline: interrupted; all ranks have ended."
    assert "Traceback" not in err


def test_nohup(launches: Launches) -> None:
    """What is ignored when the launcher starts stays ignored."""
    code = """
        import os, time
        open("ready", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launches.start(launches.script(code))
    finally:
        signal.signal(signal.SIGHUP, before)
    launches.wait_for_file("ready")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (launches.directory / "go").touch()
    assert launches.end(process)[0] == 0


@pytest.mark.conformance
def test_killed_launcher_leaves_nothing(launches: Launches) -> None:
    """kill -9 of the launcher ends the ranks at once, with their DataLoader workers and whatever else they started; its
    temporary folder goes too."""
    code = """
        import os, pathlib, subprocess, time
        import torch
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 1000
            def __getitem__(self, i): time.sleep(0.1); return i
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            pathlib.Path("ready" + os.environ["RANK"]).touch()
    """
    process = launches.start("--nproc", "2", launches.script(code))
    launches.wait_for_file("ready0", "ready1")
    assert len(marked(launches.mark)) >= 7
    ranks = psutil.Process(process.pid).children()
    process.kill()
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in ranks), "the end of the ranks", 3)
    wait_for(lambda: marked(launches.mark) == [], "the end of all that they started", 3)
    assert list(launches.temporary.glob("paceline-*")) == []
    process.communicate(timeout=DEADLINE_SECONDS)


# ---------------------------------------------------------------- processes


def test_a_process_that_cannot_start(tmp_path: Path) -> None:
    sleep = processes.Command([sys.executable, "-c", "import time; time.sleep(300)"], dict(os.environ))
    before = children()
    with pytest.raises(LaunchError, match=r"Process 1 of 2 could not be started.*--nproc"):
        processes.start([sleep, processes.Command([str(tmp_path / "none")], {})])
    assert set(children()) <= set(before)


def test_a_process_that_does_not_end_is_not_said_to_wait_for_a_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the kernel says of it is read first."""
    for name in ("GRACE_SECONDS", "_KILL_SECONDS", "_RELEASE_SECONDS"):
        monkeypatch.setattr(processes, name, 0.0)
    monkeypatch.setattr(os, "killpg", lambda pid, signum: None)
    slow = SimpleNamespace(pid=os.getpid(), poll=lambda: None, send_signal=lambda signum: None)
    group = processes.Processes([])
    group._started.append(cast("subprocess.Popen[bytes]", slow))
    group.stop()
    assert re.fullmatch(r"paceline: process \d+ was killed, but has not ended yet.*\n", capsys.readouterr().err)
    waits = process_state.ProcessState(process_state.IN_KERNEL, wait_channel="nfs_wait")
    monkeypatch.setattr(process_state, "read_state", lambda pid: waits)
    group.stop()
    assert capsys.readouterr().err.endswith("it waits in the kernel for a disk or a device (nfs_wait).\n")


def test_output_that_cannot_be_written(launches: Launches, capfd: pytest.CaptureFixture[str]) -> None:
    """Python makes exit code 120 of it; the reason could not be printed either."""
    code = """
        import os, resource, signal
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            print("some words", end="")
    """
    script = str(launches.directory / launches.script(code))
    assert launcher.run(script, nproc=2, output=str(launches.directory)) == 120
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "rank 1 ended with exit code 120: its last output could not be written"
    assert (
        f"Its output goes to {launches.directory / 'rank-1.log'}. The disk may be full, or a quota used up."
        in "\n".join(lines)
    )


REFUSES = """
import argparse, os, time
import paceline  # takes its time
time.sleep(0.3 if os.environ["RANK"] == "0" else 0.0)
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
"""


def test_a_script_that_refuses_its_arguments_says_so_once(launches: Launches) -> None:
    """The shown rank's words, also where another one was quicker. Options without a meaning here are named."""
    name = launches.script(REFUSES)
    code, out, err = launches.run(
        "--nproc", "2", "--rdzv-backend", "static", "--rdzv-id", "x", name, "--epochs", "many"
    )
    assert (code, out) == (2, "")
    assert err.count("usage: ") == err.count("invalid int value: 'many'") == 1, err
    assert "rank 0 ended with exit code 2\nrank 1 failed in the same way.\n" in err
    assert err.startswith("paceline: --rdzv-backend static has no effect on one machine"), err


@pytest.mark.conformance
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["ends well", "killed"])
def test_nothing_stays_in_the_folder_for_temporary_files(launches: Launches, end: str) -> None:
    """Not the sockets of a DataLoader's workers, nor the cache that torch makes for a script that compiles nothing."""
    code = f"""
        import os, signal
        import torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return torch.ones(2)
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            parameter.grad = batch.mean(0)
            optimizer.step()
            if os.environ["RANK"] == "1":
                {end or "pass"}
    """
    process = launches.start("--nproc", "2", launches.script(code))
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == (137 if end else 0)
    left = [entry.name for entry in launches.temporary.iterdir() if not entry.name.startswith("paceline-")]
    assert left == []
