"""The launcher asks workers where they stand: real processes, asked in their worst moments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.launcher import stack_thread
from paceline.launcher.stacks import StackSample, sample_loader_workers, sample_stacks
from paceline.world import ERROR_FILE

DEADLINE_SECONDS = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by abstract sockets, which Linux alone has")


@contextmanager
def a_worker(folder: Path, code: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A worker as the launcher starts it, that has come to its line `open("there", "w")`."""
    (folder / "script.py").write_text(f"import ctypes, os, sys, threading, time\n{code}\n")
    command = [sys.executable, *options, "-m", "paceline.launcher.worker", "script", "script.py"]
    environment = {**os.environ, ERROR_FILE: str(folder / "rank0")}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (folder / "there").exists():
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def stand(folder: Path, process: subprocess.Popen[str]) -> StackSample | None:
    return sample_stacks({0: str(folder / "rank0")}, {0: process.pid}).get(0)


def test_to_be_asked_between_calls_of_functions_kills_nobody(tmp_path: Path) -> None:
    """A signal for faulthandler killed such a process after 5 to 281 requests (CPython 3.11 to 3.13)."""
    busy = "sys.setswitchinterval(1e-5)\nopen('there', 'w')\nwhile True: list(map(lambda a: a + 1, range(1000)))"
    with a_worker(tmp_path, busy) as process:
        stands, moves, deadline = [], 0, time.monotonic() + DEADLINE_SECONDS
        while len(stands) < 700 or moves <= 350:  # it does not move between any two looks, on a busy machine
            stands.append(sample := stand(tmp_path, process))
            moves += sample is not None and sample.moves
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline, moves
    said = {str(sample) for sample in stands if sample is not None}
    assert said == {"script.py, line 4"}
    seen = sum(sample is not None for sample in stands)
    assert seen > 690 / 700 * len(stands)  # a busy machine may lack the core for one


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("open('there', 'w'); threading.Event().wait()", "script.py, line 2, in wait()"),
        ("open('there', 'w'); ctypes.CDLL(None).sleep(300)", "script.py, line 2"),
    ],
    ids=["python", "native"],
)
def test_a_worker_that_waits_says_where(tmp_path: Path, code: str, said: str) -> None:
    with a_worker(tmp_path, code) as process:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while str(stand(tmp_path, process)) != said:  # it may not have come to the call yet
            assert time.monotonic() < deadline, stand(tmp_path, process)
        stands = [stand(tmp_path, process) for _ in range(10)]
        assert not any(sample is not None and sample.moves for sample in stands)


@pytest.mark.conformance
def test_a_worker_that_keeps_the_interpreters_lock_is_left_alone(tmp_path: Path) -> None:
    """Its thread cannot answer. A signal to faulthandler would read frames that change."""
    code = "sys.setswitchinterval(1000)\nopen('there', 'w')\nwhile True: list(map(lambda a: a + 1, range(1000)))"
    with a_worker(tmp_path, code) as process:
        assert [stand(tmp_path, process) for _ in range(5)] == [None] * 5
        assert process.poll() is None, process.returncode


def test_a_forked_child_speaks_for_itself(tmp_path: Path) -> None:
    code = "child = os.fork()\nif child == 0: time.sleep(300)\nopen('there', 'w')\nos.wait()"
    with a_worker(tmp_path, code) as process:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while str(stand(tmp_path, process)) != "script.py, line 5":
            assert time.monotonic() < deadline, stand(tmp_path, process)
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        places: list[str] = []
        while "script.py, line 3" not in places:  # the child may still be on its way there
            assert time.monotonic() < deadline, places
            said = stack_thread.ask({child: str(tmp_path / "rank0")}, 1.0).values()
            places += [str(StackSample(main.frames, 0.0)) for main in said if main.frames]
        os.kill(child, 9)
    assert sample_loader_workers(str(tmp_path / "rank0"), os.getpid()) == []  # of others, nobody is asked


def test_a_child_answers_where_other_functions_stand_in_place_of_the_standard_librarys(tmp_path: Path) -> None:
    """gevent and eventlet put theirs into its modules, which work in their own threads alone."""
    code = """import _thread, socket
def theirs(*_, **__): raise RuntimeError("not in this thread")
for module, names in ((_thread, "start_new_thread allocate_lock get_ident"), (socket, "socket"), (time, "sleep")):
    for name in names.split(): setattr(module, name, theirs)
threading.main_thread = lambda: threading.Thread()
child = os.fork()
if child == 0: threading.Event().wait()
open('there', 'w'); os.wait()"""
    with a_worker(tmp_path, code) as process:
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            for pid, line in ((process.pid, 9), (child, 8)):
                places = [""]
                while not places[-1].startswith(f"script.py, line {line}"):
                    assert time.monotonic() < deadline, places
                    said = stack_thread.ask({pid: str(tmp_path / "rank0")}, 1.0).values()
                    places += [str(StackSample(main.frames, 0.0)) for main in said if main.frames]
        finally:
            os.kill(child, 9)


