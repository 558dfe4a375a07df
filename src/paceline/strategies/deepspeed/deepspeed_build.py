"""A lock that a killed process has left, for which every later start of DeepSpeed would wait without a word.

At its first use DeepSpeed has torch compile an extension. torch makes a file `lock` beside it, keeps it open while it
compiles, and removes it (torch.utils.file_baton). Where the process is killed the file stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch.utils import cpp_extension

from paceline.errors import warn


def warn_of_left_locks() -> None:
    """Warns of each lock that no process of this machine has open. Another machine may, that has the same folder."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    locks = [path for depth in ("*", "*/*") for path in root.glob(f"{depth}/lock")]
    if not locks or not Path("/proc/self/fd").is_dir():
        return
    held = set(_open_files())
    for path in locks:
        if str(path.resolve()) not in held:
            warn(
                f"DeepSpeed waits where an extension is being compiled, as the file {path} says. No process of this "
                f"machine has it open: one that was killed has left it. Unless another machine compiles it: rm {path}"
            )


def _open_files() -> Iterator[str]:
    """The files that processes have open, as far as this user may know it (Linux)."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(link)
        except OSError:  # it has ended, or is another user's
            continue
