"""Lock a checkpoint folder, so that only one run at a time writes to it.

The lock is a file in the folder, `.in-use.json`. Its owner writes its user, host and process there, holds a kernel lock
on the file (flock), and increments a counter in the file every BEAT_SECONDS. At the end of the run the file is removed.
A killed run leaves the file. The next run determines whether the owner is alive:

1. The kernel lock is held: the owner is alive. (The kernel frees the lock when a process dies; on many network file
   systems this also works across machines.)
2. The kernel lock is free, and the owner ran on the same kernel since the same boot: the owner is dead.
3. The file system has no locks, but this process is in the owner's PID namespace: compare process id and start time.
4. Otherwise the owner ran on another machine, and its kernel lock may be invisible on this machine. The owner is alive
   if its counter changes within WATCH_SECONDS.

A restart of the same launch (`--max-restarts`) takes over the lock. Reading needs no lock: several runs may start from
one folder. A run takes the lock before its first save. If it resumes in a folder (`missing_ok=True`), it takes the lock
before its first training batch.
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
    3600.0  # if the file is older than this, the owner is dead; long enough for machines with different clocks
)
_SAME_RUN_SECONDS = 10.0  # the time for a killed process of the same launch to release the kernel lock

_open: set[int] = set()  # the lock files that this process holds


def _close_all() -> None:
    """Close the lock files in a forked child, such as a loader's worker, since it may outlive the owner."""
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
        self._resumes: list[Path] = []  # folders to lock before the first training batch

    def resumes(self, folder: Path) -> None:
        """Record that the run resumes in this folder. It is locked if the run trains."""
        self._resumes.append(folder.absolute())

    def before_batch(self) -> None:
        """Lock the folders in which the run resumes. Called at the first training batch. Raises as `take`."""
        while self._resumes:
            if (folder := self._resumes.pop()).is_dir():  # otherwise the first save makes and locks it
                self.take(folder)

    def take(self, folder: Path) -> None:
        """Lock this folder, and make it if it is missing. Calling it again is cheap.

        Raises CheckpointError if another run has the lock. If no file can be made there, it takes no lock: the save
        will report the problem.
        """
        folder = folder.absolute()
        if DIRECTORY.fullmatch(folder.name):  # the path of one checkpoint: a save refuses it
            return
        with contextlib.suppress(OSError):
            make_directory(folder)
            key = str(folder.resolve())
            if (held := self._held.get(key)) is not None:
                if held.is_own():
                    return
                self._held.pop(key).release()  # the folder or file was removed, or another run has taken the lock
            self._held[key] = _take(folder, self._say)

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].release()


class _Lock:
    """A lock file of this run.

    Args:
        path, handle: the open file.
        record: its content.
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
        except RuntimeError:  # the user's thread limit: only detection from other machines suffers
            self._thread = None

    def is_own(self) -> bool:
        """Whether the file still exists and belongs to this run."""
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
    """Take the lock. Raises CheckpointError if another run has it, and OSError if no file can be made."""
    path = folder / FILE
    record = _own_record()
    deadline = time.monotonic() + _SAME_RUN_SECONDS
    while True:
        handle = _open_file(path)
        try:
            locked = _flock(handle)
            former = _read(path)
            late = time.monotonic() > deadline
            if os.fstat(handle).st_nlink == 0 or (locked is False and former is None and not late):
                pass  # the owner has just removed or just made the file: try again
            elif former is not None and _is_same_process(former, record):
                return _Lock(path, handle, record)
            elif former is not None and record["launch"] and former.get("launch") == record["launch"]:
                if locked is not False or late:  # otherwise a killed process is still releasing its memory
                    return _Lock(path, handle, record)
            elif locked is False or (former is not None and _lives(path, former, record, locked is True, say)):
                raise CheckpointError(_refusal(folder, former or {}))
            elif os.access(path, os.W_OK):
                return _Lock(path, handle, record)
            else:  # a dead run of another user
                path.unlink()
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(0.05)


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:  # the file belongs to another user
        return os.open(path, os.O_RDONLY)


def _flock(handle: int) -> bool | None:
    """Take the kernel lock. True: taken. False: another process has it. None: the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The owner's record; None if the file is missing or is no lock file."""
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
        # Identifies the launch, with the same value at each restart: the folder of the launcher's messages.
        "launch": os.path.dirname(os.environ[ERROR_FILE]) if under_launcher else "",
        "token": secrets.token_hex(8),
        "beats": 0,
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user has no name, as in some containers
        return str(os.getuid())


def _kernel(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def _namespace() -> str:
    """The PID namespace: process ids are comparable within it."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> str:
    """The start time of the process, in ticks since the boot (proc_pid_stat(5), field 22); "" if unknown."""
    return (_kernel(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 20)[19]


def _lives(path: Path, former: dict[str, Any], here: dict[str, Any], locked: bool, say: Callable[[str], None]) -> bool:
    """Whether the owner is alive. here: this process's record. locked: whether this process has the kernel lock."""
    kernel = "boot" if here["boot"] else "host"  # containers of one machine share its kernel, and so its locks
    if former.get(kernel) == here[kernel]:
        if locked:
            return False
        if former.get("processes") == here["processes"]:
            return _is_alive(former)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
            return False
    say(
        f"paceline: {path.parent} was last used by {_owner(former)}. Checking for {WATCH_SECONDS:.0f} s whether that "
        "run is still alive."
    )
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, WATCH_SECONDS / 10))
        found = _read(path)
        if found is None:
            return False  # the owner has ended
        if (found.get("token"), found.get("beats")) != (former["token"], former.get("beats")):
            return True
    return False


def _is_same_process(former: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether the owner was an earlier run of this process, which has one run at a time."""
    return all(former.get(key) == here[key] for key in ("host", "boot", "processes", "pid", "born"))


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
        f"checkpoints. Use another directory for this run, or end the other run (`{end}` on "
        f"{former.get('host', '?')}). If you are sure that it has ended, remove {folder / FILE}."
    )
