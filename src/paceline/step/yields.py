"""Find the loader's yield that a loss belongs to, also where the script prefetches the next batch by itself.

nanoGPT's order is forward, next batch, backward. The loss belongs to the batch of its forward, not to the batch that
the loader yielded last. Autograd numbers its nodes in the order in which it makes them. So the numbers in a loss's
graph tell between which two yields the script computed the loss.

1. A new yield is activated at once if nothing of the yield before it can be under way: that one has had its backward
   (and its update, if it completed the global batch), and autograd has made no node since. Nearly every step of nearly
   every script is of this kind. Only the number of the loss's root is compared then.
2. Otherwise the new yield is pending, and the first loss that belongs to it activates it. The whole graph of each loss
   is walked then: it must lie between two yields.
3. A batch that was prefetched, and whose forward comes later, leaves no trace in the graph. A closure receives the
   batch, and its tensors identify the yield. The loop form is refused while a tensor of an earlier batch is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from torch import Tensor

from paceline.data.batch_plan import Request
from paceline.data.loader import Bundle, Loader
from paceline.errors import UsageError
from paceline.step.messages import FETCHED_AHEAD, LOSS_OF_AN_EARLIER_YIELD, LOSS_OVER_YIELDS, outside_a_loop
from paceline.torch_private.core import next_node, node_number

MOST_ENTRIES = 16  # how many entries of a batch, or of a container in it, are compared to recognise the batch


@dataclass(eq=False)
class Yield:
    """One micro-batch that a training loader has yielded, until the update of its global batch."""

    loader: Loader
    request: Request
    key: int  # the key of its global batch's random streams, the same for all shards
    index: int  # how many yields all training loaders had made before it
    first_node: int  # the number of autograd's next node when the loader yielded it
    ambiguous: bool  # graphs of earlier yields may be under way: the graph of each loss is walked
    batch: Sequence[weakref.ref[Any]] = field(default=(), init=False)  # its tensors; filled when the next yield comes

    calls = 0  # how many backward calls belong to it
    step_called = False  # run.step was called while this was the last yield with a backward
    stepped = False  # an optimizer has used the gradients of its global batch
    discarded = False  # its gradients do not count: its backward failed
    count_at_call = 0  # how many yields all training loaders had made at its last backward call
    warned = False  # the script was warned that its gradients were never used
    after_end = False  # its backward came after the loader's pass had ended

    @property
    def done(self) -> bool:
        """Whether the script has made the calls that a loop makes before it fetches the next batch."""
        return self.calls > 0 and (self.stepped or self.discarded or not self.request.final)

    @property
    def batch_alive(self) -> bool:
        """Whether the script still holds a tensor of the batch. Known as soon as the next yield comes."""
        for ref in self.batch:  # noqa: SIM110  # in every step of some scripts: a generator takes twice as long
            if ref() is not None:
                return True
        return False


class Yields:
    """The yields of one training loader to which a loss may belong."""

    def __init__(self) -> None:
        self.previous: Yield | None = None  # the yield that was active before
        self.active: Yield | None = None  # the yield to which the last backward call belonged, or the next one must
        self.pending: list[Yield] = []  # later yields, which no loss has activated yet
        self.end_node: int | None = None  # the number of autograd's next node when the pass was read to its end
        # The yield that owns every loss computed since it came. None: the graph of each loss is walked.
        self.certain: Yield | None = None

    @property
    def latest(self) -> Yield | None:
        """The newest yield; None before the first."""
        return self.pending[-1] if self.pending else self.active

    @property
    def candidates(self) -> list[Yield]:
        """The yields to which a loss may belong, oldest first."""
        return ([] if self.active is None else [self.active]) + self.pending

    def newest(self) -> Yield:
        """`latest`, of a loader that has yielded."""
        latest = self.pending[-1] if self.pending else self.active
        assert latest is not None
        return latest

    def remember_batch(self, presented: Any) -> None:
        """Keep weak references to the tensors of the latest yield's batch, since another yield follows.

        presented: the batch as the loader yielded it.
        """
        last = self.pending[-1] if self.pending else self.active
        self.end_node = self.certain = None
        if last is not None and presented is not None:
            flat = type(presented) in (list, tuple) and all(type(thing) is Tensor for thing in presented)
            last.batch = [
                weakref.ref(thing) for thing in (presented[:MOST_ENTRIES] if flat else batch_leaves(presented))
            ]

    def defer(self, one: Yield) -> None:
        """Make this yield pending: the yield before it may be under way."""
        one.ambiguous, self.certain = True, None
        self.pending.append(one)

    def close(self, loader: Loader, whole: bool) -> None:
        """The pass has ended. whole: it was read to its end; else no backward call for a pending yield will come."""
        if whole:
            self.remember_batch(loader.presented)
            self.end_node = next_node()
        else:
            self.previous = self.active = self.end_node = self.certain = None
            self.pending = []

    @property
    def unfinished(self) -> bool:
        """Whether the pass was read to its end before the last yield was done."""
        return self.end_node is not None and self.latest is not None and not self.latest.done

    @property
    def has_unused_forward(self) -> bool:
        """Whether a yield that another one has followed has had a forward but no backward."""
        candidates = self.candidates
        return any(not one.calls and one.first_node < after.first_node for one, after in pairwise(candidates))

    def find_by_loss(self, root: Tensor, first: int) -> Yield:
        """The yield in which the graph of this scalar was computed.

        first: the number of autograd's next node when the run's first yield came. Older nodes were made before the
        loop. Raises UsageError if the graph spans several yields, or belongs to one whose turn is over.
        """
        latest, node = self.newest(), root.grad_fn
        number = latest.first_node if node is None else node_number(node)
        if latest is self.certain and number >= latest.first_node:
            return latest
        if self.end_node is not None and number >= self.end_node:
            raise UsageError(outside_a_loop("backward"))
        candidates = self.candidates
        found = next((one for one in reversed(candidates) if one.first_node <= number), None)
        if found is None:
            if number < first:
                return latest
            raise UsageError(LOSS_OF_AN_EARLIER_YIELD)
        if node is not None and any(first <= number < found.first_node for number in _node_numbers(node, first)):
            raise UsageError(LOSS_OVER_YIELDS)
        self._refuse_prefetch(found)
        return found

    def find_by_batch(self, batch: Any) -> Yield:
        """The yield that presented this batch, which the script passes to a closure. Raises UsageError as above."""
        latest = self.newest()
        presented, over = latest.loader.presented, self.previous
        if (
            latest is self.active
            and self.end_node is None
            and (batch is presented or over is None or not over.batch_alive)
        ):
            return latest
        before = self.candidates if self.end_node is not None else self.candidates[:-1]
        older = [one for one in (self.previous, *before) if one is not None and one.batch_alive]
        if self.end_node is None and (not older or batch is presented):
            return latest
        given = {id(thing) for thing in batch_leaves(batch)}
        if any(id(thing) in given for thing in batch_leaves(presented)):
            return latest
        for one in reversed(older):
            if any(id(ref()) in given for ref in one.batch if ref() is not None):
                if one is self.previous:
                    raise UsageError(LOSS_OF_AN_EARLIER_YIELD)
                return one
        if self.end_node is not None:
            raise UsageError(outside_a_loop("forward_backward"))
        self._refuse_prefetch(latest)
        return latest

    def _refuse_prefetch(self, found: Yield) -> None:
        for one in self.candidates:
            if one is found:
                return
            if not one.calls and one.batch_alive:
                raise UsageError(FETCHED_AHEAD)


def _node_numbers(root: Any, first: int) -> Iterator[int]:
    """The numbers of the nodes below this one. Nodes below a node older than `first` are left out, as are parameters'
    accumulators."""
    seen, stack = {root}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                number = node_number(node)
                if number >= first:
                    yield number
                    stack.append(node)


def batch_leaves(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors of a batch of any nesting, to the given depth, and the bundles in it."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in islice(batch.values(), MOST_ENTRIES) if depth else ():
            yield from batch_leaves(value, depth - 1)
    elif isinstance(batch, (list, tuple)):
        for value in batch[:MOST_ENTRIES] if depth else ():
            yield from batch_leaves(value, depth - 1)
    elif isinstance(batch, Bundle):
        yield batch
    elif depth and hasattr(batch, "__dict__"):
        for value in islice(vars(batch).values(), MOST_ENTRIES):
            yield from batch_leaves(value, depth - 1)
