"""Open and hash plain files, and compare them with their checksum files.

FILE.sha256 holds the hashes of FILE and of files that belong to it, in the format of GNU coreutils. To check them with
coreutils, use `sha256sum --check FILE.sha256`.

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
"""The suffix of a checksum file."""

_CHUNK_BYTES = 4 * 2**20
_MOST_BYTES = 2**20  # the part of a checksum file that is read
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_plain(path: Path) -> io.FileIO:
    """Open a plain file for reading. Raises OSError for a link, a pipe, a device or a directory.

    A link may lead anywhere, reading a pipe may block forever, and a device may be endless.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'not a plain file')}")
    return io.FileIO(handle, "rb")


def sha256_of(file: io.FileIO) -> str:
    """The sha256 of an open file from its current position, in hexadecimal. Releases the GIL."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def hash_of(path: Path) -> str:
    """The sha256 of a plain file. Raises OSError if the file cannot be read."""
    with open_plain(path) as file:
        return sha256_of(file)


def unreadable(error: OSError) -> str:
    """Why a file cannot be read: "missing", or "unreadable (it is a link)"."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    return f"unreadable ({'it is a link' if error.errno == errno.ELOOP else error.strerror})"


def checksums_of(file: Path) -> Path:
    """The path of a file's checksum file."""
    return file.with_name(file.name + CHECKSUMS)


def write_checksums(file: Path, made: Iterable[Path]) -> Path:
    """Write the hashes of the files `made` into the checksum file of `file`, and return that checksum file's path.

    All files must be in one directory.
    """
    path = checksums_of(file)
    path.write_text("".join(f"{hash_of(one)}  {one.name}\n" for one in made), "utf-8")
    return path


def compare_checksums(file: Path) -> list[str]:
    """Compare files with their checksums. Returns one line per mismatch or unreadable file.

    The result is empty if all files match. file: the exported file, or its checksum file.
    """
    path = file if file.name.endswith(CHECKSUMS) else checksums_of(file)
    try:
        with open_plain(path) as opened:
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return [f"{path}: {unreadable(error)}"]
    entries = [_LINE.fullmatch(line) for line in text.splitlines()]
    named = {entry[2] for entry in entries if entry}
    if not all(entries) or path.name.removesuffix(CHECKSUMS) not in named or not text.endswith("\n"):
        return [f"{path}: damaged; it is not a list of checksums of {path.name.removesuffix(CHECKSUMS)}"]
    return [line for entry in entries if entry for line in _compared(path.with_name(entry[2]), entry[1])]


def _compared(path: Path, expected: str) -> list[str]:
    try:
        found = hash_of(path)
    except OSError as error:
        return [f"{path}: {unreadable(error)} (expected sha256 {expected})"]
    return [] if found == expected else [f"{path}: expected sha256 {expected}, found {found}"]
