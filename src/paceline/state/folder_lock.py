"""One run at a time writes checkpoints into a folder: a lock, which names the run that has it.

The lock is a file in the folder, `.in-use.json`. Its owner writes who it is (user, host, process), holds the kernel's
lock on the file (flock), and counts up a number in it every BEAT_SECONDS. At the end of the run the file is removed. A
run that was killed leaves the file. The next run finds out whether the owner lives:

1. The kernel's lock is held: it lives. (The kernel frees the lock when a process dies, on many network file systems
   also that of another machine.)
2. The kernel's lock is free, and the owner had the same kernel, since the same boot: it is dead.
3. The file system has no locks, and this process sees those of the owner: the process id and its start time tell.
4. Otherwise the owner was on another machine, whose locks may not be seen here: it lives if it counts on within
   WATCH_SECONDS.

A start of the same launch (`--max-restarts`) takes the lock over. Reading needs no lock: several runs may start from
one folder. A run takes the lock before its first save, and of a folder in which it resumes (`missing_ok=True`) before
its first training batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.state.atomic import make_directory
from paceline.state.manifest import DIRECTORY
from paceline.world import ERROR_FILE, LAUNCHER_PID

FILE = ".in-use.json"
BEAT_SECONDS = 8.0
WATCH_SECONDS = 25.0
_FORGOTTEN_SECONDS = (
    3600.0  # without a count for so long, by the file's time: dead, whatever the clocks of two machines
)
_SAME_RUN_SECONDS = 10.0  # for a killed process of the same launch to give the kernel's lock back

_open: set[int] = set()  # handles that this process holds


def _close_all() -> None:
    """In a forked child, such as a loader's worker: it may outlive the owner, whose locks it would keep."""
    while _open:
        with contextlib.suppress(OSError):
            os.close(_open.pop())


os.register_at_fork(after_in_child=_close_all)


class FolderLocks:
    """The locks of one run, on its rank 0.

    Args:
        say: prints a line.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> None:
        self._say = say
        self._held: dict[str, _Lock] = {}
        self._resumes: list[Path] = []  # to take before the first training batch

    def resumes(self, folder: Path) -> None:
        """The run goes on in this folder, if it trains."""
        self._resumes.append(folder.absolute())

    def before_batch(self) -> None:
        """Before a training batch. Raises CheckpointError: see `take`."""
        while self._resumes:
            if (folder := self._resumes.pop()).is_dir():  # else the first save makes it, and takes the lock
                self.take(folder)

    def take(self, folder: Path) -> None:
        """Have the lock of this folder, which is made where it is missing. Calling it again is cheap.

        Raises CheckpointError where another run has it. Where no file can be made there, nobody has it: a save will say
        why.
        """
        folder = folder.absolute()
        if DIRECTORY.fullmatch(folder.name):  # of one checkpoint: a save refuses it
            return
        with contextlib.suppress(OSError):
            make_directory(folder)
            key = str(folder.resolve())
            if (held := self._held.get(key)) is not None:
                if held.is_own():
                    return
                self._held.pop(key).release()  # the folder or the file was removed, or another run has taken it
            self._held[key] = _take(folder, self._say)

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].release()


class _Lock:
    """A file that is this run's.

    Args:
        path, handle: of the file.
        record: what is in it.
    """

    def __init__(self, path: Path, handle: int, record: dict[str, Any]) -> None:
        self._path, self._handle, self._record = path, handle, record
        self._pid = os.getpid()
        self._write()
        _open.add(handle)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._beat, name="paceline-lock", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this user may have no more threads: only other machines notice
            self._thread = None

    def is_own(self) -> bool:
        """Is the file still there, and this run's?"""
        found = _read(self._path)
        return found is not None and found.get("token") == self._record["token"]

    def release(self) -> None:
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if self.is_own():
                self._path.unlink()
        if self._handle in _open:
            _open.discard(self._handle)
            with contextlib.suppress(OSError):
                os.close(self._handle)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if not self.is_own():
                return
            self._record["beats"] += 1
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        data = json.dumps(self._record).encode()
        os.pwrite(self._handle, data, 0)
        os.ftruncate(self._handle, len(data))


