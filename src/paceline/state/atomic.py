"""Write files atomically: complete or not at all, even if the process is killed. Also explains disk errors.

To write a file: write it in a scratch directory beside its final path, sync it, rename it, and sync the directory with
the new name. A rename within one file system is atomic (POSIX rename). The sync before it ensures that the bytes are on
the disk before the name.

A scratch directory `.tmp-LABEL-XXXXXXXX` belongs to the process that holds the lock (flock) on the file beside it,
`.tmp-LABEL-XXXXXXXX.lock`. The kernel frees the lock when the process dies, on any machine. So a later writer can
distinguish the leftovers of a dead writer from the files of a live writer. On a file system without locks, a directory
that was not touched for a day counts as left by a dead writer.
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

_held: dict[int, Path] = {}  # the locks that this process holds, in any thread: handle -> file


def _drop_locks() -> None:
    """Close the lock files in a forked child, such as a loader's worker, since it may outlive the writer."""
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
    """Make a directory and its parents, and sync them: if a crash lost the directory, its checkpoints would be lost."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


@contextlib.contextmanager
def scratch(parent: Path, label: str) -> Iterator[Path]:
    """A context with a new, empty directory in `parent`. The directory and its content are removed at the end."""
    path = parent / f".tmp-{label[:40]}-{secrets.token_hex(4)}"
    handle = lock(_lock_path(path))
    try:
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            unlock(_lock_path(path), handle, remove=not os.path.lexists(path))


def write_whole(file: Path, write: Callable[[Path], None], what: str, *, checksum: bool = False) -> None:
    """Write one file atomically. An older file of this name is replaced by the complete new file, or not at all.

    Args:
        write: writes the file to the path that it receives, which has the same file name in a scratch directory. It may
            make further files beside this path (a large model's data). These are moved beside `file` first.
        what: how the CheckpointError begins if the operating system reports an error, for example "The model could
            not be exported to".
        checksum: also write FILE.sha256 beside the file (plain_files.py).
    """
    with explained(what, file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory, not a file name")
        make_directory(file.parent)
        remove_debris(file.parent)
        with scratch(file.parent, file.name) as temporary:
            whole = temporary / file.name
            write(whole)
            made = sorted(temporary.iterdir(), key=lambda path: path == whole)
            if checksum:
                made.append(write_checksums(whole, made))
                checksums_of(file).unlink(missing_ok=True)  # the checksums of the file that is being replaced
            for one in made:
                sync(one)
                os.replace(one, file.parent / one.name)
            sync(file.parent)


def remove_debris(parent: Path) -> None:
    """Remove the scratch directories of dead writers in `parent`. Ignores errors."""
    matches = [_SCRATCH.fullmatch(name) for name in os.listdir(parent)]
    for name in sorted({match[1] for match in matches if match}):
        with contextlib.suppress(OSError):
            _remove_if_dead(parent / name)


def _remove_if_dead(path: Path) -> None:
    if _lock_path(path) in list(_held.values()):
        return  # another thread is the writer; some network file systems would grant its lock to this thread too
    try:
        handle = os.open(_lock_path(path), os.O_RDWR)
    except FileNotFoundError:
        # The writer has just finished, or the file system has no locks.
        entries = [path, *path.rglob("*")]
        if time.time() - max(entry.lstat().st_mtime for entry in entries) > _UNTOUCHED_SECONDS:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)  # the writer is alive
        return
    shutil.rmtree(path, ignore_errors=True)
    unlock(_lock_path(path), handle, remove=not os.path.lexists(path))


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def lock(path: Path) -> int | None:
    """Create and lock a file. Returns the open handle, or None if the file system has no locks.

    The lock is made before its directory, so that the directory of a live writer always has a lock.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)  # another writer holds the lock briefly, to test whether we are dead
            time.sleep(0.001)
            continue
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            return None
        if os.fstat(handle).st_nlink > 0:
            _held[handle] = path
            return handle
        os.close(handle)  # the other writer removed the file before we locked it


def unlock(path: Path, handle: int, *, remove: bool) -> None:
    """Free a lock. remove: also delete its file. If the directory remains, the file must remain for the next writer."""
    with contextlib.suppress(OSError):
        if remove:
            path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # close alone is not enough if a forked worker has the handle too
    _held.pop(handle, None)
    os.close(handle)


def is_free(path: Path) -> bool:
    """Whether a file exists that a process has locked, and that none locks any more: the process has died, or ended."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


# --- errors of the disk


@contextlib.contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Convert an error of the operating system into a CheckpointError, "{what} {path}: reason. Remedy."."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if inner := re.search(r"\(os error (\d+)\)", str(error)):  # an OSError in the text of a SafetensorError
            number, reason = int(inner[1]), os.strerror(int(inner[1]))
        raise CheckpointError(f"{what} {path}: {reason}. {_remedy(path, number)}") from error


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Convert an error, raised while an intact file is interpreted, into a CheckpointError that names the file."""
    try:
        yield
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}. Use another checkpoint.") from error


def contents(path: Path, most: int = 8) -> str:
    """The names in a directory, for a message: "a, b, c and 12 more"."""
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def nearest(path: Path) -> Path:
    """`path`, or its closest existing parent."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _remedy(path: Path, number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(nearest(path)).free / 2**30
        return f"{free:.2f} GiB are free. Free some space, keep fewer checkpoints (keep=2), or use another directory."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "This user has no permission: change the permissions, or use another directory."
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG):
        return "Use another path."
    return "Check the disk, or use another directory."
