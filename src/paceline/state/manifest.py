"""manifest.json: lists the files of a complete checkpoint. It is written last.

    {
      "format": 1,               the format of the checkpoint; readers refuse an unknown number. 2: some tensors are in
                                 slices (slice_files.py)
      "step": 42,
      "serial": 7,               the order in time: one more than the largest serial in the directory
      "meta": {...},             a document of plain_state.py, without tensors
      "files": {"model.json": {"size": 812, "sha256": "..."}, "model.safetensors": {...}, ...},
      "sha256": "..."            the hash of this file, computed with 64 zeros here
    }

`format`, `serial` and the file's `sha256` keep their meaning in every later format. A directory is a checkpoint only if
its manifest matches the hash in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import CheckpointError
from paceline.state.plain_files import open_plain, sha256_of, unreadable

NAME = "manifest.json"
FORMAT, SLICED = KNOWN = 1, 2  # formats
SLICES = "slices-"
"""How the names of files of slices begin."""
DIRECTORY = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # a second save at the same step has the suffix -2, and so on

_ZEROS = b"0" * 64
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 2**26  # the largest manifest; it has about 130 bytes per file


class Damage(Exception):
    """A directory is not an intact checkpoint. lines: one per damaged file, with its hash."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class Entry(NamedTuple):
    """One file of a checkpoint."""

    size: int  # in bytes
    sha256: str  # in hexadecimal


@dataclass(frozen=True)
class Manifest:
    """The content of one manifest.json (see above)."""

    step: int
    serial: int
    meta: Any
    files: dict[str, Entry]  # by file name
    format: int = FORMAT

    def dump(self) -> bytes:
        """The bytes of the file, including its hash."""
        fields = {
            "format": self.format,
            "step": self.step,
            "serial": self.serial,
            "meta": self.meta,
            "files": {name: entry._asdict() for name, entry in self.files.items()},
            "sha256": _ZEROS.decode(),
        }
        blank = json.dumps(fields, indent=1).encode()
        return _swap(blank, _ZEROS, hashlib.sha256(blank).hexdigest().encode())


def load(directory: Path) -> Manifest:
    """The manifest of one checkpoint directory. Raises Damage if it is missing or damaged.

    For an unknown format, only `format` and `serial` are read, and `require_known` refuses the manifest.
    """
    path = directory / NAME
    try:
        with open_plain(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Damage(f"{path}: {unreadable(error)}") from error
    if len(data) > _MOST_BYTES:
        raise Damage(f"{path}: not a manifest (it has more than {_MOST_BYTES:,} bytes)")
    try:
        fields = json.loads(data)
        claimed = fields["sha256"]
        actual = hashlib.sha256(_swap(data, claimed.encode(), _ZEROS)).hexdigest()
        if claimed == actual:
            return _parse(fields)
    except Exception as error:  # untrusted bytes may make json or Python raise anything
        actual = hashlib.sha256(data).hexdigest()
        raise Damage(f"{path}: not a manifest ({type(error).__name__}: {error}); its sha256 is {actual}") from error
    raise Damage(f"{path}: expected sha256 {claimed}, found {actual}")


def _parse(fields: Any) -> Manifest:
    serial = _whole("serial", fields["serial"])
    if fields["format"] not in KNOWN:
        return Manifest(step=0, serial=serial, meta=None, files={}, format=_whole("format", fields["format"]))
    files = {name: Entry(**entry) for name, entry in fields["files"].items()}
    if not files:
        raise ValueError("it lists no files")
    for name, entry in files.items():
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"{name!r} is not a plain file name")
        if name == NAME or not name.endswith((".json", ".safetensors")):
            raise ValueError(f"{name!r} is not a file of a checkpoint")
        _whole(f"the size of {name}", entry.size)
        if f"{Path(name).stem}.json" not in files:
            raise ValueError(f"it lists {name}, but not {Path(name).stem}.json")
        if not _SHA256.fullmatch(entry.sha256):
            raise ValueError(f"the sha256 of {name} is {entry.sha256!r}")
    return Manifest(
        step=_whole("step", fields["step"]), serial=serial, meta=fields["meta"], files=files, format=fields["format"]
    )


def _whole(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is {str(value)[:40]}, not an integer of at least 0")
    return value


def require_known(manifest: Manifest, directory: Path) -> None:
    """Raises CheckpointError if this version cannot read the checkpoint's format."""
    if manifest.format not in KNOWN:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest.format}; this version of Paceline reads formats "
            f"{FORMAT} and {SLICED}. "
            "Use the version that wrote it (for a newer version `pip install -U paceline`), or another checkpoint."
        )


def verify(directory: Path, manifest: Manifest) -> None:
    """Read every file of a checkpoint (about 0.6 s per GiB). Raises Damage with each changed or missing file."""
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="paceline-verify") as pool:
        found = pool.map(lambda item: list(_examine(directory, *item)), manifest.files.items())
        lines = [line for some in found for line in some]
    if lines:
        raise Damage(*lines)


def _examine(directory: Path, name: str, entry: Entry) -> Iterator[str]:
    path = directory / name
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Do not read a file that is too long: it may be endless.
            actual = sha256_of(file) if size <= entry.size else ""
    except OSError as error:
        yield f"{path}: {unreadable(error)} (expected sha256 {entry.sha256})"
        return
    if actual != entry.sha256 or size != entry.size:
        lengths = "" if size == entry.size else f"{size} bytes instead of {entry.size}; "
        yield f"{path}: {lengths}expected sha256 {entry.sha256}" + (f", found {actual}" if actual else "")


def _swap(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the last `old` in `data`, since the manifest's hash is at the end."""
    head, found, tail = data.rpartition(old)
    if not found:
        raise ValueError("it does not contain its hash")
    return head + new + tail
