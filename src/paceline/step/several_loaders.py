"""Several training loaders in one loop: does each loss belong to the batch of one of them?

A backward call has one weight: the share of its loader's batch in the global batch. A loss that is computed from the
batches of two loaders is weighted right only where their shares are equal at every step, on any number of processes.
Elsewhere it is refused:

1. At the backward call, a loss that is a sum of parts, each from a forward of its own (loss_parts.py).
2. At an update, a loader whose batches have no backward call of their own. Then a loss may have been computed from two
   batches in one forward, as by model(torch.cat([a, b])). An update that a script makes for each loader in turn finds
   the other's batch unused too, so that the loader is refused when its next batch is unused as well, or at its end.
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

    yields: of each training loader that was iterated. The stepper adds to it.
    """

    def __init__(self, yields: Mapping[Loader, Yields]) -> None:
        self._yields = yields
        # Of each loader whose batch was unused at the last update: the yield, and the loaders that the update was of.
        self._unused: dict[Loader, tuple[Yield, list[str]]] = {}

    def check_loss(self, call: str, one: Yield, losses: Iterable[Tensor]) -> None:
        """Raises UsageError if the sum of these losses, of this yield, may have parts of another loader's batch that
        would need another weight."""
        others = [
            loader.name
            for loader, latest in self._current(one.loader)
            if not (latest.calls and latest.stepped) and not _same_share(one, latest)
        ]
        if others and (parts := separate_parts(losses)) > 1:
            raise UsageError(sum_over_loaders(call, [one.loader.name, *others], parts))

    def check_update(self, opened: Sequence[Yield]) -> None:
        """An update is made from the gradients of these yields. Raises UsageError if another loader's batches go
        unused."""
        used = {one.loader for one in opened}
        for loader, latest in self._current(None):
            before = self._unused.pop(loader, None)
            if loader in used or latest.calls or all(_same_share(one, latest) for one in opened):
                continue
            if before is not None and before[0] is not latest:
                self._refuse(loader, before)
            self._unused[loader] = latest, [one.loader.name for one in opened]

    def check_end(self, loader: Loader | None = None) -> None:
        """A pass of this loader (None: an epoch) has ended. Raises UsageError if its last batch has gone unused."""
        for ended in [loader] if loader is not None else list(self._unused):
            before = self._unused.pop(ended, None)
            if before is not None:
                self._refuse(ended, before)

    def _refuse(self, loader: Loader, unused: tuple[Yield, list[str]]) -> None:
        latest, used = unused
        if not latest.calls:
            raise UsageError(unused_batches(loader.name, used))

    def _current(self, but: Loader | None) -> list[tuple[Loader, Yield]]:
        """The latest yield of each loader that is being iterated, without this one."""
        return [
            (loader, latest)
            for loader, yields in self._yields.items()
            if loader is not but and loader.current is not None and (latest := yields.latest) is not None
        ]


def _same_share(one: Yield, other: Yield) -> bool:
    """Whether every process has as many examples of both yields, now and at later steps, on any number of processes.

    Global batches of one size are cut alike. An epoch's last one may be short: those of both loaders are where both
    have as many examples, else neither may be.
    """
    a, b = one.request, other.request
    if (a.total, a.micro_batches, a.micro) != (b.total, b.micro_batches, b.micro):
        return False
    return one.loader.same_sizes(other.loader)
