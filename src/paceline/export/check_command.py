"""paceline check: verify that checkpoints and exported files are unchanged since they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from paceline.errors import printable
from paceline.state import checkpoint
from paceline.state.plain_files import compare_checksums


def check(paths: Sequence[str], say: Callable[[str], None] = click.echo) -> int:
    """Print whether each checkpoint or file is whole, and the files that have changed. Returns the exit status: 1 if
    something is damaged, otherwise 0.

    paths: directories that were passed to run.save (all checkpoints in them are checked), single checkpoints, and
    exported files. Raises CheckpointError if a directory contains no checkpoint.
    """
    found: dict[Path, list[str]] = {}
    for path in map(Path, paths):
        found |= checkpoint.examine(path) if path.is_dir() else {path: compare_checksums(path)}
    for path, damage in found.items():
        say(printable(f"{path}: damaged" if damage else f"{path}: intact"))
        for line in damage:
            say(f"  {printable(line)}")
    return int(any(found.values()))
