"""Loading torch faster, and the interpreter's end after it. Imports no torch.

torch brings some hundred thousand objects, of which none ever becomes garbage. Python's collector looks at them several
times while torch is loaded, and twice when the interpreter ends: together a third of the processor time of a process
that loads torch and ends. So the collector pauses while torch is loaded, and leaves alone what is there then
(`gc.freeze`). What comes later is collected as ever; no tensor can be older than torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def faster() -> Iterator[None]:
    """Within it torch may be loaded. Where it is loaded already, nothing changes."""
    with contextlib.nullcontext() if "torch" in sys.modules else paused():
        yield


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A pause of the collector, which leaves alone what it finds afterwards. Where it is off, nothing changes."""
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
    """Set an environment variable of torch's for a time."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
