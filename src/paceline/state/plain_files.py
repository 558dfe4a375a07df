"""Plain files: opened where they are such, hashed, and compared with the hashes that lie beside them.

The hashes of FILE are in FILE.sha256, in the form that `sha256sum` of GNU coreutils writes, and checks with
`sha256sum --check FILE.sha256`:

    0f343b0931126a20f133d67c2b018a3b1e8a...  model.onnx
    9f86d081884c7d659a2feaa0c55ad015a3bf...  model.onnx.data
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

CHECKSUMS = ".sha256"
"""What follows the name of a file in that of its checksums."""

_CHUNK_BYTES = 4 * 2**20
_MOST_BYTES = 2**20  # of checksums
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_plain(path: Path) -> io.FileIO:
    """Opens a plain file for reading. Raises OSError for anything else: a link may lead anywhere, a pipe waits for
    ever, and a device may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no plain file')}")
    return io.FileIO(handle, "rb")


def sha256_of(file: io.FileIO) -> str:
    """The sha256 of an open file, from where it stands, in hexadecimal. Other threads run meanwhile."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def hash_of(path: Path) -> str:
    """The sha256 of a plain file. Raises OSError."""
    with open_plain(path) as file:
        return sha256_of(file)


def unreadable(error: OSError) -> str:
    """Why a file cannot be read: "missing", or "unreadable (it is a link)"."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    return f"unreadable ({'it is a link' if error.errno == errno.ELOOP else error.strerror})"


def checksums_of(file: Path) -> Path:
    """Where the checksums of a file lie."""
    return file.with_name(file.name + CHECKSUMS)


def write_checksums(file: Path, made: Iterable[Path]) -> Path:
    """Write the hashes of the files `made`, which lie beside `file`. Returns the path of what was written."""
    path = checksums_of(file)
    path.write_text("".join(f"{hash_of(one)}  {one.name}\n" for one in made), "utf-8")
    return path


def compare_checksums(file: Path) -> list[str]:
    """A line for each file that its checksum does not fit, and for checksums that cannot be read. Empty: all fit.

    file: the exported file, or that of its checksums."""
    path = file if file.name.endswith(CHECKSUMS) else checksums_of(file)
    try:
        with open_plain(path) as opened:
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return [f"{path}: {unreadable(error)}"]
    entries = [_LINE.fullmatch(line) for line in text.splitlines()]
    named = {entry[2] for entry in entries if entry}
    if not all(entries) or path.name.removesuffix(CHECKSUMS) not in named or not text.endswith("\n"):
        return [f"{path}: damaged; no list of checksums of {path.name.removesuffix(CHECKSUMS)}"]
    return [line for entry in entries if entry for line in _compared(path.with_name(entry[2]), entry[1])]


def _compared(path: Path, expected: str) -> list[str]:
    try:
        found = hash_of(path)
    except OSError as error:
        return [f"{path}: {unreadable(error)} (expected sha256 {expected})"]
    return [] if found == expected else [f"{path}: expected sha256 {expected}, found {found}"]