def _take(folder: Path, say: Callable[[str], None]) -> _Lock:
    """Raises CheckpointError where another run has the lock, OSError where no file can be made."""
    path = folder / FILE
    own = _own_record()
    deadline = time.monotonic() + _SAME_RUN_SECONDS
    while True:
        handle = _open_file(path)
        try:
            locked = _flock(handle)
            former = _read(path)
            late = time.monotonic() > deadline
            if os.fstat(handle).st_nlink == 0 or (locked is False and former is None and not late):
                pass  # its owner has just removed it, or has just made it: look again
            elif former is not None and _is_same_process(former, own):
                return _Lock(path, handle, own)
            elif former is not None and own["launch"] and former.get("launch") == own["launch"]:
                if locked is not False or late:  # else a killed process that still gives back its memory
                    return _Lock(path, handle, own)
            elif locked is False or (former is not None and _lives(path, former, own, locked is True, say)):
                raise CheckpointError(_refusal(folder, former or {}))
            elif os.access(path, os.W_OK):
                return _Lock(path, handle, own)
            else:  # of another user, whose run is dead
                path.unlink()
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(0.05)


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY)


def _flock(handle: int) -> bool | None:
    """Take the kernel's lock. True: this process has it. False: another has it. None: the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """What the owner has written; None where there is nothing, or nothing of ours."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(4096))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("token") else None


def _own_record() -> dict[str, Any]:
    under_launcher = bool(os.environ.get(ERROR_FILE))
    return {
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher": int(os.environ[LAUNCHER_PID]) if under_launcher and LAUNCHER_PID in os.environ else None,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "boot": _kernel("/proc/sys/kernel/random/boot_id"),
        "processes": _namespace(),
        "born": _born(os.getpid()),
        # Alike at all starts of one launch, and at no other: the folder of the launcher's messages.
        "launch": os.path.dirname(os.environ[ERROR_FILE]) if under_launcher else "",
        "token": secrets.token_hex(8),
        "beats": 0,
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in containers
        return str(os.getuid())


def _kernel(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def _namespace() -> str:
    """In which the numbers of processes mean the same."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> str:
    """When the process began, in ticks since the boot (proc_pid_stat(5), field 22); "" where it is not there."""
    return (_kernel(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 20)[19]


def _lives(path: Path, former: dict[str, Any], own: dict[str, Any], locked: bool, say: Callable[[str], None]) -> bool:
    """Does the owner live? locked: does this process have the kernel's lock?"""
    place = "boot" if own["boot"] else "host"  # containers of one machine have one kernel, which keeps the locks
    if former.get(place) == own[place]:
        if locked:
            return False
        if former.get("processes") == own["processes"]:
            return _is_alive(former)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
            return False
    say(
        f"paceline: {path.parent} was last used by {_owner(former)}. Watching for {WATCH_SECONDS:.0f} s whether that "
        "run lives."
    )
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, WATCH_SECONDS / 10))
        found = _read(path)
        if found is None:
            return False  # it has ended
        if (found.get("token"), found.get("beats")) != (former["token"], former.get("beats")):
            return True
    return False


def _is_same_process(former: dict[str, Any], own: dict[str, Any]) -> bool:
    """Was it another run of this process? One process has one run at a time."""
    return all(former.get(key) == own[key] for key in ("host", "boot", "processes", "pid", "born"))


def _is_alive(former: dict[str, Any]) -> bool:
    pid = former.get("pid")
    if not isinstance(pid, int):
        return False
    if former.get("born"):
        return _born(pid) == str(former["born"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _owner(former: dict[str, Any]) -> str:
    return f"a run of {former.get('user', '?')} on {former.get('host', '?')} (process {former.get('pid', '?')})"


def _refusal(folder: Path, former: dict[str, Any]) -> str:
    end = f"kill {former.get('launcher') or former.get('pid', '?')}"
    return (
        f"{folder} is in use by {_owner(former)}, since {former.get('since', '?')}. Two runs would mix their "
        f"checkpoints. Give this run another directory, or end that one (`{end}` on {former.get('host', '?')}). If you "
        f"are sure that it has ended, remove {folder / FILE}."
    )
