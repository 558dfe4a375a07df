"""Which ranks start again after what: a value that events change, the same on all machines that hear the same. Pure.

`--max-restarts` is one budget for the run. The machines agree on how much of it is used whenever they meet; in between
each decides by itself, from what all know, so that none waits for one that has ended.

With `--nproc MIN:MAX` a machine starts with MAX processes. A start comes to nothing where some of its ranks die before
any has taken a batch, while others live: a device is broken, or memory does not suffice for all. The next start is one
without as many as died, down to MIN. After a start that got under way the next has MAX again. None has more ranks than
there are devices then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Restarts:
    """What the launcher of one machine knows.

    Attributes:
        most: how many restarts the run has (--max-restarts).
        fewest, full: how many processes this machine may have (--nproc MIN:MAX; equal for a single number).
        ranks: how many it has, or starts with next.
        used: restarts that were taken up when the machines met, and one more where a failure has taken it since.
        starts: how often all ranks have been started.
    """

    most: int
    fewest: int
    full: int
    ranks: int
    used: int = 0
    starts: int = 0

    @property
    def left(self) -> int:
        """Restarts that are not taken up."""
        return max(self.most - self.used, 0)

    def met(self, starts: int, used: int) -> Restarts:
        """All machines have met, and their ranks start. starts, used: the most that one of them knows, without this."""
        return replace(self, starts=starts + 1, used=used)

    def counts_the_dead(self, moved: bool) -> bool:
        """Does the number of ranks in the next start follow from how many have died? moved: as in `after_failure`."""
        return self.left > 0 and not moved and self.fewest < self.ranks

    def after_failure(self, died: int, moved: bool, room: int | None) -> Restarts | None:
        """All ranks of all machines have been ended, since some have failed. None: the run ends.

        Args:
            died: ranks of this machine that failed by themselves, and not since others had gone.
            moved: had a rank of this machine taken a batch?
            room: how many processes the machine's devices suffice for; None: any number.
        """
        if not self.left:
            return None
        ranks = self.ranks
        if moved:
            ranks = self.full
        elif died < self.ranks:  # where all die, fewer would too
            ranks = max(self.fewest, self.ranks - died)
        if room is not None and self.fewest < self.full:
            if room < self.fewest:
                return None
            ranks = min(ranks, room)
        return replace(self, used=self.used + 1, ranks=ranks)

    def after_loss_of_keeper(self, failed: bool) -> Restarts | None:
        """The launcher that kept the rendezvous has gone, and all would meet again. None: the run ends.

        failed: had ranks failed before? Then that failure has taken up the restart.
        """
        if failed:
            return self
        return replace(self, used=self.used + 1) if self.left else None
