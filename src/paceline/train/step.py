"""The step: from a batch to an update, exact over micro-batches, losses, loaders and optimizers.

A loader's yield opens a micro-batch; the first of a global batch opens that too. `backward` weighs a loss by its share
of the global batch (gradients.py) and hands it to the strategy. `step` acts when every loader that took part has come
to the last micro-batch of its global batch: it checks the gradient, clips, updates, moves the schedule, and clears.

Independent replicas do all this alone: the whole is then the replica's own shard, and the
strategy is told what its gradient is a mean over. Steps and schedules are still counted alike on all ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.comm import collectives, transport
from paceline.comm.mesh import ALONE
from paceline.errors import UsageError, WorldError
from paceline.strategies.base import (
    Backward,
    ClosureStrategy,
    LoopStrategy,
    Piece,
    Strategy,
    Term,
    Weight,
    Weights,
    Work,
)
from paceline.strategies.batch_plan import Request
from paceline.strategies.replicated import check_known
from paceline.torch_private.core import next_node, node_number, version_of
from paceline.train.closure import computing, pieces_of
from paceline.train.finite import FiniteWatch
from paceline.train.gradients import Accounts
from paceline.train.guards import Guards
from paceline.train.loader import Loader
from paceline.train.loss import Seen, local_loss, losses_of, mean_term, sum_term, tell_count
from paceline.train.messages import (
    BY_HAND_APART,
    CLOSURE_NEEDED,
    CLOSURE_OF_AN_OPTIMIZER,
    FETCHED_AHEAD_AND_ELASTIC,
    LOST_BETWEEN_UPDATES,
    never_stepped,
    not_reached,
    out_of_turn,
    outside_a_loop,
    several_loaders,
    unprepared,
    unstepped,
    which_optimizer,
    without_backward,
)
from paceline.train.precision import Precision
from paceline.train.preparable import needs_closure
from paceline.train.randomness import seed_torch, tag
from paceline.train.tree_accounts import UPDATED_BETWEEN, TreeAccounts
from paceline.train.yields import Yield, Yields

_UPDATE = tag("update")


class Stepper:
    """The state of the step at hand."""

    def __init__(
        self, strategy: Strategy, precision: Precision, guards: Guards, *, device: torch.device, skip: bool
    ) -> None:
        self.strategy = strategy
        self.precision = precision
        self.guards = guards
        self.device = device
        self.skip = skip
        # It is one of the two, as its plan says.
        self._loop = cast(LoopStrategy, strategy)
        self._closure = cast(ClosureStrategy, strategy)
        self.store = store = strategy.store
        self.accounts = Accounts(store, strategy.mesh, device)
        self.names: dict[Tensor, str] = {}  # of the prepared parameters, and of the places of their gradients
        self.updates: dict[torch.optim.Optimizer, int] = {}  # made by each prepared optimizer
        self.skipped = 0  # updates that no replica made
        self.sat_out = 0  # that this replica alone did not make
        self.by_hand = 0  # global batches whose gradients the script has cleared without run.step
        self._sizes: dict[torch.optim.Optimizer, int] = {}  # parameters that were looked at
        self.losses: list[Seen] | None = None  # each backward call, while somebody watches and takes them out
        self._in_turn = None if store.sums is None else TreeAccounts(store.sums, self.accounts, store, device)
        self._passes = self.accounts.passes if self._in_turn is None else self._in_turn.passes
        self._watch = FiniteWatch(store, strategy.mesh, device)
        self._loaders: list[Loader] = []  # training loaders, in the order in which they were first iterated
        self._yields: dict[Loader, Yields] = {}  # by the same loaders
        self._open: dict[Loader, Yield] = {}  # by loader whose global batch has gradients: its last that had a backward
        self._call = 0  # the number of the next backward call in this micro-batch
        self._called: set[Loader] = set()  # loaders of which calls were made since it was 0
        self._first: int | None = None  # the number of autograd's next node when the first yield came
        self._quiet = 0  # that number after the last backward call
        self._ahead = False  # whether a yield has come before the last one was through, in this run
        self._came = 0  # yields of training loaders
        self._samples: Weight = 0.0  # that the first loss of this global batch is a mean over, on this process

    def on_yield(self, loader: Loader) -> None:
        """A training loader yields: a micro-batch, and perhaps a global batch, begins. Or one for evaluation."""
        request = loader.current
        assert request is not None
        if not loader.train:
            if request.step == request.micro == 0:
                self.synchronize()
            return
        number = next_node()
        yields = self._yields.get(loader)
        if yields is None:
            self._loaders.append(loader)
            yields = self._yields[loader] = Yields()
            if self._first is None:
                self._first = self._quiet = number
        before = yields.latest
        yields.supersede(loader.presented)
        quiet = number == self._quiet
        one = Yield(loader, request, loader.key, self._came, number, not quiet or len(self.updates) > 1)
        self._came += 1
        if not yields.waiting and quiet and (before is None or before.through):
            self._enter(yields, one)
        else:
            yields.wait(one)

    def on_end(self, loader: Loader, whole: bool) -> None:
        """A pass over a training loader has ended; whole: it was read to its end."""
        if loader in self._yields:
            self._yields[loader].close(loader, whole)
            loader.presented = None

    def _enter(self, yields: Yields, one: Yield) -> None:
        """Backward calls are from here on of this yield: a micro-batch, and perhaps a global batch, begins."""
        loader = one.loader
        yields.enter(one)
        self._ahead = self._ahead or bool(yields.waiting)
        if one.request.micro == 0:
            self._begin(one)
        else:
            if loader in self._called:
                self._call = 0
                self._called = set()
            if loader in self._open:
                self._open[loader] = one

    def _begin(self, one: Yield) -> None:
        loader = one.loader
        others: dict[Loader, Yield] = {}
        for other, last in self._open.items():
            if other is loader:
                self._check_stepped(last)
            if other is loader or other.current is None:
                continue
            if not last.request.final and last.called_at <= one.came:  # its backward was before this yield
                raise UsageError(out_of_turn(loader.name, other.name, last.request.micro, last.request.micros))
            if not last.stepped:
                others[other] = last
        self._open = others
        if not others:  # else the update will be of both loaders' losses together
            self._call = 0
            self._called = set()
            self._samples = 0.0
            self._watch.seen = []
            self.accounts.begin()
        if any(not last.request.final for last in others.values()):
            return  # another loader's micro-batch of the same update has had its backward already
        self.accounts.drop_unreduced()
        if self.precision.scaler is not None:
            self.precision.scaler.update()
            self.store.loss_scale = self.precision.scaler.scale

    def _check_stepped(self, last: Yield) -> None:
        """Another global batch of the same loader begins. Raises UsageError where the gradients of the last one are
        still there. Where the script has cleared them it is done with them."""
        if self._unused(last):
            raise UsageError(unstepped(last.loader.name, last.request.step, last.request.epoch))

    def _unused(self, last: Yield) -> bool:
        """Whether its global batch is complete, and its gradients are still there."""
        if last.stepped or last.forgotten or not last.calls or not last.request.final or last.loader.recut:
            return False
        if self.store.any_left():
            return True
        if not self.updates and self.strategy.mesh.independent:
            raise UsageError(BY_HAND_APART)
        last.stepped = True
        last.loader.mark_stepped(last.request)
        self.by_hand += 1
        return False

    def count_by_hand(self) -> int:
        """Global batches whose gradients the script has cleared without run.step."""
        for last in self._open.values():
            self._unused(last)
        return self.by_hand

    def warn_unstepped(self) -> None:
        """The script has left its loops. Warns of gradients that nothing has used."""
        for last in self._open.values():
            if not last.told and self._unused(last):
                last.told = True
                warnings.warn(never_stepped(last.loader.name), stacklevel=2)

    def between_epochs(self, numbers: Iterator[int]) -> Iterator[int]:
        """The numbers of epochs, each of which has its updates."""
        for number in numbers:
            yield number
            self.warn_unstepped()

    # --- backward

    def forward_backward(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: Any,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        of: Loader | None,
    ) -> Tensor:
        yields = self._yields_of(of, "forward_backward")
        one = yields.of_batch(batch)
        call = self._opened(yields, one)
        request = one.request
        bundled = self.strategy.plan.bundled
        pieces = pieces_of(batch, request)
        inputs = None if optimizer is None else self._inputs(optimizer)
        seeded = not bundled and not self._ahead
        compute = computing(loss_fn, self.precision, one.loader, request, call, seeded)
        self.guards.inside = True
        try:
            if bundled:
                terms = self._by_strategy(model, pieces, compute, request, call, inputs)
            else:
                own = compute(model, pieces[0], self.device)
                self._backward([own], request, call, inputs, retain_graph=False)
                terms = [[Term(term.value.detach(), term.count) for term in own]]
        except BaseException as error:
            one.forgotten = True
            self._explain(error)
            raise
        finally:
            self.guards.inside = False
        counts = [piece.count for piece in pieces]
        loss = local_loss(terms, counts, apart=self._in_turn is not None)
        self._computed(yields, request, call, terms[0][0].count, loss)
        if yields.waiting or yields.ended is not None:
            tell_count(loss, request.examples)
        if self.losses is not None:
            parts = losses_of(loss, terms, counts, self._in_turn is not None)
            self.losses += [(call, part, n, request, False, version_of(part), i) for i, part, n in parts]
        return loss

    def backward(
        self,
        loss: Tensor | None,
        total: Tensor | None,
        count: Weight | None,
        optimizer: torch.optim.Optimizer | None,
        of: Loader | None,
        retain_graph: bool,
    ) -> None:
        if self.strategy.plan.bundled:
            raise UsageError(CLOSURE_NEEDED)
        yields = self._yields_of(of, "backward")
        value = total if loss is None else loss
        one = yields.sure
        if one is None or not isinstance(value, Tensor) or (node := value.grad_fn) is None:
            one = yields.of_loss(value, self._first or 0) if isinstance(value, Tensor) else yields.at_hand()
        elif node_number(node) < one.since:
            one = yields.of_loss(value, self._first or 0)
        request = one.request
        term = mean_term(loss, count) if loss is not None else sum_term(total, count, request.examples, request.total)
        inputs = None if optimizer is None else self._inputs(optimizer)
        call = self._opened(yields, one)
        self.guards.inside = True
        try:
            self._backward([[term]], request, call, inputs, retain_graph)
        except BaseException as error:
            one.forgotten = True
            self._explain(error)
            raise
        finally:
            self.guards.inside = False
        if (yields.waiting or yields.ended is not None) and loss is not None:
            tell_count(loss, request.examples)
        value = (term.value if loss is None else loss).detach()
        self._computed(yields, request, call, term.count, value)
        if self.losses is not None:
            value = value if term.count is None else term.value.detach()
            self.losses.append((call, value, term.count, request, term.count is not None, version_of(value), 0))

    def _backward(
        self,
        terms: list[list[Term]],
        request: Request,
        call: int,
        inputs: list[Tensor] | None,
        retain_graph: bool,
    ) -> None:
        """The backward passes of one call, of the terms of one piece."""
        scaler = self.precision.scaler
        if self._in_turn is not None:
            self._check_not_updated()
        kind = call, id(inputs[0]) if inputs else None
        passes = self._passes(terms, request, call, retain_graph, 1.0 if scaler is None else scaler.scale)
        for number, ((weights,), retain) in enumerate(passes):
            losses = [term.value for term, weight in zip(terms[0], weights, strict=True) if weight is not None]
            shares = [weight for weight in weights if weight is not None]
            self._loop.backward(Backward(losses, shares, request.final, kind, number, inputs, retain))

    def _by_strategy(
        self,
        model: Any,
        pieces: Sequence[Piece],
        compute: Callable[[Any, Piece, torch.device], list[Term]],
        request: Request,
        call: int,
        inputs: list[Tensor] | None,
    ) -> list[list[Term]]:
        """The terms of each piece, where the strategy runs the closure."""
        scaler = self.precision.scaler
        if self._in_turn is not None:
            self._check_not_updated()

        def passes(terms: list[list[Term]]) -> Iterator[tuple[Weights, bool]]:
            return self._passes(terms, request, call, False, 1.0 if scaler is None else scaler.scale)

        work = Work(
            model,
            pieces,
            compute,
            passes,
            self.precision.autocast,
            request.final,
            call,
            inputs,
            request.total,
        )
        return self._closure.forward_backward(work)

    def _explain(self, error: BaseException) -> None:
        """Raises what the strategy knows better."""
        explained = self.strategy.explain(error) if isinstance(error, Exception) else None
        if explained is not None:
            raise explained from error

    def _computed(self, yields: Yields, request: Request, call: int, count: Weight | None, loss: Tensor) -> None:
        """A backward call was made, of this loss, detached: a mean over the request's examples, or a sum over `count`
        things."""
        self._quiet = next_node()
        if call == 0 and request.examples:  # nothing counts on an empty shard, whatever a loss says of it
            self._samples = self._samples + (request.examples if count is None else count)
        self._watch.seen.append((loss, request))

    def _check_not_updated(self) -> None:
        """Raises UsageError where shards that are computed one after the other would see different weights."""
        if self.strategy.plan.sequential and any(one.stepped for one in self._open.values()):
            raise UsageError(UPDATED_BETWEEN)

    def _opened(self, yields: Yields, one: Yield) -> int:
        """A backward call belongs to this yield. Returns its number in the micro-batch."""
        if one is not yields.entered:
            self._enter(yields, one)
        if yields.waiting:
            self._check_ahead()
        if self.guards.foreign:
            self.guards.refuse_foreign()
        one.calls += 1
        one.called_at = self._came
        one.late = one.loader.current is None
        self._open[one.loader] = one
        self._called.add(one.loader)
        call = self._call
        self._call += 1
        return call

    def _check_ahead(self) -> None:
        """The script has fetched ahead."""
        self._ahead = True
        if transport.channel() is not None:
            raise UsageError(FETCHED_AHEAD_AND_ELASTIC)

    def _inputs(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The only parameters that a call is to touch which names this optimizer."""
        optimizer = self.only(optimizer)
        return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    # --- step

    def step(
        self, optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any], max_grad_norm: float | None
    ) -> bool:
        optimizer = self.only(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.store.places:
            parameters = self.store.of(parameters)
        if len(parameters) != self._sizes.get(optimizer):
            self._look_at(optimizer, len(parameters))
        opened = [
            one
            for loader, one in self._open.items()
            if loader.current is not None or self._yields[loader].ended is not None
        ]
        if not opened or (self._call == 0 and not all(one.stepped for one in opened)):
            if self._came_late(opened):
                return False
            raise UsageError(without_backward(parameters))
        for one in opened:
            one.asked = True
            if not one.request.final:
                return False
        for one in opened:
            if one.loader.recut:
                self._forget(opened)
                return False
        self.store.samples = self._samples
        self.strategy.finish()
        if self.accounts.unreduced(parameters):
            raise UsageError(
                "run.step: an earlier micro-batch of this global batch made a backward call that its last one did not "
                "make, so that its gradient was never combined over the processes. Make the same backward calls in "
                "every micro-batch (a loss of zero is fine)."
            )
        graded = [p for p in parameters if p.grad is not None]
        self._check_made(parameters, graded)
        # What the update draws, and the script until the next yield, is alike on every replica: SGLD's noise,
        # stochastic rounding.
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        if self._update(optimizer, graded, max_grad_norm):
            self._come_forward(optimizer, schedulers)
        else:
            self.skipped += 1
        self._complete(parameters, opened)
        return True

    def _came_late(self, opened: Sequence[Yield]) -> bool:
        """Whether this call belongs to the micro-batch before the one that the script has fetched since."""
        before = [one for loader in (one.loader for one in opened) if (one := self._yields[loader].over) is not None]
        late = [one for one in before if one.calls and not one.asked and not one.request.final]
        for one in late:
            one.asked = True
        return bool(late)

    def _go_on(self, loader: Loader) -> None:
        """The script fetched the next batch before this update: what it draws is what it would have drawn otherwise."""
        self._check_ahead()
        if loader.current is not None:
            part = loader.current.parts[0]
            seed_torch(loader.streams.torch_key(loader.current, part.shard, part.micro), self.device)

    def fetched_ahead(self) -> bool:
        """Whether the next batch of a global batch that is open was fetched already."""
        return any(self._yields[loader].waiting for loader in self._open)

    # --- for an optimizer that evaluates the loss itself (objective.py)

    def at_hand(self) -> list[Yield]:
        """The latest yield of each training loader that is being iterated."""
        found = [self._yields[loader].latest for loader in self._loaders if loader.current is not None]
        return [one for one in found if one is not None]

    def again(self) -> None:
        """The global batch at hand is computed anew: backward calls count from 0."""
        self._call = 0
        self._called = set()
        self._watch.seen = []
        self.accounts.begin()

    def evaluated(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError or NonFiniteError unless this evaluation has left good gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        graded = [p for p in parameters if p.grad is not None]
        self._check_made(parameters, graded)
        self._watch.check(graded, None, self.updates, self.names)

    def made(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
        """It has made its update."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        opened = [one for one in self._open.values() if one.loader.current is not None]
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        self._come_forward(optimizer, schedulers)
        self._complete(parameters, opened)

    def _check_made(self, parameters: Sequence[Tensor], graded: Sequence[Tensor]) -> None:
        """Raises UsageError unless these have gradients that backward calls of this global batch have made. graded:
        those that have any."""
        if self.guards.foreign:
            self.guards.refuse_foreign(parameters)
        reached = self.accounts.reached
        if reached is not None and self.store.others is ALONE and reached.isdisjoint(parameters):
            raise UsageError(not_reached(bool(graded)))
        if not graded and self.store.others is ALONE:
            raise UsageError(without_backward(parameters))

    def _complete(self, parameters: Sequence[Tensor], opened: Sequence[Yield]) -> None:
        """The update of a global batch has been made, or was left out."""
        self.store.clear(parameters)
        if self.accounts.reached is not None:
            self.accounts.reached.difference_update(parameters)
        for one in opened:
            one.stepped = True
            one.loader.mark_stepped(one.request)
            if self._yields[one.loader].waiting:
                self._go_on(one.loader)

    def _forget(self, opened: Sequence[Yield]) -> None:
        """A replica was lost: the global batch at hand comes once more. Raises WorldError where that is too late."""
        if any(one.stepped for one in opened):
            raise WorldError(LOST_BETWEEN_UPDATES)
        self.accounts.clear()
        for one in opened:
            one.forgotten = True

    def _come_forward(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], updated: bool = True) -> None:
        """By one step; or, where processes are not in step, by as many as all together have made."""
        steps = self.strategy.completed(optimizer, updated)
        self.updates[optimizer] += steps
        for scheduler in list(schedulers) * steps:
            self.guards.allow(scheduler.step)

    def catch_up(self, schedulers: Sequence[Any]) -> None:
        """At the end of a pass, where processes are not in step: what the others have done since this one's last."""
        if not self.strategy.plan.in_step:
            for optimizer in self.updates:
                self._come_forward(optimizer, [s for s in schedulers if s.optimizer is optimizer], updated=False)

    def _update(self, optimizer: torch.optim.Optimizer, graded: list[Tensor], max_grad_norm: float | None) -> bool:
        """Whether the update was made, and not skipped for a gradient that is not finite (on all ranks alike)."""
        norm = None if max_grad_norm is None else self.store.norm(graded, self.device)
        if self.precision.scaler is not None or self.skip:
            finite = self._watch.all_finite(graded) if norm is None else math.isfinite(norm.item())
            if self.precision.scaler is not None:
                self.precision.scaler.record(not finite)
            if not finite and not self.strategy.mesh.independent:
                return False
            if not finite:  # the other replicas make theirs, and count on this one when they average
                self.sat_out += 1
                self.store.samples = 0.0
                norm = None
                self.store.clear(graded)
        else:
            self._watch.check(graded, norm, self.updates, self.names)
        if norm is not None and max_grad_norm is not None:
            self.store.clip(graded, max_grad_norm, norm)
        self.guards.allow(self.strategy.step, optimizer)
        return True

    def drain(self) -> None:
        """Looks at what the last step left to be looked at, and lets all ranks have one loss scale."""
        self._watch.drain()
        if self.strategy.mesh.independent and self.precision.scaler is not None:
            self.precision.scaler.load_state_dict(collectives.broadcast_object(self.precision.scaler.state_dict()))

    def synchronize(self) -> None:
        """Replicas that train apart become one model, before somebody looks at it. All processes call it."""
        self.strategy.synchronize()

    @property
    def incomplete(self) -> bool:
        """Whether a global batch has gradients but no update yet."""
        for one in self._open.values():
            self._unused(one)  # where the script has cleared them it is done with them
        return any(
            not one.stepped and (loader.current is not None or one.late) for loader, one in self._open.items()
        ) or any(yields.computed for yields in self._yields.values())

    # --- which loader, which optimizer

    def _yields_of(self, of: Loader | None, call: str) -> Yields:
        if of is not None:
            if not of.train or of not in self._yields or not self._active(of):
                raise UsageError(f"run.{call}(of=...): that is not a training loader which is being iterated.")
            return self._yields[of]
        if len(self._loaders) == 1 and self._loaders[0].current is not None:
            return self._yields[self._loaders[0]]
        active = [loader for loader in self._loaders if loader.current is not None]
        if not active:
            active = [loader for loader in self._loaders if self._active(loader)]
        if not active:
            raise UsageError(outside_a_loop(call))
        if len(active) > 1:
            raise UsageError(several_loaders(call, [loader.name for loader in active]))
        return self._yields[active[0]]

    def _active(self, loader: Loader) -> bool:
        """Whether it is being iterated, or was read to its end before the script was through with its last yield."""
        return loader.current is not None or self._yields[loader].unfinished

    def only(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        if optimizer in self.updates:
            return optimizer
        if optimizer is not None:
            raise UsageError(unprepared(type(optimizer).__name__))
        if len(self.updates) != 1:
            raise UsageError(which_optimizer(len(self.updates)))
        return next(iter(self.updates))

    def _look_at(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Raises UsageError where it has got parameters that no prepared model had at the last `prepare`, or where it
        cannot be stepped without a closure."""
        if needs_closure(optimizer):
            raise UsageError(CLOSURE_OF_AN_OPTIMIZER.format(type(optimizer).__name__))
        check_known(optimizer, self.names)
        self._sizes[optimizer] = count
