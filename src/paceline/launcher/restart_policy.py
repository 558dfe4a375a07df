"""The restart policy: whether ranks restart after a failure, and how many. Pure.

`--max-restarts` is one budget for the run. At every rendezvous, the machines agree on the number of used restarts.
Between rendezvous, each machine decides alone, from facts that all machines know. So the machines make the same
decisions, and none waits for a machine that has ended.

With `--nproc MIN:MAX`, a machine starts with MAX processes. A start fails if some of its ranks die before any has
started a batch, while others survive: a device is broken, or there is too little memory for all ranks. The number of
dead ranks is subtracted for the next start, which has at least MIN ranks. After a start that has made progress, the
next start has MAX ranks again. No start has more ranks than there are devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Restarts:
    """The state of the policy in one machine's launcher.

    Attributes:
        most: the run's budget of restarts (--max-restarts).
        fewest, full: minimum and maximum number of processes on this machine (--nproc MIN:MAX). With --nproc N, both
            are N.
        ranks: the number of processes of the current start, or of the next start.
        used: the number of restarts used before the last rendezvous, plus 1 if a failure since then used another.
        starts: the number of times that all ranks have been started.
    """

    most: int
    fewest: int
    full: int
    ranks: int
    used: int = 0
    starts: int = 0

    @property
    def left(self) -> int:
        """The number of unused restarts."""
        return max(self.most - self.used, 0)

    def met(self, starts: int, used: int) -> Restarts:
        """Update after a rendezvous, when all ranks start.

        Args:
            starts, used: the maximum over all machines, before this start.
        """
        return replace(self, starts=starts + 1, used=used)

    def counts_the_dead(self, moved: bool) -> bool:
        """Return whether the next start's number of ranks depends on how many have died.

        Args:
            moved: as in `after_failure`.
        """
        return self.left > 0 and not moved and self.fewest < self.ranks

    def after_failure(self, died: int, moved: bool, capacity: int | None) -> Restarts | None:
        """Update after a failure, when all ranks of all machines have been ended. Return None if the run ends.

        Args:
            died: the number of ranks of this machine that failed, and not because other ranks had ended.
            moved: whether a rank of this machine had started a batch.
            capacity: the number of processes that the machine has devices for; None: any number.
        """
        if not self.left:
            return None
        ranks = self.ranks
        if moved:
            ranks = self.full
        elif died < self.ranks:  # if all ranks died, fewer ranks would die too
            ranks = max(self.fewest, self.ranks - died)
        if capacity is not None and self.fewest < self.full:
            if capacity < self.fewest:
                return None
            ranks = min(ranks, capacity)
        return replace(self, used=self.used + 1, ranks=ranks)

    def after_loss_of_host(self, failed: bool) -> Restarts | None:
        """Update after the loss of the rendezvous host, before a new rendezvous. Return None if the run ends.

        Args:
            failed: whether ranks had failed before the host was lost. If so, that failure has already used a restart.
        """
        if failed:
            return self
        return replace(self, used=self.used + 1) if self.left else None
