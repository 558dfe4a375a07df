"""Speed up the import of torch and the interpreter's exit. Does not import torch.

torch creates a few hundred thousand objects that never become garbage. Python's collector scans them several times
while torch is imported, and twice when the interpreter exits. Together this takes a third of the processor time of a
process that imports torch and exits. So the collector is paused during the import, and then ignores all existing
objects (`gc.freeze`). Later objects, such as all tensors, are collected as usual.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def faster() -> Iterator[None]:
    """Speed up an import of torch inside the block. Has no effect if torch is already imported."""
    with contextlib.nullcontext() if "torch" in sys.modules else paused():
        yield


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the collector. At the end of the block, freeze all objects. Has no effect if the collector is off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable temporarily."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
