"""The step: from a batch to an update, exact over micro-batches, losses, loaders and optimizers.

Phase 1, a loader yields: this starts a micro-batch, and the first micro-batch starts a global batch (ownership.py).
Phase 2, `backward` or `forward_backward`: the accounts weigh the loss by its share of the global batch (accounts.py),
    and the strategy makes the backward pass and reduces the gradients.
Phase 3, `Updates.step`: the update (updates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.data.batch_plan import Request
from paceline.data.bundle import Piece
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.step import deterministic
from paceline.step.accounts import Accounts
from paceline.step.call_check import CallCheck
from paceline.step.closure import computing, pieces_of
from paceline.step.guards import Guards
from paceline.step.loss import LossRecord, attach_count, check_loss, local_loss, mean_term, sum_term, term_losses
from paceline.step.messages import CLOSURE_NEEDED, second_backward
from paceline.step.observer import StepObserver
from paceline.step.ownership import Ownership
from paceline.step.precision import Precision
from paceline.step.tree_accounts import UPDATED_BETWEEN, TreeAccounts
from paceline.step.updates import Updates
from paceline.step.warm_up import WarmUp
from paceline.strategies.base import (
    Backward,
    ClosureStrategy,
    LoopStrategy,
    Strategy,
    Term,
    Weight,
    Weights,
    Work,
    as_gradient,
)
from paceline.torch_private.core import next_node, version_of

_UNOBSERVED = nullcontext()


class Stepper:
    """Makes the backward calls of a run.

    Attributes:
        ownership, accounts, updates: the three parts of a step.
        losses: the backward calls since an observer last took them; None if no observer needs them.
        observers: called at each backward call.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: Sequence[nn.Module],
        calls: CallCheck,
        precision: Precision,
        guards: Guards,
        *,
        device: torch.device,
        skip: bool,
        nonfinite_every: int = 1,
        deterministic_by: str = "",
    ) -> None:
        """Make a Stepper.

        models: the prepared models; the run adds to this list.
        deterministic_by: the setting that asks for deterministic kernels; "" if no setting does.
        """
        self.strategy, self.precision, self.guards = strategy, precision, guards
        # A strategy has one of these two interfaces. If `plan.bundled`, it is a ClosureStrategy.
        self._loop, self._closure = cast(LoopStrategy, strategy), cast(ClosureStrategy, strategy)
        self._store = store = strategy.store
        self.accounts = Accounts(store, strategy.mesh, device)
        self.ownership = Ownership(strategy, self.accounts)
        self._tree = None if store.sums is None else TreeAccounts(store.sums, self.accounts, store, device)
        self._passes: Accounts | TreeAccounts = self._tree or self.accounts
        warm_up = WarmUp(calls, store, compares=strategy.mesh.lockstep.size > 1)
        self.updates = Updates(
            strategy,
            self.ownership,
            self.accounts,
            precision,
            guards,
            warm_up,
            device=device,
            skip=skip,
            nonfinite_every=nonfinite_every,
        )
        self.device, self._models, self._deterministic_by = device, models, deterministic_by
        self.losses: list[LossRecord] | None = None
        self.observers: Sequence[StepObserver] = ()
        self._weight, self._gradient = 0.0, torch.zeros(())  # the last usual loss's weight: number, tensor

    def watch(self, observers: Sequence[StepObserver]) -> None:
        """Call these observers at backward calls and updates."""
        self.observers = self.updates.observers = observers

    # --- the loop form

    def backward(
        self,
        loss: Tensor | None,
        total: Tensor | None,
        count: Weight | None,
        optimizer: torch.optim.Optimizer | None,
        of: Loader | None,
        retain_graph: bool,
    ) -> None:
        """Add the gradients of a loss, weighted by its share of the global batch. Arguments: see `run.backward`."""
        if self.strategy.plan.bundled:
            raise UsageError(CLOSURE_NEEDED)
        value, ownership = total if loss is None else loss, self.ownership
        one = ownership.owner(value, of)
        request = one.request
        if len(ownership.loaders) > 1 and isinstance(value, Tensor) and (loss is not None or count is None):
            ownership.several.check_loss("backward", one, [value])
        # Most losses are a mean over the examples of a last micro-batch. The fast path for them builds no lists.
        usual = loss is not None and count is None and request.final and self._tree is None
        if usual:
            if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                check_loss(loss)
            term = None
        elif loss is not None:
            term = mean_term(loss, count)
        else:
            term = sum_term(total, count, request.examples, request.total)
        inputs = None if optimizer is None else self._inputs(optimizer)
        call = ownership.register(one)
        if ownership.new_gradients:
            self._begin_global_batch()
        if self.guards.foreign_gradients:
            self.guards.refuse_foreign()
        if self.updates.warm_up is not None:
            self.updates.warm_up.before_backward(one, call)
        self.guards.in_run_backward = True
        try:
            if term is None:
                self._backward_mean(cast(Tensor, loss), request, call, inputs, retain_graph)
            else:
                self._backward_terms([term], request, call, inputs, retain_graph)
        except BaseException as error:
            one.discarded = True
            self._explain("backward", error)
            raise
        finally:
            self.guards.in_run_backward = False
        if loss is not None and (ownership.deferred or one.after_end) and ownership.ahead(one):
            attach_count(loss, request.examples)
        counted = None if term is None else term.count
        shown = (cast(Term, term).value if loss is None else loss).detach()
        ownership.node_after_backward = next_node()
        if call == 0 and request.examples:  # an empty shard has no samples, whatever count the loss gives
            self.updates.samples = self.updates.samples + (request.examples if counted is None else counted)
        self.updates.finite.calls.append((shown, request))
        if self.losses is not None:
            if counted is not None:
                shown = cast(Term, term).value.detach()
            self.losses.append((call, shown, counted, request, counted is not None, version_of(shown), 0))

    def _backward_mean(
        self, loss: Tensor, request: Request, call: int, inputs: list[Tensor] | None, retain_graph: bool
    ) -> None:
        """Make the single backward pass of a mean over the examples of a last micro-batch."""
        scaler = self.precision.scaler
        scale = self._scale() if scaler is not None or self.observers else 1.0
        weight = request.examples / request.mean_over * (scale * self._store.factor)
        gradient = self._gradient
        if loss.dim():
            gradient = as_gradient(weight, loss)
        elif weight != self._weight or loss.dtype is not gradient.dtype or loss.device != gradient.device:
            self._weight, self._gradient = weight, (gradient := as_gradient(weight, loss))
        self.accounts.open(call)
        kind = call, id(inputs[0]) if inputs else None
        with self._observed() if self.observers else _UNOBSERVED:
            self._loop.backward(Backward((loss,), (gradient,), True, kind, 0, inputs, retain_graph))
        self.accounts.complete(scale)

    def _backward_terms(
        self, terms: list[Term], request: Request, call: int, inputs: list[Tensor] | None, retain_graph: bool
    ) -> None:
        """Make the backward passes of a loss with these terms: one for all accounts, or one per account."""
        self._check_not_updated()
        kind = call, id(inputs[0]) if inputs else None
        scale = self._scale()
        passes = self._passes.passes([terms], request, call)
        for number, keys in enumerate(passes):
            (weights,) = self._passes.begin(keys, [terms], request, scale)
            pairs = [(term.value, weight) for term, weight in zip(terms, weights, strict=True) if weight is not None]
            losses = [value for value, _ in pairs]
            gradients = [as_gradient(weight * self._store.factor, value) for value, weight in pairs]
            retain = retain_graph or number < len(passes) - 1
            with self._observed():
                self._loop.backward(Backward(losses, gradients, request.final, kind, number, inputs, retain))
            self._passes.end(keys, request, scale)

    # --- the closure form

    def forward_backward(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: Any,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        of: Loader | None,
    ) -> Tensor:
        """Compute a loss and add its gradients. Arguments and result: see `run.forward_backward`."""
        ownership, bundled = self.ownership, self.strategy.plan.bundled
        one = ownership.owner_of_batch(batch, of)
        request = one.request
        call = ownership.register(one)
        if ownership.new_gradients:
            self._begin_global_batch()
        if self.guards.foreign_gradients:
            self.guards.refuse_foreign()
        if self.updates.warm_up is not None:
            self.updates.warm_up.before_backward(one, call)
        pieces = pieces_of(batch, request, bundled)
        inputs = None if optimizer is None else self._inputs(optimizer)
        seeded = not bundled and not ownership.prefetched
        several = len(ownership.loaders) > 1
        check = partial(ownership.several.check_loss, "forward_backward", one) if several else None
        compute = computing(loss_fn, self.precision, one.loader, request, call, seeded, check)
        self.guards.in_run_backward = True
        try:
            if bundled:
                terms = self._by_strategy(model, pieces, compute, request, call, inputs)
            else:
                made = compute(model, pieces[0], self.device)
                if len(made) == 1 and made[0].count is None and request.final and self._tree is None:
                    self._backward_mean(made[0].value, request, call, inputs, False)
                else:
                    self._backward_terms(made, request, call, inputs, False)
                terms = [[Term(term.value.detach(), term.count) for term in made]]
        except BaseException as error:
            one.discarded = True
            self._explain("forward_backward", error)
            raise
        finally:
            self.guards.in_run_backward = False
        counts = [piece.count for piece in pieces]
        loss = local_loss(terms, counts, keep_pieces=self._tree is not None)
        ownership.node_after_backward = next_node()
        if call == 0 and request.examples:
            first = terms[0][0].count
            self.updates.samples = self.updates.samples + (request.examples if first is None else first)
        self.updates.finite.calls.append((loss, request))
        if (ownership.deferred or one.after_end) and ownership.ahead(one):
            attach_count(loss, request.examples)
        if self.losses is not None:
            parts = term_losses(loss, terms, counts, self._tree is not None)
            self.losses += [(call, part, n, request, False, version_of(part), i) for i, part, n in parts]
        return loss

    def _by_strategy(
        self,
        model: Any,
        pieces: Sequence[Piece],
        compute: Callable[[Any, Piece, torch.device], list[Term]],
        request: Request,
        call: int,
        inputs: list[Tensor] | None,
    ) -> list[list[Term]]:
        """Let the strategy run the closure on every piece. Returns the terms of each piece."""
        self._check_not_updated()
        scale = self._scale()

        def passes(terms: list[list[Term]]) -> Iterator[tuple[Weights, bool]]:
            accounts = self._passes.passes(terms, request, call)
            for number, keys in enumerate(accounts):
                yield self._passes.begin(keys, terms, request, scale), number < len(accounts) - 1
                self._passes.end(keys, request, scale)

        work = Work(model, pieces, compute, passes, self.precision.autocast, request.final, call, inputs, request.total)
        with self._observed():
            return self._closure.forward_backward(work)

    # --- both

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """A context around the strategy's part of a backward call."""
        for observer in self.observers:
            observer.in_backward(True)
        try:
            yield
        finally:
            for observer in self.observers:
                observer.in_backward(False)

    def _begin_global_batch(self) -> None:
        """Called before the first backward call of a global batch."""
        ownership, accounts, scaler = self.ownership, self.accounts, self.precision.scaler
        if ownership.new_update:
            self.updates.samples, self.updates.finite.calls = 0.0, []
            if accounts.used or accounts.reached is not None:
                accounts.start_global_batch()
        ownership.new_update = ownership.new_gradients = False
        if scaler is not None:
            scaler.update()
            self._store.loss_scale = scaler.scale

    def restart_global_batch(self) -> None:
        """Start the open global batch again, for another evaluation of its loss."""
        self.ownership.restart()
        self.updates.finite.calls = []
        self.accounts.start_global_batch()

    def _scale(self) -> float:
        """The loss scale. A backward multiplies all losses by it, and then divides all gradients by it."""
        scale = 1.0 if self.precision.scaler is None else self.precision.scaler.scale
        for observer in self.observers:
            scale *= observer.scale()
        return scale

    def _check_not_updated(self) -> None:
        """Raises UsageError if shards computed in sequence would see weights from before and after an update."""
        sequential = self._tree is not None and self.strategy.plan.sequential
        if sequential and any(one.stepped for one in self.ownership.open.values()):
            raise UsageError(UPDATED_BETWEEN)

    def _inputs(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """This optimizer's parameters. A backward call that names the optimizer gives gradients only to them."""
        optimizer = self.updates.prepared(optimizer)
        return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    def explanation(self, error: BaseException) -> Exception | None:
        """A better error, from the strategy or about a missing deterministic kernel; None: keep this error."""
        explained = self.strategy.explain(error) if isinstance(error, Exception) else None
        if explained is None and self._deterministic_by:
            return deterministic.explained(error, self._models, self._deterministic_by)
        return explained

    def _explain(self, call: str, error: BaseException) -> None:
        """Raises a better error for this error of a backward call, if there is a better one."""
        if isinstance(error, RuntimeError) and (words := second_backward(call, error)) is not None:
            raise UsageError(words) from error
        explained = self.explanation(error)
        if explained is not None:
            raise explained from error
