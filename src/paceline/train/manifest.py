"""manifest.json: what a checkpoint directory must hold to be whole. It is written last.

    {
      "format": 1,               the layout of all this; a program refuses a number that it does not know
      "step": 42,
      "serial": 7,               one more than the largest in its directory when it was written: its order in time
      "meta": {...},             a document of tree.py, without tensors
      "files": {"model.json": {"size": 812, "sha256": "..."}, "model.safetensors": {...}, ...},
      "sha256": "..."            of this file itself, with 64 zeros in this place
    }

`format`, `serial` and the file's own `sha256` mean the same in every format to come. A directory without a manifest, or
with a manifest that its own hash does not fit, is no checkpoint, whatever else it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import CheckpointError
from paceline.train.atomic import sha256_of

NAME = "manifest.json"
FORMAT = 1
DIRECTORY = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # a second save at the same step has the suffix -2, and so on

_ZEROS = b"0" * 64


class Damage(Exception):
    """Why a directory is not a whole checkpoint: one line for each damaged file, with its hash."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class Entry(NamedTuple):
    """One file of a checkpoint: its length in bytes, and its sha256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What one manifest.json says."""

    step: int
    serial: int
    meta: Any
    files: dict[str, Entry]
    format: int = FORMAT

    def dump(self) -> bytes:
        """The bytes of the file, its own hash included."""
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
    """The manifest of one checkpoint directory. Raises Damage where there is none that can be trusted.

    A manifest of an unknown format comes back with its `format` and `serial` alone: `require_known` tells.
    """
    path = directory / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damage(f"{path}: {_missing_or(error)}") from error
    try:
        fields = json.loads(data)
        claimed = fields["sha256"]
        actual = hashlib.sha256(_swap(data, claimed.encode(), _ZEROS)).hexdigest()
        if claimed == actual:
            return _parse(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        actual = hashlib.sha256(data).hexdigest()
        raise Damage(f"{path}: not a manifest ({type(error).__name__}: {error}); its sha256 is {actual}") from error
    raise Damage(f"{path}: expected sha256 {claimed}, found {actual}")


def _parse(fields: Any) -> Manifest:
    if fields["format"] != FORMAT:
        return Manifest(step=0, serial=int(fields["serial"]), meta=None, files={}, format=fields["format"])
    files = {name: Entry(**entry) for name, entry in fields["files"].items()}
    if strange := [name for name in files if Path(name).name != name]:
        raise ValueError(f"{strange[0]!r} is not a plain file name")
    return Manifest(step=int(fields["step"]), serial=int(fields["serial"]), meta=fields["meta"], files=files)


def require_known(manifest: Manifest, directory: Path) -> None:
    """Raises CheckpointError for a checkpoint whose format this version cannot read."""
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest.format}; this version of Paceline reads format {FORMAT}. "
            "Use the version that wrote it (`pip install -U paceline` where that is a newer one), or give another "
            "checkpoint."
        )


def verify(directory: Path, manifest: Manifest) -> None:
    """Reads every file of a checkpoint (some 0.6 s a GiB). Raises Damage naming each that is not as it was written."""
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="paceline-verify") as pool:
        found = pool.map(lambda item: list(_examine(directory, *item)), manifest.files.items())
        lines = [line for some in found for line in some]
    if lines:
        raise Damage(*lines)


def _examine(directory: Path, name: str, entry: Entry) -> Iterator[str]:
    path = directory / name
    try:
        size, actual = path.stat().st_size, sha256_of(path)
    except OSError as error:
        yield f"{path}: {_missing_or(error)} (expected sha256 {entry.sha256})"
        return
    if actual != entry.sha256 or size != entry.size:
        lengths = "" if size == entry.size else f"{size} bytes instead of {entry.size}; "
        yield f"{path}: {lengths}expected sha256 {entry.sha256}, found {actual}"


def _missing_or(error: OSError) -> str:
    return "missing" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else f"unreadable ({error.strerror})"


def _swap(data: bytes, old: bytes, new: bytes) -> bytes:
    """`data` with the last `old` replaced: the manifest's own hash stands at its end."""
    head, found, tail = data.rpartition(old)
    if not found:
        raise ValueError("no hash of its own")
    return head + new + tail
