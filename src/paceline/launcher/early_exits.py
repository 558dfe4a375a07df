"""A rank that has ended, with exit code 0, while others go on.

It may be right: rank 0 exports the model, and the others have nothing left to do. It may be a fault: the others are in
a collective, or will come to one, that the rank never joins, and wait there for the process group's timeout (30
minutes). Neither its end nor the time since then tells which. The stacks of the others do:

1. NOTICE_SECONDS after the first end, say who has ended, where in its script, and who still runs.
2. From then on, sample the stacks of the running ranks every POLL_SECONDS (stacks.py).
3. A rank whose stack has not changed for STUCK_SECONDS, and is in communication, waits in vain: the run is ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from paceline.launcher.output import say
from paceline.launcher.report import exits_in_words, name_ranks
from paceline.launcher.stacks import StackSample, is_waiting, sample_stacks
from paceline.world import LEFT, told

NOTICE_SECONDS = 10.0
POLL_SECONDS = 2.0
STUCK_SECONDS = 30.0


class EarlyExits:
    """Watches the ranks of one machine, from the first end of a rank on.

    Args:
        error_files: of each rank of this machine.
        stall_seconds: the user's limit on a stall (--stall-timeout); None: by the seconds above.
    """

    def __init__(self, error_files: Mapping[int, str], stall_seconds: float | None = None) -> None:
        self._error_files = error_files
        self._notice_seconds, self._stuck_seconds = NOTICE_SECONDS, STUCK_SECONDS
        if stall_seconds is not None:
            self._notice_seconds = min(NOTICE_SECONDS, stall_seconds / 2)
            self._stuck_seconds = min(STUCK_SECONDS, stall_seconds / 2)
        self._since: float | None = None
        self._noticed = False
        self._polled = 0.0
        self._first: dict[int, tuple[StackSample, float]] = {}  # rank -> (first sample with its present frames, when)

    def words(self, left: Sequence[int], how: str = "early") -> str:
        """Which ranks ended, without an error, and where in the script."""
        return exits_in_words(left, {rank: read_place(path) for rank, path in self._error_files.items()}, how)

    def poll(self, left: Sequence[int], pids: Mapping[int, int]) -> str | None:
        """What is wrong, in a sentence or two, once something is; or else None.

        Args:
            left: the ranks, of any machine, that have ended without an error.
            pids: the process of each rank of this machine that still runs.
        """
        if not left or not pids:
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        poll_seconds = min(POLL_SECONDS, self._stuck_seconds / 4)
        if now - self._since < self._notice_seconds or now - self._polled < poll_seconds:
            return None
        self._polled = now
        if not self._noticed:
            self._noticed = True
            running = f"{name_ranks(pids)} still run{'s' if len(pids) == 1 else ''}"
            say(f"paceline: {self.words(left, f'{self._notice_seconds:.0f} s ago')}; {running}.\n")
        for rank, stand in sample_stacks(self._error_files, pids).items():
            before, when = self._first.get(rank, (None, now))
            if before is None or before.frames != stand.frames:
                self._first[rank] = stand, now
            elif now - when >= self._stuck_seconds and is_waiting(before, stand, now - when):
                return (
                    f"{self.words(left)}, and rank {rank} has waited since then at {stand}. "
                    "Do all ranks take the same number of steps, and make the same calls?"
                )
        return None


def read_place(error_file: str) -> str:
    """Where in the script a rank that ended with exit code 0 did so; "" where it did not say."""
    return told(error_file, LEFT) or ""
