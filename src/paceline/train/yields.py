"""Which yield of a loader a loss belongs to: a script may fetch its next batch before it is done with the last one.

nanoGPT's order is forward, next batch, backward. A loss is then weighed by the batch of its forward, not by the one
that the loader yielded last. Autograd numbers its nodes in the order in which they are made, so the numbers of a loss's
graph say between which yields it was computed.

1. A yield is entered at once where nothing of the one before it can be under way: it has had its backward (and its
   update, where it completed the global batch), and autograd has made no node since. That is nearly every step of
   nearly every script. The number of a loss's root is then compared, and nothing else.
2. Otherwise it waits, and is entered by the first loss that belongs to it. Then the whole graph of each loss is looked
   at: it must lie between two yields.
3. A batch that was fetched ahead and whose forward comes later leaves no trace in graphs. It is known by its tensors
   where a closure is given it; in the loop form it is refused while a tensor of an earlier batch is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.strategies.batch_plan import Request
from paceline.torch_private.core import next_node, node_number
from paceline.train.loader import Bundle, Loader
from paceline.train.messages import FETCHED_AHEAD, LOSS_OF_AN_EARLIER_YIELD, LOSS_OVER_YIELDS, outside_a_loop

MOST = 16  # entries of a batch, or of what is in it, that are looked at to know it again


class Yield:
    """One yield of a training loader, from its coming to the update of its global batch."""

    calls = 0  # backward calls that were made for it
    asked = False  # whether run.step was called when it was the last that had a backward
    stepped = False  # whether an optimizer has acted on its global batch
    forgotten = False  # whether its gradients are none: its backward failed, or a replica was lost and it comes anew
    called_at = 0  # how many yields of training loaders had come at its last backward call
    batch: Sequence[weakref.ref[Any]] = ()  # its tensors, noted when the next yield comes
    told = False  # whether the script was warned that its gradients are left
    late = False  # whether its backward came after its loader's pass had ended

    def __init__(self, loader: Loader, request: Request, key: int, came: int, since: int, unsure: bool) -> None:
        self.loader, self.request = loader, request
        self.came = came  # how many yields of training loaders had come before it
        self.key = key  # of its global batch's random streams, the same for all shards
        self.since = since  # the number of autograd's next node when it came
        self.unsure = unsure  # whether graphs of earlier yields may still be under way: losses are looked at

    @property
    def through(self) -> bool:
        """Whether the script has done with it what a loop does before it fetches the next batch."""
        return self.calls > 0 and (self.stepped or self.forgotten or not self.request.final)

    @property
    def alive(self) -> bool:
        """Whether the script still has a tensor of its batch, when a later yield has come."""
        for ref in self.batch:  # noqa: SIM110  # in every step of some scripts: a generator takes twice as long
            if ref() is not None:
                return True
        return False


class Yields:
    """Those of one training loader to which a loss may belong: the one that was entered last, and those that wait."""

    def __init__(self) -> None:
        self.over: Yield | None = None  # the one that was entered before the last
        self.entered: Yield | None = None
        self.waiting: list[Yield] = []
        self.ended: int | None = None  # the number of autograd's next node when the pass had been read to its end
        # The one to which every loss belongs that was computed since it came. None: losses are looked at.
        self.sure: Yield | None = None

    @property
    def latest(self) -> Yield | None:
        return self.waiting[-1] if self.waiting else self.entered

    @property
    def known(self) -> list[Yield]:
        return ([] if self.entered is None else [self.entered]) + self.waiting

    def at_hand(self) -> Yield:
        """The latest, of a loader that has yielded."""
        latest = self.waiting[-1] if self.waiting else self.entered
        assert latest is not None
        return latest

    def supersede(self, presented: Any) -> None:
        """Another yield comes: of this one's batch only its tensors are remembered, as long as the script has them."""
        last, self.ended, self.sure = self.latest, None, None
        if last is not None and presented is not None:
            flat = type(presented) in (list, tuple) and all(type(thing) is Tensor for thing in presented)
            last.batch = [weakref.ref(thing) for thing in (presented[:MOST] if flat else things_in(presented))]

    def enter(self, one: Yield) -> None:
        """A backward call belongs to it, or can belong to no other; what waited before it was left out."""
        self.over, self.entered = self.entered, one
        if self.waiting:
            self.waiting = self.waiting[self.waiting.index(one) + 1 :]
        self.sure = None if one.unsure or self.waiting else one

    def wait(self, one: Yield) -> None:
        """It may have come while the one before it is under way: the first loss that belongs to it enters it."""
        one.unsure, self.sure = True, None
        self.waiting.append(one)

    def close(self, loader: Loader, whole: bool) -> None:
        """The pass has ended. Where it was left before its end, what waits is not coming."""
        if whole:
            self.supersede(loader.presented)
            self.ended = next_node()
        else:
            self.over = self.entered = self.ended = self.sure = None
            self.waiting = []

    @property
    def unfinished(self) -> bool:
        """Whether the pass was read to its end before the script was through with its last yield."""
        return self.ended is not None and self.latest is not None and not self.latest.through

    @property
    def computed(self) -> bool:
        """Whether something was computed of a yield that another one has followed, and that has had no backward."""
        known = self.known
        return any(not one.calls and one.since < after.since for one, after in pairwise(known))

    def of_loss(self, root: Tensor, first: int) -> Yield:
        """The yield to which the graph of this scalar belongs. first: the number of autograd's next node when the first
        yield of the run came; what is older was there before the loop. Raises UsageError where it is not one yield."""
        latest, node = self.at_hand(), root.grad_fn
        number = latest.since if node is None else node_number(node)
        if latest is self.sure and number >= latest.since:
            return latest
        if self.ended is not None and number >= self.ended:
            raise UsageError(outside_a_loop("backward"))
        known = self.known
        found = next((one for one in reversed(known) if one.since <= number), None)
        if found is None:
            if number < first:
                return latest
            raise UsageError(LOSS_OF_AN_EARLIER_YIELD)
        if node is not None and any(first <= number < found.since for number in _numbers(node, first)):
            raise UsageError(LOSS_OVER_YIELDS)
        self._refuse_ahead(found)
        return found

    def of_batch(self, batch: Any) -> Yield:
        """The yield to which the batch belongs that a closure is given."""
        latest = self.at_hand()
        presented, over = latest.loader.presented, self.over
        if latest is self.entered and self.ended is None and (batch is presented or over is None or not over.alive):
            return latest
        before = self.known if self.ended is not None else self.known[:-1]
        older = [one for one in (self.over, *before) if one is not None and one.alive]
        if self.ended is None and (not older or batch is presented):
            return latest
        given = {id(thing) for thing in things_in(batch)}
        if any(id(thing) in given for thing in things_in(presented)):
            return latest
        for one in reversed(older):
            if any(id(ref()) in given for ref in one.batch if ref() is not None):
                if one is self.over:
                    raise UsageError(LOSS_OF_AN_EARLIER_YIELD)
                return one
        if self.ended is not None:
            raise UsageError(outside_a_loop("forward_backward"))
        self._refuse_ahead(latest)
        return latest

    def _refuse_ahead(self, found: Yield) -> None:
        for one in self.known:
            if one is found:
                return
            if not one.calls and one.alive:
                raise UsageError(FETCHED_AHEAD)


def _numbers(root: Any, first: int) -> Iterator[int]:
    """The numbers of the nodes under this one, but for those of parameters, and those that are below older ones."""
    seen, stack = {root}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                number = node_number(node)
                if number >= first:
                    yield number
                    stack.append(node)


def things_in(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors of a batch, of any nesting; of what has none in its entries or attributes, itself."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in islice(batch.values(), MOST) if depth else ():
            yield from things_in(value, depth - 1)
    elif isinstance(batch, (list, tuple)):
        for value in batch[:MOST] if depth else ():
            yield from things_in(value, depth - 1)
    elif isinstance(batch, Bundle):
        yield batch
    elif depth and hasattr(batch, "__dict__"):
        for value in islice(vars(batch).values(), MOST):
            yield from things_in(value, depth - 1)