@pytest.mark.parametrize("receives", [False, True], ids=["no-batch-yet", "the-batch-without-its-memory"])
def test_who_waits_for_a_worker_of_a_data_loader(receives: bool) -> None:
    """A batch that has come names its memory; the worker that made it hands that over, unless it is stopped."""
    torch, library = "/v/lib/python3.11/site-packages/torch", "/usr/lib/python3.11/multiprocessing"
    handing_over = [
        (f"{library}/connection.py", 519, "Client"),
        (f"{torch}/multiprocessing/reductions.py", 557, "rebuild_storage_fd"),
    ]
    frames = (
        *(handing_over if receives else ()),
        (f"{library}/queues.py", 122, "get"),
        (f"{torch}/utils/data/dataloader.py", 1275, "_try_get_data"),
        ("/u/train.py", 9, "<module>"),
    )
    assert str(StackSample(frames, 0.0)) == "train.py, line 9, where it waits for its DataLoader"
    assert not StackSample(((f"{torch}/multiprocessing/queue.py", 1, "get"), ("/u/train.py", 9, "f")), 0.0).loads


def test_a_script_that_closes_all_descriptors_keeps_those_that_it_opens_then(tmp_path: Path) -> None:
    """As daemons do. Numbers are given out again: what comes there is the script's."""
    code = """import socket
os.closerange(3, 64)
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
more = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(8)]
open("there", "w")
sys.stdin.readline()
for first, second in [(one, other), *more]:
    first.send(b"mine")
sys.stdin.readline()
for first, second in [(one, other), *more]:
    second.settimeout(5.0)
    assert second.recv(9) == b"mine"
    assert second.send(b"still open") == 10
child = os.fork()
if child:
    os.waitpid(child, 0)
print([second.send(b"and now") for _, second in more], flush=True)
if not child: os._exit(0)
"""
    with a_worker(tmp_path, code) as process:
        assert process.stdin is not None
        assert [stand(tmp_path, process) for _ in range(3)] == [None] * 3
        for _ in range(2):
            process.stdin.write("\n")
            process.stdin.flush()
            stand(tmp_path, process)
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, out) == (0, f"{[7] * 8}\n" * 2)


def test_signals_that_a_script_blocks_wait_for_it(tmp_path: Path) -> None:
    code = """import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
open("there", "w")
time.sleep(0.1)
print(signal.sigwait([signal.SIGTERM]) == signal.SIGTERM)
print(signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []))"""
    with a_worker(tmp_path, code) as process:
        assert process.communicate(timeout=DEADLINE_SECONDS)[0] == "True\nFalse\n"
        assert process.returncode == 0


def test_names_may_hold_any_bytes(tmp_path: Path) -> None:
    """Those of folders, also long ones."""
    folder = tmp_path / os.fsdecode(b"caf\xe9") / ("\u6a21" * 80) / ("\u578b" * 80)
    folder.mkdir(parents=True)
    code = """
def deeper(n):
    if n: return deeper(n - 1)
    open("there", "w")
    sys.stdin.readline()
deeper(60)"""
    with a_worker(folder, code) as process:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while str(stand(folder, process)) != "script.py, line 6":
            assert time.monotonic() < deadline, stand(folder, process)


def test_the_thread_ends_when_it_is_told_to() -> None:
    """It ran until the process ended, and every process waited a second for it."""
    inbox, received = stack_thread._Inbox(f"\0paceline-test-{os.getpid()}".encode()), []
    thread = threading.Thread(target=lambda: received.append(inbox.receive(lambda: None)), daemon=True)
    thread.start()
    inbox.stop()
    thread.join(DEADLINE_SECONDS)
    assert received == [None]
    inbox.close()


def test_a_default_timeout_of_the_script_does_not_end_the_thread() -> None:
    """A forked child makes its socket when the script has set it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.001)
    try:
        name = f"\0paceline-test-timeout-{os.getpid()}".encode()
        inbox, asking, received = stack_thread._Inbox(name), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), []
    finally:
        socket.setdefaulttimeout(before)
    thread = threading.Thread(target=lambda: received.append(inbox.receive(lambda: None)), daemon=True)
    thread.start()
    time.sleep(0.1)  # a thread that had this timeout has ended by now
    asking.bind("")  # the receiver wants an address to answer to
    asking.sendto(b"?", name)
    thread.join(DEADLINE_SECONDS)
    asking.close()
    inbox.close()
    assert [question for question, _ in received] == [b"?"]


def test_a_script_does_not_see_the_thread_and_ends_as_ever(tmp_path: Path) -> None:
    """Nor does it see a warning, where these are shown (python -X dev)."""
    code = "os.dup2(1, 2)\nopen('there', 'w').close()\nsys.stdin.read()\nprint(threading.active_count())"
    with a_worker(tmp_path, code, "-W", "always") as process:
        assert process.communicate("", timeout=DEADLINE_SECONDS)[0] == "1\n"
        assert process.returncode == 0
