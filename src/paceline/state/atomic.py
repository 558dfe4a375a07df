"""Atomic writes: a file is there whole or not at all, whatever kills the process. And what disk errors say.

To write a file: write it in a scratch directory beside its final place, sync it, rename it, and sync the directory that
has the new name. A rename within one file system is atomic (POSIX rename). The sync before it puts the bytes on the
disk before the name.

A scratch directory `.tmp-LABEL-XXXXXXXX` belongs to the process that holds the lock (flock) on the file beside it,
`.tmp-LABEL-XXXXXXXX.lock`. The kernel frees the lock when that process dies, on whatever machine it ran. So a later
writer can tell what a dead writer left from what a live one is writing. Where a file system has no locks, a directory
that was not touched for a day was left by a dead writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import CheckpointError
from paceline.state.plain_files import checksums_of, write_checksums

_SCRATCH = re.compile(r"(\.tmp-.+-[0-9a-f]{8})(\.lock)?")
_UNTOUCHED_SECONDS = 24 * 3600

_held: dict[int, Path] = {}  # the locks that this process holds, in whatever thread: handle -> file


def _drop_locks() -> None:
    """In a forked child, such as a loader's worker: it may outlive the writer, whose locks it would keep."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_drop_locks)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """`mkdir -p`, synced: a directory that is lost in a crash would take its checkpoints along."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


@contextlib.contextmanager
def scratch(parent: Path, label: str) -> Iterator[Path]:
    """A new, empty directory in `parent`. It is removed at the end, with all that is still in it."""
    path = parent / f".tmp-{label[:40]}-{secrets.token_hex(4)}"
    lock = _lock(_lock_path(path))
    try:
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            _unlock(_lock_path(path), lock, remove=not os.path.lexists(path))


def write_whole(file: Path, write: Callable[[Path], None], what: str, *, checksum: bool = False) -> None:
    """Write one file by `write(path)`, which gets a path of the same name in a scratch directory. An older file of this
    name is replaced by the whole one, or not at all.

    write may make further files beside its own (a large model's data); they are put beside `file` first. what: the
    first words of the CheckpointError for what the operating system refuses ("The model could not be exported to").
    checksum: put FILE.sha256 beside it, too (plain_files.py).
    """
    with explained(what, file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory, and the name of a file is needed")
        make_directory(file.parent)
        remove_debris(file.parent)
        with scratch(file.parent, file.name) as temporary:
            whole = temporary / file.name
            write(whole)
            made = sorted(temporary.iterdir(), key=lambda path: path == whole)
            if checksum:
                made.append(write_checksums(whole, made))
                checksums_of(file).unlink(missing_ok=True)  # those of the older file, while this one takes its place
            for one in made:
                sync(one)
                os.replace(one, file.parent / one.name)
            sync(file.parent)


def remove_debris(parent: Path) -> None:
    """Remove the scratch directories in `parent` whose writers are dead, as far as that is possible."""
    matches = [_SCRATCH.fullmatch(name) for name in os.listdir(parent)]
    for name in sorted({match[1] for match in matches if match}):
        with contextlib.suppress(OSError):
            _remove_if_dead(parent / name)


def _remove_if_dead(path: Path) -> None:
    if _lock_path(path) in list(_held.values()):
        return  # another thread is its writer; on some network file systems a lock does not keep out its own process
    try:
        lock = os.open(_lock_path(path), os.O_RDWR)
    except FileNotFoundError:
        # Its writer has just finished, or the file system has no locks.
        places = [path, *path.rglob("*")]
        if time.time() - max(place.lstat().st_mtime for place in places) > _UNTOUCHED_SECONDS:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)  # its writer is alive
        return
    shutil.rmtree(path, ignore_errors=True)
    _unlock(_lock_path(path), lock, remove=not os.path.lexists(path))


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock(path: Path) -> int | None:
    """Create and lock a file. Returns the open handle, or None where the file system has no locks.

    The lock is made before its directory, so that the directory of a live writer always has one.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)  # another writer holds it for a moment, to find out whether we are dead
            time.sleep(0.001)
            continue
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            return None
        if os.fstat(handle).st_nlink > 0:
            _held[handle] = path
            return handle
        os.close(handle)  # that writer removed the file before we had locked it


def _unlock(path: Path, handle: int, *, remove: bool) -> None:
    """Free a lock. remove: delete its file too. It stays where the directory could not be removed, so that the next
    writer finds both."""
    with contextlib.suppress(OSError):
        if remove:
            path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # close alone would not do where a forked worker has the handle too
    _held.pop(handle, None)
    os.close(handle)


# --- errors of the disk


@contextlib.contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Raise an error of the operating system as a CheckpointError, "{what} {path}: reason. Remedy."."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if inner := re.search(r"\(os error (\d+)\)", str(error)):  # an OSError, as safetensors tells it
            number, reason = int(inner[1]), os.strerror(int(inner[1]))
        raise CheckpointError(f"{what} {path}: {reason}. {_remedy(path, number)}") from error


def contents(path: Path, most: int = 8) -> str:
    """The names in a directory, for a message: "a, b, c and 12 more"."""
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def nearest(path: Path) -> Path:
    """`path`, or the closest of its parents that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _remedy(path: Path, number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(nearest(path)).free / 2**30
        return f"{free:.2f} GiB are free there. Make room, keep fewer checkpoints (keep=2), or give another directory."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "This user may not do that there: change the permissions, or give another directory."
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG):
        return "Give another path."
    return "Look at the disk, or give another directory."
