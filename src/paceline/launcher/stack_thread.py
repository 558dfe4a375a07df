"""A thread in each worker that reports the main thread's stack to the launcher. Linux only. Does not import torch.

The obvious tool, a signal at which faulthandler writes the stack, can kill the process. From Python 3.11 on, the signal
may arrive while the interpreter enters or leaves a function. The handler then reads an incomplete frame and crashes
(SIGSEGV, python/cpython/issues/116008; measured with 3.11.7, 3.12.1 and 3.13.0: after 5 to 281 requests to a process
that calls small functions). A thread that holds the GIL finds every frame complete. It answers while the main thread
computes, and while the main thread waits in native code, such as a collective. It cannot answer while native code holds
the GIL.

The thread also reports the process's collective calls in progress (torch_private/flight_recorder.py).

A request is a datagram to an abstract socket, so that a killed process leaves no file behind. The socket's name is
derived from the process id and the error file. The answer goes back to the sender. Each forked child, such as a
DataLoader worker, starts another thread and socket.
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

# Imported by name: gevent replaces these functions in the modules, and its versions do not work in this thread.
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
    """A process's report about its main thread.

    Attributes:
        frames: the stack; empty if there is no main thread.
        runs_python: whether it wanted the GIL, so it neither waits nor computes in native code. Python releases the GIL
            only at a few points, such as the head of a loop or a call. So even a fast loop is always sampled at the
            same line.
        others: the innermost line of each other Python thread.
    """

    frames: Frames
    runs_python: bool = False
    others: Frames = ()


_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): the sender's process, user and group
_MOST_FRAMES = 100
_ENCODING = ("utf-8", "surrogatepass")  # a file name may contain any bytes
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}  # caused by the thread itself
# In these versions, a garbage collection in sys._current_frames could block all threads (python/cpython/issues/106883).
_COLLECTS_INSIDE = (3, 11) <= sys.version_info < (3, 11, 9)
_ASLEEP_SECONDS = 2e-4  # enough for another thread to wake up and take the GIL
_LOOK_SECONDS = 4  # between two checks whether the launcher is stopped
_WHERE, _CALLS = b"?", b"c"  # the requests, one byte each
_ANSWER_BYTES = 2**18  # more than the default limit of a socket


class _Inbox:
    """The socket for requests. Raises OSError if it cannot be created.

    A script may close unknown descriptors, as daemons do, and their numbers may then be reused for other files.
    So each call first checks that the descriptor is still this socket.
    """

    def __init__(self, address: bytes) -> None:
        self._socket = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stat = os.fstat(self._socket.fileno())
        self._socket.bind(address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Python's timeout, also a default that the script sets, would make the socket non-blocking. After `shutdown`,
        # such a datagram socket has no end, and Python waits in a loop.
        self._socket.settimeout(None)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", _LOOK_SECONDS, 0))

    @property
    def there(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._socket.fileno()), self._stat)
        return False

    def receive(self, between: Callable[[], None]) -> tuple[bytes, bytes] | None:
        """Wait for a request from this user or root. Return (request, address for the answer), or None at the end.

        Args:
            between: called every _LOOK_SECONDS while waiting.
        """
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        while self.there:
            try:
                question, extra, _, sender = self._socket.recvmsg(1, space)
            except BlockingIOError:  # the limit
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
            with contextlib.suppress(OSError):  # the sender may have ended
                self._socket.sendto(answer, address)

    def stop(self) -> None:
        """Make `receive` return None."""
        if self.there:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket in this process. In a forked child, the parent's socket stays open."""
        if self.there:
            self._socket.close()
        else:
            self._socket.detach()


_inbox: _Inbox | None = None  # of this process
_answering = allocate_lock()  # held by the thread while it runs


def serve(error_file: str) -> None:
    """Start the thread, in this process and in each forked child.

    Args:
        error_file: the worker's error file (world.py).
    """
    _start(error_file)
    atexit.register(_stop)
    os.register_at_fork(after_in_child=lambda: _start(error_file))


def _start(error_file: str) -> None:
    global _inbox, _answering
    if _inbox is not None:  # in a forked child, this is the parent's inbox
        _inbox.close()
        _inbox, _answering = None, allocate_lock()
    if sys.platform != "linux" or not _has_lock():
        return
    with contextlib.suppress(OSError, RuntimeError):  # without a socket or a thread, there are no reports
        inbox = _Inbox(_address(error_file, os.getpid()))
        # `threading` is not used, so that a script that lists or joins all threads does not find this thread.
        # The thread blocks signals, because otherwise it would receive signals that the script blocks and waits for.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASHES)
        try:
            start_new_thread(_answer_all, (inbox, get_ident(), _answering))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        _inbox = inbox


