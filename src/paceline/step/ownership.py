"""Ownership: which yield of which training loader a loss belongs to, and which global batches are open.

A global batch is open from its first backward call until an update, or until the script clears its gradients. Several
loaders may have an open global batch at once; one update then uses the gradients of all of them.

`on_yield`, `owner` and `register` run in every step. The common case (one loader, nothing prefetched) takes their first
branch. If the script has fetched a batch ahead, yields.py finds the yield of a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from paceline.data.loader import Loader
from paceline.errors import UsageError, warn
from paceline.step.accounts import Accounts
from paceline.step.messages import (
    MANUAL_UPDATES_OF_REPLICAS,
    never_stepped,
    out_of_turn,
    outside_a_loop,
    several_loaders,
    unstepped,
)
from paceline.step.several_loaders import SeveralLoaders
from paceline.step.yields import MOST_ENTRIES, Yield, Yields
from paceline.strategies.base import Strategy
from paceline.torch_private.core import next_node, node_number


class Ownership:
    """The training loaders of a run, their yields, and the open global batches.

    Attributes:
        loaders: the training loaders, in the order of their first iteration.
        open: for each loader with an open global batch, its last yield that had a backward call.
        calls: the number of backward calls so far in this micro-batch.
        new_update: whether, since the step last checked, a global batch began that shares no update with an earlier
            global batch.
        new_gradients: whether, since the step last checked, a global batch began with gradients that start from zero.
        deferred: whether a batch was ever fetched before the script was done with the previous batch.
        prefetched: whether a backward call or an update ever came after such a fetch.
        manual_updates: the number of global batches that the script has ended by clearing gradients, without run.step.
        several: the checks of loops over several training loaders.
        node_after_backward: the number of autograd's next node, as of the end of the last backward call.
        optimizers: the number of prepared optimizers.
    """

    def __init__(self, strategy: Strategy, accounts: Accounts) -> None:
        self._strategy, self._accounts = strategy, accounts
        self.loaders: list[Loader] = []
        self._yields: dict[Loader, Yields] = {}
        self.open: dict[Loader, Yield] = {}
        self.calls = 0
        self._called: set[Loader] = set()  # loaders with a backward call since `calls` was 0
        self._first_node: int | None = None  # the number of autograd's next node at the first yield
        self.node_after_backward = 0
        self.deferred = self.prefetched = False
        self._count = 0  # the number of yields of all training loaders
        self.new_update = self.new_gradients = False
        self.manual_updates = 0
        self.several = SeveralLoaders(self._yields)
        self.optimizers = 0

    # --- a loader yields

    def on_yield(self, loader: Loader) -> None:
        """Start a micro-batch when a training loader yields. The first micro-batch also starts a global batch.

        Raises UsageError if the gradients of the loader's last global batch were neither used nor cleared.
        """
        request, number = loader.current, next_node()
        assert request is not None
        yields = self._yields.get(loader)
        if yields is None:
            self.loaders.append(loader)
            yields = self._yields[loader] = Yields()
            if self._first_node is None:
                self._first_node = self.node_after_backward = number
        before = yields.active
        presented = loader.presented
        flat = type(presented) in (list, tuple) and {*map(type, presented)} == {Tensor}  # true for most batches
        if flat and before is not None and not yields.pending:
            before.batch = list(map(weakref.ref, presented[:MOST_ENTRIES]))
            yields.end_node = yields.certain = None
        else:
            yields.remember_batch(presented)
        quiet = number == self.node_after_backward
        one = Yield(loader, request, loader.key, self._count, number, not quiet or self.optimizers > 1)
        self._count += 1
        # Has the script made all calls that belong before the next fetch? (an inlined Yield.done)
        done = before is None or (before.calls and (before.stepped or before.discarded or not before.request.final))
        if quiet and done and not yields.pending:
            self._begin_micro_batch(yields, one)
        else:
            self.deferred = True
            yields.defer(one)

    def on_end(self, loader: Loader, whole: bool) -> None:
        """End a pass over a training loader. whole: the loader was read to its end."""
        if loader in self._yields:
            self._yields[loader].close(loader, whole)
            loader.presented = None
        if whole:
            self.several.check_end(loader)

    def _begin_micro_batch(self, yields: Yields, one: Yield) -> None:
        """Make this yield the active yield: the next backward calls belong to it."""
        loader, request = one.loader, one.request
        yields.previous, yields.active = yields.active, one
        if yields.pending:  # the script has skipped the pending yields before this yield
            yields.pending = yields.pending[yields.pending.index(one) + 1 :]
        yields.certain = None if one.ambiguous or yields.pending else one
        self.prefetched = self.prefetched or bool(yields.pending)
        if request.micro == 0:
            last = self.open.get(loader)
            if last is not None and not last.stepped and self._left_unused(last):
                raise UsageError(unstepped(loader.name, last.request.step, last.request.epoch))
            others = {} if len(self.loaders) == 1 else self._joined(one)
            self.open = others
            if not others:  # otherwise the losses of several loaders share the update
                self.calls, self._called, self.new_update = 0, set(), True
            if all(other.request.final for other in others.values()):
                self.new_gradients = True
                if self._accounts.unfinished:  # drop now, before the script clears gradients that earlier updates left
                    self._accounts.drop_unreduced()
            # Otherwise another loader's micro-batch of the same update has already had its backward.
            return
        if loader in self._called:
            self.calls, self._called = 0, set()
        if loader in self.open:
            self.open[loader] = one

    def _joined(self, one: Yield) -> dict[Loader, Yield]:
        """The open global batches of other loaders that will share an update with the global batch of this yield."""
        found: dict[Loader, Yield] = {}
        for other, last in self.open.items():
            if other is one.loader or other.current is None:
                continue
            if not last.request.final and last.count_at_call <= one.index:  # its backward came before this yield
                raise UsageError(out_of_turn(one.loader.name, other.name, last.request.micro, last.request.micros))
            if not last.stepped:
                found[other] = last
        return found

    # --- a loss

    def owner(self, root: Any, of: Loader | None) -> Yield:
        """The yield that this loss was computed from. Raises UsageError if there is none.

        root: the loss, a scalar. of: the loader, if the script names it.
        """
        only = self.loaders[0] if len(self.loaders) == 1 else None
        if of is None and only is not None and only.current is not None:  # the common case of `yields_of`
            yields = self._yields[only]
        else:
            yields = self.yields_of(of, "backward")
        one = yields.certain
        node = root.grad_fn if isinstance(root, Tensor) else None
        if one is not None and node is not None and node_number(node) >= one.first_node:
            return one
        return yields.find_by_loss(root, self._first_node or 0) if isinstance(root, Tensor) else yields.newest()

    def owner_of_batch(self, batch: Any, of: Loader | None) -> Yield:
        """The yield of a batch that the script passes to a closure. Raises UsageError as `owner` does."""
        return self.yields_of(of, "forward_backward").find_by_batch(batch)

    def register(self, one: Yield) -> int:
        """Count a backward call of this yield. Returns the call's number in its micro-batch."""
        yields = self._yields[one.loader]
        if one is not yields.active:
            self._begin_micro_batch(yields, one)
        if yields.pending:
            self.prefetched = True
        one.calls += 1
        one.count_at_call = self._count
        one.after_end = one.loader.current is None
        self.open[one.loader] = one
        self._called.add(one.loader)
        self.calls += 1
        return self.calls - 1

    def restart(self) -> None:
        """Start the open global batch again, for another evaluation of its loss."""
        self.calls, self._called = 0, set()

    def yields_of(self, of: Loader | None, call: str) -> Yields:
        """The yields of the loader that the script names, or of the only loader that it iterates.

        Raises UsageError if there is no such loader. call: the method of the run, for the message.
        """
        if of is None and len(self.loaders) == 1 and self.loaders[0].current is not None:
            return self._yields[self.loaders[0]]
        if of is not None:
            if not of.train or of not in self._yields or not self._active(of):
                raise UsageError(
                    f"run.{call}(of=...): this is not a training loader, or no loop over it is running. Pass the "
                    "training loader of the current loop."
                )
            return self._yields[of]
        active = [loader for loader in self.loaders if loader.current is not None]
        active = active or [loader for loader in self.loaders if self._active(loader)]
        if not active:
            raise UsageError(outside_a_loop(call))
        if len(active) > 1:
            raise UsageError(several_loaders(call, [loader.name for loader in active]))
        return self._yields[active[0]]

    def _active(self, loader: Loader) -> bool:
        """Whether the script is iterating over this loader, or has read its last yield but not yet finished it."""
        return loader.current is not None or self._yields[loader].unfinished

    def ahead(self, one: Yield) -> bool:
        """Whether the script has fetched a later batch, or reached the end of the data."""
        yields = self._yields[one.loader]
        return bool(yields.pending) or yields.end_node is not None

    # --- an update

    def opened(self) -> list[Yield]:
        """For each global batch that an update would now use: its last yield with a backward."""
        return [
            one
            for loader, one in self.open.items()
            if loader.current is not None or self._yields[loader].end_node is not None
        ]

    def step_for_previous(self, opened: Iterable[Yield]) -> bool:
        """Whether this call of run.step belongs to the micro-batch before the prefetched micro-batch."""
        before = [previous for one in opened if (previous := self._yields[one.loader].previous) is not None]
        late = [one for one in before if one.calls and not one.step_called and not one.request.final]
        for one in late:
            one.step_called = True
        return bool(late)

    def fetched_ahead(self, loader: Loader | None = None) -> bool:
        """Whether the script has fetched a batch beyond the open global batch of this loader (None: of any loader)."""
        if loader is not None:
            return bool(self._yields[loader].pending)
        return any(self._yields[one].pending for one in self.open)

    def latest(self) -> list[Yield]:
        """The latest yield of each training loader that the script is iterating."""
        found = [self._yields[loader].latest for loader in self.loaders if loader.current is not None]
        return [one for one in found if one is not None]

    # --- gradients that nothing has used

    def _left_unused(self, last: Yield) -> bool:
        """Whether the global batch of this yield is complete, but its gradients were neither used nor cleared.

        If the script has cleared them, the global batch counts as updated by the script.
        """
        if last.stepped or last.discarded or not last.calls or not last.request.final:
            return False
        if self._strategy.store.any_left():
            return True
        if not self.optimizers and self._strategy.mesh.independent:
            raise UsageError(MANUAL_UPDATES_OF_REPLICAS)
        last.stepped = True
        last.loader.mark_stepped(last.request)
        self.manual_updates += 1
        return False

    def count_manual_updates(self) -> int:
        """The number of global batches that the script has ended by clearing gradients, without run.step."""
        for last in self.open.values():
            self._left_unused(last)
        return self.manual_updates

    def warn_unstepped(self) -> None:
        """Warn about gradients that were never used. Called when the script has left its loops."""
        for last in self.open.values():
            if not last.warned and self._left_unused(last):
                last.warned = True
                warn(never_stepped(last.loader.name))

    def between_epochs(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the epoch numbers. After each epoch, warn about gradients that were never used."""
        for number in numbers:
            yield number
            self.several.check_end()
            self.warn_unstepped()

    @property
    def incomplete(self) -> bool:
        """Whether a global batch has gradients but no update yet, or a yield has had a forward but no backward."""
        self.count_manual_updates()
        return any(
            not one.stepped and (loader.current is not None or one.after_end) for loader, one in self.open.items()
        ) or any(yields.has_unused_forward for yields in self._yields.values())
