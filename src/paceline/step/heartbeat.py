"""A run tells its launcher that it moves: it counts the batches that it takes, in a file that it has mapped.

The launcher looks at where a rank is every few seconds (launcher/stalls.py). One that is quick, and waits for slower
ranks in every step, is found at the same line each time; the count shows that it has gone on in between. The time
between two counts is also what the launcher's patience follows. A count is one write into memory, some 0.2 us.
"""

from __future__ import annotations

import mmap
import os
import struct

from paceline.world import BEAT, ERROR_FILE, read_beat

_COUNT = struct.Struct("<Q")


class Heartbeat:
    """Call it with each batch. Without a launcher of Paceline's it does nothing."""

    def __init__(self) -> None:
        self._count, self._map = 0, None
        path = os.environ.get(ERROR_FILE)
        if not path:
            return
        try:
            self._count = read_beat(path + BEAT)  # of a run that this script has made before
            with open(os.open(path + BEAT, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                os.ftruncate(file.fileno(), _COUNT.size)
                os.pwrite(
                    file.fileno(), _COUNT.pack(self._count), 0
                )  # so that a full disk is an error here, and not SIGBUS
                self._map = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError:  # the launcher's folder is gone, or full: it then knows only where the rank stands
            self._map = None

    @property
    def beats(self) -> bool:
        """Whether a launcher looks at the count."""
        return self._map is not None

    def __call__(self, _: object = None) -> None:
        if self._map is not None:
            self._count += 1
            _COUNT.pack_into(self._map, 0, self._count)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
