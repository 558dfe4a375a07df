"""The thread by which a worker says where its main thread stands, and how the launcher asks it. No torch; Linux only.

The obvious tool, a signal at which faulthandler writes the stack, kills: from Python 3.11 on a signal that comes while
the interpreter enters or leaves a function finds a frame that is half made, and the handler reads through it (SIGSEGV,
python/cpython/issues/116008; measured with 3.11.7, 3.12.1 and 3.13.0: after 5 to 281 requests to a process that
calls small functions). A thread that takes the interpreter's lock finds every frame whole. It answers while the main
thread computes, and while that waits in native code, as in a collective. It cannot where native code keeps the lock:
`keeping_lock` tells, and for that case alone the signal is left (worker.py, stacks.py), which is safe there, since no
frame changes.

It also tells which collective calls of the process are under way (torch_private/flight_recorder.py).

The request is a datagram to a socket without a file, whose name is made of the process and the run's folder, so that
nothing is left over when a process is killed; the answer goes back to the sender. A forked child, as a DataLoader's
worker, starts a thread and a socket of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import types

# By their names: gevent puts others into the modules, which are not for a thread beside its own.
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from socket import socket as Socket
from time import monotonic, sleep
from typing import Any, TypeVar

from paceline.launcher import process_state
from paceline.torch_private import flight_recorder
from paceline.torch_private.flight_recorder import GroupCalls
from paceline.world import LAUNCHER_PID

Answer = TypeVar("Answer")
Frames = tuple[tuple[str, int, str], ...]  # innermost first: (file, line, function)


@dataclass(frozen=True)
class MainThread:
    """What a process says of its main thread.

    Attributes:
        frames: where it is; empty where there is none.
        runs_python: did it want the interpreter's lock? Then it neither waits nor computes in native code. The lock is
            handed over at few places, the head of a loop or a call, so that even a quick loop is found at one line.
        others: the innermost line of each other thread that runs code in Python.
    """

    frames: Frames
    runs_python: bool = False
    others: Frames = ()


_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): the sender's process, user and group
_MOST_FRAMES = 100
_ENCODING = ("utf-8", "surrogatepass")  # a file's name may hold any bytes
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}  # of a thread itself
# There a garbage collection inside of sys._current_frames could block all threads (python/cpython/issues/106883).
_COLLECTS_INSIDE = (3, 11) <= sys.version_info < (3, 11, 9)
_ASLEEP_SECONDS = 2e-4  # enough for another thread to wake up and take the lock
_LOOK_SECONDS = 4.0  # between two looks whether the launcher is stopped
_WHERE, _CALLS = b"?", b"c"  # the questions: a byte each
_ANSWER_BYTES = 2**18  # more than a socket takes, as it comes


class _Inbox:
    """The socket on which questions come. Raises OSError where it cannot be had.

    A script may close descriptors that it does not know, as daemons do, and the number may be another file's then. So
    no call is made before it is looked whose the number is.
    """

    def __init__(self, address: bytes) -> None:
        self._socket = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stat = os.fstat(self._socket.fileno())
        self._socket.bind(address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.settimeout(_LOOK_SECONDS)

    @property
    def there(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._socket.fileno()), self._stat)
        return False

    def receive(self, between: Callable[[], None]) -> tuple[bytes, bytes] | None:
        """Waits for a question of this user's, or of root's. Returns it, and where the answer goes; None: no more will
        come. between: called every _LOOK_SECONDS meanwhile."""
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        while self.there:
            try:
                question, extra, _, sender = self._socket.recvmsg(1, space)
            except TimeoutError:
                between()
                continue
            if not question:  # stop
                return None
            users = [_CREDENTIALS.unpack(data)[1] for *_, data in extra if len(data) == _CREDENTIALS.size]
            if sender and users and users[0] in (0, os.getuid()):
                return question, bytes(sender)
        return None

    def send(self, answer: bytes, address: bytes) -> None:
        if self.there:
            with contextlib.suppress(OSError):  # who asked may have gone
                self._socket.sendto(answer, address)

    def stop(self) -> None:
        """Have `receive` return None."""
        if self.there:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody receives any more; or, in a forked child, the parent alone does."""
        if self.there:
            self._socket.close()
        else:
            self._socket.detach()


_inbox: _Inbox | None = None  # of this process
_answering = allocate_lock()  # the thread holds it as long as it lives


def serve(error_file: str) -> None:
    """Start the thread, in this process and in each that is forked from it. error_file: of the worker (world.py)."""
    _start(error_file)
    atexit.register(_stop)
    os.register_at_fork(after_in_child=lambda: _start(error_file))


def _start(error_file: str) -> None:
    global _inbox, _answering
    if _inbox is not None:  # in a forked child: its parent's
        _inbox.close()
        _inbox, _answering = None, allocate_lock()
    if sys.platform != "linux" or not _has_lock():
        return
    with contextlib.suppress(OSError, RuntimeError):  # no socket or no thread to be had: then nobody can ask
        inbox = _Inbox(_address(error_file, os.getpid()))
        # Not by `threading`: a script that lists its threads, or waits for all of them, finds its own alone.
        # Signals are the script's: the thread would get those that the script blocks, to wait for them.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASHES)
        try:
            start_new_thread(_answer_all, (inbox, get_ident(), _answering))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        _inbox = inbox


