"""Errors of the disk, told as CheckpointError: which path, why, and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import CheckpointError


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turns an error of the operating system inside into "{what} {path}: reason. Remedy."."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if inner := re.search(r"\(os error (\d+)\)", str(error)):  # how safetensors tells of one
            number, reason = int(inner[1]), os.strerror(int(inner[1]))
        raise CheckpointError(f"{what} {path}: {reason}. {_remedy(path, number)}") from error


def contents(path: Path, most: int = 8) -> str:
    """What lies in a directory, for a message: "a, b, c and 12 more"."""
    names = sorted(os.listdir(path))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def nearest(path: Path) -> Path:
    """`path`, or the closest of its parents that is there."""
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
