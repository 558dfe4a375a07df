"""Report progress to the launcher: count batches in a memory-mapped file.

The launcher samples the current line of each rank every few seconds (launcher/stalls.py). A fast rank that waits for
slower ranks in every step is always at the same line; the count shows that it still makes progress. From the time
between counts the launcher also derives its default limit for a stall. One count is one memory write, about 0.2 us.
"""

from __future__ import annotations

import mmap
import os
import struct

from paceline.world import BEAT, ERROR_FILE, read_beat

_COUNT = struct.Struct("<Q")


class Heartbeat:
    """Counts batches: call it once per batch. Without Paceline's launcher it does nothing."""

    def __init__(self) -> None:
        self._count, self._map = 0, None
        path = os.environ.get(ERROR_FILE)
        if not path:
            return
        try:
            self._count = read_beat(path + BEAT)  # continue the count of an earlier run in this script
            with open(os.open(path + BEAT, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                os.ftruncate(file.fileno(), _COUNT.size)
                os.pwrite(
                    file.fileno(), _COUNT.pack(self._count), 0
                )  # so that a full disk is an error here, not a SIGBUS later
                self._map = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError:  # the launcher's folder is gone, or its disk full: the launcher then sees only the current line
            self._map = None

    @property
    def beats(self) -> bool:
        """Whether a launcher reads the count."""
        return self._map is not None

    def __call__(self, _: object = None) -> None:
        if self._map is not None:
            self._count += 1
            _COUNT.pack_into(self._map, 0, self._count)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
