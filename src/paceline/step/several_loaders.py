"""Check a loop over several training loaders: does each loss belong to one loader's batch?

A backward call has one weight: its batch's share of the loader's global batch. A loss that is computed from the batches
of two loaders gets the right weight only if the two shares are equal at every step, on any number of processes.
Otherwise the run refuses:

1. At the backward call: a loss that is a sum of parts from separate forwards (loss_parts.py).
2. At an update: a loader with batches that get no backward call. A loss may have been computed from two batches in one
   forward, as by model(torch.cat([a, b])). But a script that makes one update per loader in turn also leaves the other
   loader's batch unused at each update. So the error is raised only if the loader's next batch is unused too, or at the
   end of the loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.step.loss_parts import separate_parts
from paceline.step.messages import sum_over_loaders, unused_batches
from paceline.step.yields import Yield, Yields


class SeveralLoaders:
    """Checks the losses and updates of a loop over several training loaders.

    yields: the yields of each training loader that was iterated. Ownership adds loaders to this dict.
    """

    def __init__(self, yields: Mapping[Loader, Yields]) -> None:
        self._yields = yields
        # For each loader with an unused batch at the last update: its yield, and the names of the update's loaders.
        self._unused: dict[Loader, tuple[Yield, list[str]]] = {}

    def check_loss(self, call: str, one: Yield, losses: Iterable[Tensor]) -> None:
        """Raises UsageError if the sum of these losses may include another loader's batch with a different weight.

        one: the yield that the losses belong to.
        """
        others = [
            loader.name
            for loader, latest in self._current(one.loader)
            if not (latest.calls and latest.stepped) and not _same_share(one, latest)
        ]
        if others and (parts := separate_parts(losses)) > 1:
            raise UsageError(sum_over_loaders(call, [one.loader.name, *others], parts))

    def check_update(self, opened: Sequence[Yield]) -> None:
        """Check an update from the gradients of these yields.

        Raises UsageError if another loader's batches are unused.
        """
        used = {one.loader for one in opened}
        for loader, latest in self._current(None):
            before = self._unused.pop(loader, None)
            if loader in used or latest.calls or all(_same_share(one, latest) for one in opened):
                continue
            if before is not None and before[0] is not latest:
                self._refuse(loader, before)
            self._unused[loader] = latest, [one.loader.name for one in opened]

    def check_end(self, loader: Loader | None = None) -> None:
        """Raises UsageError if this loader's last batch is unused at the end of its pass.

        None: check all loaders, at the end of an epoch.
        """
        for ended in [loader] if loader is not None else list(self._unused):
            before = self._unused.pop(ended, None)
            if before is not None:
                self._refuse(ended, before)

    def _refuse(self, loader: Loader, unused: tuple[Yield, list[str]]) -> None:
        latest, used = unused
        if not latest.calls:
            raise UsageError(unused_batches(loader.name, used))

    def _current(self, but: Loader | None) -> list[tuple[Loader, Yield]]:
        """The latest yield of each loader that is being iterated, except the loader `but`."""
        return [
            (loader, latest)
            for loader, yields in self._yields.items()
            if loader is not but and loader.current is not None and (latest := yields.latest) is not None
        ]


def _same_share(one: Yield, other: Yield) -> bool:
    """Whether each process gets equally many examples from both loaders, at every step and on any number of processes.

    Global batches of equal size are sharded the same way. `same_sizes` covers the short last global batch of an epoch.
    """
    a, b = one.request, other.request
    if (a.total, a.micro_batches, a.micro) != (b.total, b.micro_batches, b.micro):
        return False
    return one.loader.same_sizes(other.loader)
