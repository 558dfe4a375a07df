"""paceline check: are these checkpoints and exported files as they were written?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from paceline.errors import printable
from paceline.state import checkpoint
from paceline.state.plain_files import compare_checksums


def check(paths: Sequence[str], say: Callable[[str], None] = click.echo) -> int:
    """Say of each path whether it is whole, and if not, which files have changed. Returns the exit status: 1 where one
    has, else 0.

    paths: directories that run.save was given (every checkpoint in them is read), single checkpoints, and exported
    files. Raises CheckpointError where a directory holds no checkpoint.
    """
    found: dict[Path, list[str]] = {}
    for path in map(Path, paths):
        found |= checkpoint.examine(path) if path.is_dir() else {path: compare_checksums(path)}
    for path, damage in found.items():
        say(printable(f"{path}: not whole" if damage else f"{path}: whole"))
        for line in damage:
            say(f"  {printable(line)}")
    return int(any(found.values()))
