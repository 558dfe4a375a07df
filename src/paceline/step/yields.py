"""Find the loader's yield that a loss belongs to, even if the script prefetches the next batch itself.

nanoGPT's order is forward, next batch, backward. The loss belongs to the batch of its forward, not to the latest batch.
Autograd numbers its nodes in order of creation. So the numbers in a loss's graph show between which two yields the
script computed the loss.

1. Common case: the previous yield is done. It has had its backward (and its update, if it completed the global batch),
   and autograd has made no node since. Then the new yield is activated at once, and only the number of the loss's root
   is compared.
2. Otherwise the new yield is pending, and the first loss that belongs to it activates it. The whole graph of each loss
   is then walked: it must lie between two yields.
3. If a batch is prefetched before the forward of an earlier batch, the graph does not show which batch the forward
   used. A closure receives its batch, so the batch's tensors identify the yield. The loop form is refused while a
   tensor of an earlier batch without a backward is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from torch import Tensor

from paceline.data.batch_plan import Request
from paceline.data.bundle import Bundle
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.step.messages import FETCHED_AHEAD, LOSS_OF_AN_EARLIER_YIELD, LOSS_OVER_YIELDS, outside_a_loop
from paceline.torch_private.core import next_node, node_number

MOST_ENTRIES = 16  # a batch's yield is found by comparing at most this number of entries per container in the batch


@dataclass(eq=False)
class Yield:
    """One micro-batch that a training loader has yielded. Kept until the update of its global batch."""

    loader: Loader
    request: Request
    key: int  # the key of its global batch's random streams, the same for all shards
    index: int  # the number of earlier yields of all training loaders
    first_node: int  # the number of autograd's next node at this yield
    ambiguous: bool  # an earlier yield may have an unfinished graph: walk the graph of each loss
    batch: Sequence[weakref.ref[Any]] = field(default=(), init=False)  # its tensors; filled at the next yield

    calls = 0  # the number of its backward calls
    step_called = False  # run.step was called while this was the last yield with a backward
    stepped = False  # an optimizer has used the gradients of its global batch
    discarded = False  # its backward failed, so its gradients do not count
    count_at_call = 0  # the number of yields of all training loaders at its last backward call
    warned = False  # the script was warned that its gradients were never used
    after_end = False  # its backward came after the end of the loader's pass

    @property
    def done(self) -> bool:
        """Whether the script has made all calls that belong before the next fetch."""
        return self.calls > 0 and (self.stepped or self.discarded or not self.request.final)

    @property
    def batch_alive(self) -> bool:
        """Whether the script still holds a tensor of the batch. Valid from the next yield on."""
        for ref in self.batch:  # noqa: SIM110  # in every step of some scripts: a generator takes twice as long
            if ref() is not None:
                return True
        return False


class Yields:
    """The yields of one training loader that a loss may belong to."""

    def __init__(self) -> None:
        self.previous: Yield | None = None  # the active yield before the current one
        self.active: Yield | None = None  # the yield that backward calls now belong to
        self.pending: list[Yield] = []  # later yields that no loss has activated yet
        self.end_node: int | None = None  # the number of autograd's next node when the pass was read to its end
        # The yield of every loss that is computed from now on. None: walk the graph of each loss.
        self.certain: Yield | None = None

    @property
    def latest(self) -> Yield | None:
        """The newest yield; None before the first."""
        return self.pending[-1] if self.pending else self.active

    @property
    def candidates(self) -> list[Yield]:
        """The yields that a loss may belong to, oldest first."""
        return ([] if self.active is None else [self.active]) + self.pending

    def newest(self) -> Yield:
        """The newest yield. The loader must have yielded."""
        latest = self.pending[-1] if self.pending else self.active
        assert latest is not None
        return latest

    def remember_batch(self, presented: Any) -> None:
        """Keep weak references to the tensors of the latest yield's batch. Called when another yield follows.

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
        """Make this yield pending, since the previous yield may not be done."""
        one.ambiguous, self.certain = True, None
        self.pending.append(one)

    def close(self, loader: Loader, whole: bool) -> None:
        """End the pass. whole: whether it was read to its end. If not, its yields get no more backward calls."""
        if whole:
            self.remember_batch(loader.presented)
            self.end_node = next_node()
        else:
            self.previous = self.active = self.end_node = self.certain = None
            self.pending = []

    @property
    def unfinished(self) -> bool:
        """Whether the pass was read to its end, but its last yield still lacks its backward or its update."""
        return self.end_node is not None and self.latest is not None and not self.latest.done

    @property
    def has_unused_forward(self) -> bool:
        """Whether an earlier yield has had a forward but no backward."""
        candidates = self.candidates
        return any(not one.calls and one.first_node < after.first_node for one, after in pairwise(candidates))

    def find_by_loss(self, root: Tensor, first: int) -> Yield:
        """The yield during which the graph of this scalar was computed.

        first: the number of autograd's next node at the run's first yield. Older nodes were made before the loop.
        Raises UsageError if the graph spans several yields, or belongs to a finished yield.
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
        """The yield of this batch, which the script passes to a closure. Raises UsageError as `find_by_loss` does."""
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
    """The numbers of the nodes below this node.

    Leaves out nodes older than `first` with all nodes below them, and the gradient accumulators of parameters.
    """
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
    """The tensors and bundles of a nested batch, to the given depth."""
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
