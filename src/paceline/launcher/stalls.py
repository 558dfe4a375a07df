"""Nothing hangs in silence: say which rank waits where, in which call, and which rank has not come there.

A rank that makes a collective call alone (`if run.main: run.save(...)`), or a step more than the others, waits for the
process group's timeout, 30 minutes. Nobody can know whether it waits in vain: the others may be busy with something
long. So no rank is ended here.

1. Every POLL_SECONDS sample the stacks of all ranks of this machine (early_exits.py).
2. Either a rank waits: its stack has not changed for STALL_SECONDS and is in communication. Or no rank at all has
   moved. Then say where all of them are; again after twice that time, four times, and so on while it lasts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launcher.early_exits import StackSample, is_waiting, sample_stacks
from paceline.launcher.output import say
from paceline.launcher.report import name_ranks

POLL_SECONDS = 20.0
STALL_SECONDS = 60.0


@dataclass
class _Sight:
    """A rank's samples with the same frames."""

    first: StackSample  # the first of them
    since: float  # when it was taken
    last: StackSample  # the last of them

    def waiting(self, now: float) -> bool:
        """Does the rank wait for others?"""
        return is_waiting(self.first, self.last, now - self.since)


class Stalls:
    """Watches the ranks of one machine while they run.

    Args:
        error_files: of each rank of this machine.
        alone: is there no other rank to wait for?
    """

    def __init__(self, error_files: Mapping[int, str], alone: bool) -> None:
        self._error_files, self._alone = error_files, alone
        self._polled = time.monotonic()
        self._seen: dict[int, _Sight] = {}
        self._next = STALL_SECONDS  # after how long without progress the next message is due

    def poll(self, pids: Mapping[int, int]) -> None:
        """Print a message if one is due. pids: the process of each rank of this machine that still runs."""
        now = time.monotonic()
        if self._alone or now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        found = sample_stacks(self._error_files, pids)
        self._seen = {rank: self._follow(self._seen.get(rank), stand, now) for rank, stand in found.items()}
        still = {rank: now - sight.since for rank, sight in self._seen.items()}
        waiting = [rank for rank, sight in self._seen.items() if still[rank] >= STALL_SECONDS and sight.waiting(now)]
        none_moves = len(found) == len(pids) and min(still.values(), default=0.0) >= 2 * STALL_SECONDS
        if not waiting and not none_moves:
            self._next = STALL_SECONDS
            return
        longest = max(still[rank] for rank in waiting or still)
        if longest >= self._next:
            self._next = 2 * longest
            say(self._story(waiting, longest, now))

    @staticmethod
    def _follow(before: _Sight | None, stand: StackSample, now: float) -> _Sight:
        """`before` with a new sample, or a new _Sight where the frames have changed."""
        if before is None or before.last.frames != stand.frames:
            return _Sight(stand, now, stand)
        return _Sight(before.first, before.since, stand)

    def _story(self, waiting: list[int], seconds: float, now: float) -> str:
        if not waiting:
            lines = [f"paceline: no rank of this machine has moved for {seconds:.0f} s."]
        else:
            has = "has" if len(waiting) == 1 else "have"
            lines = [f"paceline: {name_ranks(waiting)} {has} waited for other ranks for {seconds:.0f} s."]
        for rank, sight in sorted(self._seen.items()):
            what = "waits" if sight.waiting(now) else "is"
            lines.append(f"  rank {rank} {what} at {sight.last}")
        away = [rank for rank in self._seen if rank not in waiting]
        if away and waiting:
            lines.append(f"  {name_ranks(away)} {'has' if len(away) == 1 else 'have'} not come to it.")
        if waiting and len({str(sight.last) for sight in self._seen.values()}) > 1:
            lines.append(
                "  Every rank must make the same calls in the same order: is one of these made on some ranks only (if "
                "run.main: run.save(...)), or has one rank more steps than another? If a rank is only slow, wait."
            )
        return "\n".join(lines) + "\n"
