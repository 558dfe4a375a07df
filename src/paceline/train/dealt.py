"""Parts of global batches that are handed out to processes as they come free (`Layout.dealer`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.strategies.base import Dealer, Layout
from paceline.train.fetch import Fetched
from paceline.train.order import Request, cut, requests


class Parts:
    """A process's share of a pass over the data. name, epoch: of the pass. batches: all its global batches, each cut
    into `cuts` parts, of which every one is then a global batch of its own."""

    def __init__(
        self, dealer: Dealer, name: str, epoch: int, batches: Sequence[Sequence[int]], cuts: int, micro: int | None
    ) -> None:
        self._dealer, self._name, self._epoch = dealer, name, epoch
        self._batches, self._cuts, self._micro_batch = batches, cuts, micro

    def fetch(self, start: int, fetched: Callable[[Iterator[Request]], Iterable[Fetched]]) -> Iterator[Fetched]:
        """The batches of the parts that are handed to this process, as `fetched` makes them of requests. Where there
        are none it waits, until one is given back or all have been computed; what torch's loader has fetched ahead is
        computed first."""
        dealer, name, epoch, whole = self._dealer, self._name, self._epoch, False
        dealer.begin(name, epoch, start, len(self._batches))
        try:
            while (part := dealer.take(name, epoch, wait=True)) is not None:
                for request, batch in fetched(self._requests(part)):
                    mine = (request.step, request.parts[0].shard)
                    if request.micro == 0:
                        dealer.enter(name, epoch, mine)
                    yield request, batch
                    if request.final:
                        dealer.done(name, epoch, mine)
            whole = True
        finally:
            if not whole:
                dealer.leave(name, epoch)

    def _requests(self, part: tuple[int, int] | None) -> Iterator[Request]:
        """Of this part, and of further ones while there are some."""
        alone = Layout(1, (0,))
        while part is not None:
            step, shard = part
            batch = self._batches[step]
            low, high = cut(len(batch), self._cuts, shard)
            if low == high:
                self._dealer.done(self._name, self._epoch, part, empty=True)
            else:
                for request in requests(batch[low:high], self._epoch, step, alone, self._micro_batch):
                    yield request._replace(parts=tuple(own._replace(shard=shard) for own in request.parts))
            part = self._dealer.take(self._name, self._epoch, wait=False)