def _has_lock() -> bool:
    """Not so the builds of Python without the lock, where nobody may look at the frames of a thread that runs."""
    return not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()


def _stop() -> None:
    """Have the thread end before the interpreter does."""
    if _inbox is not None:
        _inbox.stop()
        if _answering.acquire(timeout=1.0 if _inbox.there else 0.0):
            _inbox.close()  # else the interpreter warns of it, where warnings are shown


def _address(error_file: str, pid: int) -> bytes:
    """An abstract name (unix(7)). Two containers that share a network may have processes of one number: so the path."""
    run = hashlib.sha256(os.fsencode(os.path.abspath(error_file))).hexdigest()[:16]
    return f"\0paceline-stack-{run}-{pid}".encode("ascii")


def _answer_all(inbox: _Inbox, main: int, answering: LockType) -> None:
    """main: of the main thread, which in a forked child is the one that forked."""
    with answering:
        with contextlib.suppress(OSError):  # the descriptor was closed: nobody can ask any more
            watch = _LauncherWatch()
            while (asked := inbox.receive(watch)) is not None:
                question, sender = asked
                answer = _calls() if question == _CALLS else [*_frames(main), _is_wanted()]
                inbox.send(json.dumps(answer, ensure_ascii=False).encode(*_ENCODING), sender)


class _LauncherWatch:
    """Says that the launcher is stopped, which can say nothing itself: the first rank of a machine does."""

    def __init__(self) -> None:
        pid = os.environ.get(LAUNCHER_PID, "")
        first = os.environ.get("LOCAL_RANK") == "0" and str(os.getppid()) == pid  # not a process that it has forked
        self._pid = int(pid) if first else None
        self._looks = 0  # at which it was stopped, one after the other

    def __call__(self) -> None:
        if self._pid is None:
            return
        self._looks = self._looks + 1 if process_state.read_state(self._pid).stopped else 0
        if self._looks == 2:
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    f"paceline: the launcher, process {self._pid}, is stopped by a signal. The ranks go on, and nobody "
                    f"watches them; `kill -CONT {self._pid}` lets it go on.\n".encode(),
                )


def _calls() -> list[Any]:
    try:
        return flight_recorder.packed(flight_recorder.read())
    except Exception:  # another version of torch may tell it otherwise: the thread must live on
        return []


def _frames(main: int) -> tuple[Frames, Frames]:
    """(of the main thread, the innermost of each other)."""
    with _no_collection() if _COLLECTS_INSIDE else contextlib.nullcontext():
        current = sys._current_frames()
    del current[get_ident()]
    frame: types.FrameType | None = current.pop(main, None)
    others = tuple(map(_line, list(current.values())[:_MOST_FRAMES]))
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(_line(frame))
        frame = frame.f_back
    return tuple(found), others


def _line(frame: types.FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_wanted() -> bool:
    """Does another thread want the interpreter's lock? Then it has it after this sleep, and this thread waits for it.

    One wait is the sleep's own. A thread that a busy machine takes the core from does not wait.
    """
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    sleep(_ASLEEP_SECONDS)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before + 1


def ask(error_files: Mapping[int, str], seconds: float) -> dict[int, MainThread]:
    """What each process that answers in time says of its main thread, by process.

    Args:
        error_files: by process, the error file of its rank. A child that a rank has forked has the rank's.
        seconds: how long to wait for all of them together.
    """
    return _ask(_WHERE, _main_thread, error_files, seconds)


def ask_calls(error_files: Mapping[int, str], seconds: float) -> dict[int, list[GroupCalls]]:
    """The collective calls of each process that answers in time, by process. The arguments are those of `ask`."""
    return _ask(_CALLS, flight_recorder.unpacked, error_files, seconds)


def _ask(
    question: bytes, read: Callable[[list[Any]], Answer], error_files: Mapping[int, str], seconds: float
) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    with Socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.bind("")  # a name of the kernel's choice, for the answers
        asked: dict[bytes, int] = {}
        for pid, path in error_files.items():
            address = _address(path, pid)
            # Gone, or another program by now (os.execv), or it does not read: no answer comes.
            with contextlib.suppress(OSError):
                outbox.sendto(question, socket.MSG_DONTWAIT, address)
                asked[address] = pid
        deadline = monotonic() + seconds
        while len(found) < len(asked) and (left := deadline - monotonic()) > 0:
            outbox.settimeout(left)
            with contextlib.suppress(OSError, ValueError, TypeError):  # what is no answer of a rank's counts as none
                answer, sender = outbox.recvfrom(_ANSWER_BYTES)
                if sender in asked:
                    found[asked[sender]] = read(json.loads(answer.decode(*_ENCODING)))
    return found


def _main_thread(answer: list[Any]) -> MainThread:
    frames, others, runs_python = answer
    return MainThread(_read(frames), bool(runs_python), _read(others))


def _read(frames: Iterable[Sequence[Any]]) -> Frames:
    return tuple((str(path), int(line), str(name)) for path, line, name in frames)
