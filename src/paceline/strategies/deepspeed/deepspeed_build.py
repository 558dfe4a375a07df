"""Find lock files that killed processes have left. Every later start of DeepSpeed would wait for them silently.

On first use DeepSpeed makes torch compile an extension. torch creates a file `lock` next to it, keeps the file open
while compiling, and then removes it (torch.utils.file_baton). If the process is killed, the file stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch.utils import cpp_extension

from paceline.errors import warn


def warn_of_left_locks() -> None:
    """Warn of each lock file that no process of this machine has open.

    If machines share the folder, another machine may have it open.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    locks = [path for depth in ("*", "*/*") for path in root.glob(f"{depth}/lock")]
    if not locks or not Path("/proc/self/fd").is_dir():
        return
    held = set(_open_files())
    for path in locks:
        if str(path.resolve()) not in held:
            warn(
                f"DeepSpeed waits for an extension to be compiled, because the lock file {path} exists. No process on "
                "this machine has it open; a killed process left it. Unless another machine is compiling the "
                f"extension: rm {path}"
            )


def _open_files() -> Iterator[str]:
    """The paths of open files, of all processes that this user may inspect (Linux)."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(link)
        except OSError:  # the process has ended, or is another user's
            continue