def _has_lock() -> bool:
    """Return whether this Python has a GIL. Without a GIL, frames of a running thread must not be read."""
    return not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()


def _stop() -> None:
    """End the thread before the interpreter exits."""
    if _inbox is not None:
        _inbox.stop()
        if _answering.acquire(timeout=1.0 if _inbox.there else 0.0):
            _inbox.close()  # otherwise Python may print a ResourceWarning


def _address(error_file: str, pid: int) -> bytes:
    """Return the abstract name of the socket (unix(7)).

    It contains a hash of the path, because two containers that share a network may have processes with the same id.
    """
    run = hashlib.sha256(os.fsencode(os.path.abspath(error_file))).hexdigest()[:16]
    return f"\0paceline-stack-{run}-{pid}".encode("ascii")


def _answer_all(inbox: _Inbox, main: int, answering: LockType) -> None:
    """Answer requests until the socket is closed.

    Args:
        main: identifier of the main thread. In a forked child this is the thread that forked.
    """
    with answering:
        with contextlib.suppress(OSError):  # the descriptor was closed, so no request can arrive
            watch = _LauncherWatch()
            while (asked := inbox.receive(watch)) is not None:
                question, sender = asked
                answer = _calls() if question == _CALLS else [*_frames(main), _is_wanted()]
                inbox.send(json.dumps(answer, ensure_ascii=False).encode(*_ENCODING), sender)


class _LauncherWatch:
    """Reports, in the first rank of a machine, that the launcher is stopped. The launcher cannot report this itself."""

    def __init__(self) -> None:
        pid = os.environ.get(LAUNCHER_PID, "")
        first = os.environ.get("LOCAL_RANK") == "0" and str(os.getppid()) == pid  # and not a forked child
        self._pid = int(pid) if first else None
        self._looks = 0  # consecutive checks that found it stopped

    def __call__(self) -> None:
        if self._pid is None:
            return
        self._looks = self._looks + 1 if process_state.read_state(self._pid).stopped else 0
        if self._looks == 2:
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    f"paceline: the launcher, process {self._pid}, is stopped by a signal. The ranks continue without "
                    f"supervision; `kill -CONT {self._pid}` resumes it.\n".encode(),
                )


def _calls() -> list[Any]:
    try:
        return flight_recorder.packed(flight_recorder.read())
    except Exception:  # another torch version may have another format; the thread must survive
        return []


def _frames(main: int) -> tuple[Frames, Frames]:
    """Return the frames of the main thread, and the innermost frame of each other thread."""
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
    """Return whether another thread wants the GIL.

    If so, that thread takes the GIL while this thread sleeps. This thread must then wait for the GIL, which is another
    voluntary context switch after the switch of the sleep. Losing the core on a busy machine is an involuntary switch.
    """
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    sleep(_ASLEEP_SECONDS)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before + 1


def ask(error_files: Mapping[int, str], seconds: float) -> dict[int, MainThread]:
    """Ask processes about their main threads. Return process id -> answer, for each process that answers in time.

    Args:
        error_files: process id -> error file of its rank. A forked child uses its rank's file.
        seconds: the time limit for all answers together.
    """
    return _ask(_WHERE, _main_thread, error_files, seconds)


def ask_calls(error_files: Mapping[int, str], seconds: float) -> dict[int, list[GroupCalls]]:
    """Ask processes for their collective calls. Arguments and result as for `ask`."""
    return _ask(_CALLS, flight_recorder.unpacked, error_files, seconds)


def _ask(
    question: bytes, read: Callable[[list[Any]], Answer], error_files: Mapping[int, str], seconds: float
) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    with Socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.bind("")  # the kernel chooses a name, for the answers
        asked: dict[bytes, int] = {}
        for pid, path in error_files.items():
            address = _address(path, pid)
            # The process may have ended, become another program (os.execv), or not read. Then there is no answer.
            with contextlib.suppress(OSError):
                outbox.sendto(question, socket.MSG_DONTWAIT, address)
                asked[address] = pid
        deadline = monotonic() + seconds
        while len(found) < len(asked) and (left := deadline - monotonic()) > 0:
            outbox.settimeout(left)
            with contextlib.suppress(OSError, ValueError, TypeError):  # ignore invalid answers
                answer, sender = outbox.recvfrom(_ANSWER_BYTES)
                if sender in asked:
                    found[asked[sender]] = read(json.loads(answer.decode(*_ENCODING)))
    return found


def _main_thread(answer: list[Any]) -> MainThread:
    frames, others, runs_python = answer
    return MainThread(_read(frames), bool(runs_python), _read(others))


def _read(frames: Iterable[Sequence[Any]]) -> Frames:
    return tuple((str(path), int(line), str(name)) for path, line, name in frames)
