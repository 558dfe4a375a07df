"""Files that are there whole or not at all, whatever kills the process: what checkpoints and exports are built from.

The way to a whole file: write it in a scratch directory beside its final place, sync it, rename it, sync the directory
that now names it. A rename within one file system is atomic (POSIX rename), and a synced file is on the disk before its
name is.

A scratch directory `.tmp-LABEL-XXXXXXXX` belongs to the process that holds the lock (flock) on the file beside it,
`.tmp-LABEL-XXXXXXXX.lock`. The kernel frees the lock when the process dies, however it dies and wherever it ran: a
later writer can tell a dead writer's debris from a live one's work. Where a file system has no locks, debris is what
was not touched for a day.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_SCRATCH = re.compile(r"(\.tmp-.+-[0-9a-f]{8})(\.lock)?")
_CHUNK_BYTES = 4 * 2**20
_UNTOUCHED_SECONDS = 24 * 3600


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal. Releases the interpreter lock while it works."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's names, are on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """`mkdir -p`, and durable: a directory that a crash takes away would take its checkpoints along."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


@contextlib.contextmanager
def scratch(parent: Path, label: str) -> Iterator[Path]:
    """A new, empty, private directory in `parent`, removed with all that is still in it at the end."""
    path = parent / f".tmp-{label[:40]}-{secrets.token_hex(4)}"
    lock = _hold(_lock_path(path))
    try:
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            _release(_lock_path(path), lock, remove=not os.path.lexists(path))


def remove_debris(parent: Path) -> None:
    """Removes the scratch directories in `parent` whose writers are dead. What cannot be removed is left."""
    matches = [_SCRATCH.fullmatch(name) for name in os.listdir(parent)]
    for name in sorted({match[1] for match in matches if match}):
        with contextlib.suppress(OSError):
            _remove_if_dead(parent / name)


def _remove_if_dead(path: Path) -> None:
    try:
        lock = os.open(_lock_path(path), os.O_RDWR)
    except FileNotFoundError:
        # Its writer has just finished, or had no locks to take.
        places = [path, *path.rglob("*")]
        if time.time() - max(place.lstat().st_mtime for place in places) > _UNTOUCHED_SECONDS:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)  # alive
        return
    shutil.rmtree(path, ignore_errors=True)
    _release(_lock_path(path), lock, remove=not os.path.lexists(path))


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _hold(path: Path) -> int | None:
    """Creates and locks a file; the open handle, or None where the file system has no locks.

    The lock comes before the directory that it speaks for, so that no live writer's directory is ever without one.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)  # another writer is just looking whether we are dead
            time.sleep(0.001)
            continue
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            return None
        if os.fstat(handle).st_nlink > 0:
            return handle
        os.close(handle)  # it thought so, and removed the file before we had locked it


def _release(path: Path, handle: int, *, remove: bool) -> None:
    """Frees a lock. Its file stays where the directory could not be removed: the next writer finds both, and tries."""
    with contextlib.suppress(OSError):
        if remove:
            path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # close alone would not do where a forked worker has the handle too
    os.close(handle)
