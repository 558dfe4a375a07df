"""The step: from a batch to an update, exact over micro-batches, losses, loaders and optimizers.

Phase 1, a loader's yield: it starts a micro-batch, and the first micro-batch starts a global batch.
Phase 2, `backward`: the accounts weigh the loss by its share of the global batch (gradients.py), and the strategy makes
    the backward pass and reduces the gradients.
Phase 3, `step`: once every loader that took part has come to the last micro-batch of its global batch, the stepper
    checks the gradients, clips them, updates, moves the schedules and clears the gradients.

Independent replicas do the same, each for its own shard, and count updates and schedules alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.mesh import ALONE
from paceline.data.batch_plan import Piece, Request
from paceline.data.loader import Loader
from paceline.data.randomness import seed_torch, tag
from paceline.errors import UsageError, warn
from paceline.step import deterministic
from paceline.step.call_check import BACKWARD, CallCheck
from paceline.step.closure import computing, pieces_of
from paceline.step.finite import FiniteWatch
from paceline.step.gradients import Accounts
from paceline.step.guards import Guards
from paceline.step.left_gradients import LeftGradients
from paceline.step.loss import LossRecord, attach_count, local_loss, mean_term, sum_term, term_losses
from paceline.step.messages import (
    BY_HAND_APART,
    CLOSURE_NEEDED,
    CLOSURE_OF_AN_OPTIMIZER,
    never_stepped,
    not_reached,
    out_of_turn,
    outside_a_loop,
    second_backward,
    several_loaders,
    unprepared,
    unstepped,
    which_optimizer,
    without_backward,
)
from paceline.step.precision import Precision
from paceline.step.preparable import needs_closure
from paceline.step.several_loaders import SeveralLoaders
from paceline.step.tree_accounts import UPDATED_BETWEEN, TreeAccounts
from paceline.step.yields import Yield, Yields
from paceline.strategies.base import (
    Backward,
    ClosureStrategy,
    LoopStrategy,
    Strategy,
    Term,
    Weight,
    Weights,
    Work,
)
from paceline.strategies.gradient_store import any_gradient
from paceline.strategies.kit.named_parameters import check_known
from paceline.torch_private.core import next_node, node_number, version_of

_UPDATE = tag("update")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that the optimizer has now, of all its groups."""
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


class Stepper:
    """Makes the backward calls and updates of a run, and keeps what belongs to the open global batch.

    Public attributes are for the run, the monitor and `paceline verify`.
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
        self.strategy, self.calls, self.precision, self.guards = strategy, calls, precision, guards
        # The strategy under the one interface that it has: the plan tells which.
        self._loop, self._closure = cast(LoopStrategy, strategy), cast(ClosureStrategy, strategy)
        self.store = store = strategy.store
        self.accounts = Accounts(store, strategy.mesh, device)
        self.names: dict[Tensor, str] = {}  # the name of each prepared parameter, and of each place of its gradient
        self.updates: dict[torch.optim.Optimizer, int] = {}  # how many updates each prepared optimizer has made
        self.skipped = 0  # how many updates every replica left out
        self.skipped_alone = 0  # how many updates this replica left out while others made theirs
        self.manual_updates = 0  # how many global batches the script has ended by clearing gradients, without run.step
        self._parameter_counts: dict[torch.optim.Optimizer, int] = {}  # how many parameters the last check saw
        self.losses: list[LossRecord] | None = None  # the backward calls since an observer last took them; None: no one
        self._tree = None if store.sums is None else TreeAccounts(store.sums, self.accounts, store, device)
        self._passes = self.accounts.passes if self._tree is None else self._tree.passes
        self._finite = FiniteWatch(store, strategy.mesh, device, nonfinite_every)
        self._left = LeftGradients(store)
        self.device, self.skip = device, skip
        self._models = models  # the prepared ones; the run adds to them
        self._deterministic_by = deterministic_by  # the setting that asks for deterministic kernels; "": none
        self._loaders: list[Loader] = []  # the training loaders, in the order in which they were first iterated
        self._yields: dict[Loader, Yields] = {}  # the yields of each of these loaders
        self._several = SeveralLoaders(self._yields)
        # For each loader whose global batch has gradients: the last of its yields that had a backward.
        self._open_yields: dict[Loader, Yield] = {}
        self._call_number = 0  # the number of the next backward call in this micro-batch
        self._called_loaders: set[Loader] = set()  # the loaders that had a backward call since the number was 0
        self._first_node: int | None = None  # the number of autograd's next node when the first yield came
        self._node_after_backward = 0  # the number of autograd's next node after the last backward call
        self._prefetched = False  # the script has fetched a batch before it was done with the one before it
        self._yield_count = 0  # how many yields the training loaders have made
        self._samples: Weight = 0.0  # over how many things this process's first loss of the global batch is a mean

    def on_yield(self, loader: Loader) -> None:
        """A loader yields: a training loader starts a micro-batch, and perhaps a global batch; the first batch of an
        evaluation synchronizes replicas."""
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
            if self._first_node is None:
                self._first_node = self._node_after_backward = number
        before = yields.latest
        yields.remember_batch(loader.presented)
        quiet = number == self._node_after_backward
        one = Yield(loader, request, loader.key, self._yield_count, number, not quiet or len(self.updates) > 1)
        self._yield_count += 1
        if not yields.pending and quiet and (before is None or before.done):
            self._start_micro_batch(yields, one)
        else:
            yields.defer(one)

    def on_end(self, loader: Loader, whole: bool) -> None:
        """A pass over a training loader has ended; whole: it was read to its end. Raises NonFiniteError."""
        if loader in self._yields:
            self._yields[loader].close(loader, whole)
            loader.presented = None
        if whole:
            self._several.check_end(loader)
            self.drain()

    def _start_micro_batch(self, yields: Yields, one: Yield) -> None:
        """From here on backward calls belong to this yield, which starts a micro-batch and perhaps a global batch."""
        loader = one.loader
        yields.activate(one)
        self._prefetched = self._prefetched or bool(yields.pending)
        if one.request.micro == 0:
            self._start_global_batch(one)
        else:
            if loader in self._called_loaders:
                self._call_number, self._called_loaders = 0, set()
            if loader in self._open_yields:
                self._open_yields[loader] = one

    def _start_global_batch(self, one: Yield) -> None:
        loader = one.loader
        others: dict[Loader, Yield] = {}
        for other, last in self._open_yields.items():
            if other is loader:
                self._check_stepped(last)
            if other is loader or other.current is None:
                continue
            if not last.request.final and last.count_at_call <= one.index:  # its backward was before this yield
                raise UsageError(out_of_turn(loader.name, other.name, last.request.micro, last.request.micros))
            if not last.stepped:
                others[other] = last
        self._open_yields = others
        if not others:  # else the update will be of both loaders' losses together
            self._call_number, self._called_loaders, self._samples, self._finite.calls = 0, set(), 0.0, []
            self.accounts.start_global_batch()
        if any(not last.request.final for last in others.values()):
            return  # another loader's micro-batch of the same update has had its backward already
        self.accounts.drop_unreduced()
        if self.precision.scaler is not None:
            self.precision.scaler.update()
            self.store.loss_scale = self.precision.scaler.scale

    def _check_stepped(self, last: Yield) -> None:
        """Raises UsageError if gradients of this complete global batch are left when its loader starts the next."""
        if self._left_unused(last):
            raise UsageError(unstepped(last.loader.name, last.request.step, last.request.epoch))

    def _left_unused(self, last: Yield) -> bool:
        """Whether the global batch of this yield is complete and its gradients were neither used nor cleared.

        Gradients that the script has cleared count as used: the script made the update itself.
        """
        if last.stepped or last.discarded or not last.calls or not last.request.final:
            return False
        if self.store.any_left():
            return True
        if not self.updates and self.strategy.mesh.independent:
            raise UsageError(BY_HAND_APART)
        last.stepped = True
        last.loader.mark_stepped(last.request)
        self.manual_updates += 1
        return False

    def count_manual_updates(self) -> int:
        """How many global batches the script has ended by clearing the gradients, without run.step."""
        for last in self._open_yields.values():
            self._left_unused(last)
        return self.manual_updates

    def warn_unstepped(self) -> None:
        """Warn of gradients that nothing has used. Called when the script has left its loops."""
        for last in self._open_yields.values():
            if not last.warned and self._left_unused(last):
                last.warned = True
                warn(never_stepped(last.loader.name))

    def between_epochs(self, numbers: Iterator[int]) -> Iterator[int]:
        """Pass the numbers of epochs on; after each epoch, warn of gradients that were not used."""
        for number in numbers:
            yield number
            self._several.check_end()
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
        one = yields.find_by_batch(batch)
        call, request, bundled = self._register_call(yields, one), one.request, self.strategy.plan.bundled
        pieces = pieces_of(batch, request, bundled)
        inputs = None if optimizer is None else self._inputs(optimizer)
        seeded = not bundled and not self._prefetched
        check = partial(self._several.check_loss, "forward_backward", one) if len(self._loaders) > 1 else None
        compute = computing(loss_fn, self.precision, one.loader, request, call, seeded, check)
        self.guards.in_run_backward = True
        try:
            if bundled:
                terms = self._by_strategy(model, pieces, compute, request, call, inputs)
            else:
                own = compute(model, pieces[0], self.device)
                self._backward([own], request, call, inputs, retain_graph=False)
                terms = [[Term(term.value.detach(), term.count) for term in own]]
        except BaseException as error:
            one.discarded = True
            self._explain("forward_backward", error)
            raise
        finally:
            self.guards.in_run_backward = False
        counts = [piece.count for piece in pieces]
        loss = local_loss(terms, counts, apart=self._tree is not None)
        self._record_loss(yields, request, call, terms[0][0].count, loss)
        if yields.pending or yields.end_node is not None:
            attach_count(loss, request.examples)
        if self.losses is not None:
            parts = term_losses(loss, terms, counts, self._tree is not None)
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
        value, one = total if loss is None else loss, yields.certain
        if one is None or not isinstance(value, Tensor) or (node := value.grad_fn) is None:
            one = yields.find_by_loss(value, self._first_node or 0) if isinstance(value, Tensor) else yields.newest()
        elif node_number(node) < one.first_node:
            one = yields.find_by_loss(value, self._first_node or 0)
        request = one.request
        if len(self._loaders) > 1 and isinstance(value, Tensor) and (loss is not None or count is None):
            self._several.check_loss("backward", one, [value])
        term = mean_term(loss, count) if loss is not None else sum_term(total, count, request.examples, request.total)
        inputs = None if optimizer is None else self._inputs(optimizer)
        call = self._register_call(yields, one)
        self.guards.in_run_backward = True
        try:
            self._backward([[term]], request, call, inputs, retain_graph)
        except BaseException as error:
            one.discarded = True
            self._explain("backward", error)
            raise
        finally:
            self.guards.in_run_backward = False
        if (yields.pending or yields.end_node is not None) and loss is not None:
            attach_count(loss, request.examples)
        value = (term.value if loss is None else loss).detach()
        self._record_loss(yields, request, call, term.count, value)
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
        """Make the backward passes of one call in the loop form. terms: the loss's terms, of one piece."""
        if self._tree is not None:
            self._check_not_updated()
        kind = call, id(inputs[0]) if inputs else None
        passes = self._passes(terms, request, call, retain_graph, self.precision.loss_scale)
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
        """Let the strategy run the closure on every piece. Returns the terms of each piece."""
        if self._tree is not None:
            self._check_not_updated()

        def passes(terms: list[list[Term]]) -> Iterator[tuple[Weights, bool]]:
            return self._passes(terms, request, call, False, self.precision.loss_scale)

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

    def explanation(self, error: BaseException) -> Exception | None:
        """A better error than this one, if the strategy has one, or it is about a deterministic kernel."""
        explained = self.strategy.explain(error) if isinstance(error, Exception) else None
        if explained is None and self._deterministic_by:
            return deterministic.explained(error, self._models, self._deterministic_by)
        return explained

    def _explain(self, call: str, error: BaseException) -> None:
        """Raises a better error in place of this one of a backward call, if there is one."""
        if isinstance(error, RuntimeError) and (words := second_backward(call, error)) is not None:
            raise UsageError(words) from error
        explained = self.explanation(error)
        if explained is not None:
            raise explained from error

    def _record_loss(self, yields: Yields, request: Request, call: int, count: Weight | None, loss: Tensor) -> None:
        """Record a backward call that was made. loss: detached, a mean over the request's examples, or a sum over
        `count` things."""
        self._node_after_backward = next_node()
        if call == 0 and request.examples:  # nothing counts on an empty shard, whatever a loss says of it
            self._samples = self._samples + (request.examples if count is None else count)
        self._finite.calls.append((loss, request))

    def _check_not_updated(self) -> None:
        """Raises UsageError if shards computed in sequence would see weights from before and after an update."""
        if self.strategy.plan.sequential and any(one.stepped for one in self._open_yields.values()):
            raise UsageError(UPDATED_BETWEEN)

    def _register_call(self, yields: Yields, one: Yield) -> int:
        """Count a backward call of this yield. Returns the number of the call in its micro-batch."""
        if one is not yields.active:
            self._start_micro_batch(yields, one)
        if yields.pending:
            self._prefetched = True
        if self.guards.foreign_gradients:
            self.guards.refuse_foreign()
        # The first backward of a global batch's last micro-batch is the first of its calls that all processes make. To
        # take a batch is none: a process may look at one by itself.
        if one.calls == 0 and one.request.final and not self.strategy.mesh.independent:
            self.calls.same(BACKWARD)
        self._left.look(first=self._call_number == 0 and one.request.micro == 0)
        one.calls += 1
        one.count_at_call = self._yield_count
        one.after_end = one.loader.current is None
        self._open_yields[one.loader] = one
        self._called_loaders.add(one.loader)
        call, self._call_number = self._call_number, self._call_number + 1
        return call

    def _inputs(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters of this optimizer, which alone get gradients from a call that names the optimizer."""
        optimizer = self.prepared(optimizer)
        return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    # --- step

    def step(
        self, optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any], max_grad_norm: float | None
    ) -> bool:
        optimizer = self.prepared(optimizer)
        parameters = parameters_of(optimizer)
        if self.store.places:
            parameters = self.store.of(parameters)
        if len(parameters) != self._parameter_counts.get(optimizer):
            self._check_optimizer(optimizer, len(parameters))
        opened = [
            one
            for loader, one in self._open_yields.items()
            if loader.current is not None or self._yields[loader].end_node is not None
        ]
        if not opened or (self._call_number == 0 and not all(one.stepped for one in opened)):
            if self._belongs_to_previous(opened):
                return False
            raise UsageError(without_backward(parameters))
        for one in opened:
            one.step_called = True
            if not one.request.final:
                return False
        if len(self._loaders) > 1:
            self._several.check_update(opened)
        self.store.samples = self._samples
        self.strategy.finish()
        if self.accounts.unreduced(parameters):
            raise UsageError(
                "run.step: an earlier micro-batch of this global batch made a backward call that its last one did not "
                "make, so that its gradient was never combined over the processes. Make the same backward calls in "
                "every micro-batch (a loss of zero is fine)."
            )
        self._check_gradients(parameters)
        self._left.warn_of(optimizer, parameters, self.names)
        # What the update draws, and the script until the next yield, is alike on every replica: SGLD's noise,
        # stochastic rounding.
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        if self._update(optimizer, parameters, max_grad_norm):
            self._advance(optimizer, schedulers)
        else:
            self.skipped += 1
        self._finish_global_batch(parameters, opened)
        return True

    def _belongs_to_previous(self, opened: Sequence[Yield]) -> bool:
        """Whether run.step was called for the micro-batch before the one that the script has prefetched."""
        before = [
            one for loader in (one.loader for one in opened) if (one := self._yields[loader].previous) is not None
        ]
        late = [one for one in before if one.calls and not one.step_called and not one.request.final]
        for one in late:
            one.step_called = True
        return bool(late)

    def _reseed_prefetched(self, loader: Loader) -> None:
        """Key the random generators for the batch that the script prefetched before this update, as its yield did."""
        self._prefetched = True
        if loader.current is not None:
            part = loader.current.parts[0]
            seed_torch(loader.streams.torch_key(loader.current, part.shard, part.micro), self.device)

    def prefetched(self) -> bool:
        """Whether the script has already fetched a batch that follows an open global batch."""
        return any(self._yields[loader].pending for loader in self._open_yields)

    # --- for an optimizer that evaluates the loss itself (objective.py)

    def latest_yields(self) -> list[Yield]:
        """The latest yield of each training loader that the script is iterating."""
        found = [self._yields[loader].latest for loader in self._loaders if loader.current is not None]
        return [one for one in found if one is not None]

    def restart_global_batch(self) -> None:
        """Start the open global batch again for another evaluation of its loss: backward calls count from 0."""
        self._call_number, self._called_loaders, self._finite.calls = 0, set(), []
        self.accounts.start_global_batch()

    def check_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError or NonFiniteError unless the last evaluation has left finite gradients."""
        parameters = parameters_of(optimizer)
        self._check_gradients(parameters)
        self._finite.check(parameters, None, self.updates, self.names)

    def finish_closure_update(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
        """Count an update that the optimizer has made by a closure, and end the global batch."""
        parameters = parameters_of(optimizer)
        opened = [one for one in self._open_yields.values() if one.loader.current is not None]
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        self._advance(optimizer, schedulers)
        self._finish_global_batch(parameters, opened)

    def keeps_gradients(self, parameters: list[Tensor]) -> bool:
        """The script calls zero_grad of the optimizer of these parameters. Returns whether that must do nothing, since
        they have gradients of earlier micro-batches."""
        if self.accounts.unreduced(parameters):
            return True
        self._left.cleared(parameters)
        return False

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Raises UsageError unless backward calls of this global batch made the gradients."""
        if self.guards.foreign_gradients:
            self.guards.refuse_foreign(parameters)
        reached = self.accounts.reached
        if reached is not None and self.store.others is ALONE and reached.isdisjoint(parameters):
            raise UsageError(not_reached(any_gradient(parameters)))
        if self.store.others is ALONE and not any_gradient(parameters):  # the first has one, nearly always
            raise UsageError(without_backward(parameters))

    def _finish_global_batch(self, parameters: Sequence[Tensor], opened: Sequence[Yield]) -> None:
        """End a global batch whose update was made or skipped: clear its gradients."""
        self.store.clear(parameters)
        if self.accounts.reached is not None:
            self.accounts.reached.difference_update(parameters)
        for one in opened:
            one.stepped = True
            one.loader.mark_stepped(one.request)
            if self._yields[one.loader].pending:
                self._reseed_prefetched(one.loader)

    def _advance(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], updated: bool = True) -> None:
        """Count the steps that the strategy reports as completed, and move the schedules by as many.

        One step for each update; where processes are not in step, the number that all workers completed since the last
        call.
        """
        steps = self.strategy.completed(optimizer, updated)
        self.updates[optimizer] += steps
        for scheduler in list(schedulers) * steps:
            self.guards.allow(scheduler.step)

    def catch_up(self, schedulers: Sequence[Any]) -> None:
        """At the end of a pass: count the steps that other workers completed, where processes are not in step."""
        if not self.strategy.plan.in_step:
            for optimizer in self.updates:
                self._advance(optimizer, [s for s in schedulers if s.optimizer is optimizer], updated=False)

    def _update(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_grad_norm: float | None) -> bool:
        """Make the update. Returns False if it was skipped, on all ranks alike, for a gradient that is not finite."""
        norm = None if max_grad_norm is None else self.store.norm(parameters, self.device)
        if self.precision.scaler is not None or self.skip:
            finite = self._finite.all_finite(parameters) if norm is None else math.isfinite(norm.item())
            if self.precision.scaler is not None:
                self.precision.scaler.record(not finite)
            if not finite and not self.strategy.mesh.independent:
                return False
            if not finite:  # the other replicas make theirs, and count on this one when they average
                self.skipped_alone, self.store.samples, norm = self.skipped_alone + 1, 0.0, None
                self.store.clear(parameters)
        else:
            self._finite.check(parameters, norm, self.updates, self.names)
        if norm is not None and max_grad_norm is not None:
            self.store.clip(parameters, max_grad_norm, norm)
        self.guards.allow(self.strategy.step, optimizer)
        return True

    def drain(self) -> None:
        """Finish the checks of the gradients of all steps, whose flags an accelerator's host reads late. Raises
        NonFiniteError."""
        self._finite.drain(sum(self.updates.values()))

    def prepare_save(self) -> None:
        """Finish the checks, and give independent replicas rank 0's loss scale. All processes call it."""
        self.drain()
        if self.strategy.mesh.independent and self.precision.scaler is not None:
            self.precision.scaler.load_state_dict(collectives.broadcast_object(self.precision.scaler.state_dict()))

    def synchronize(self) -> None:
        """Finish the checks, and average independent replicas into one model, before it is evaluated or when training
        ends. All processes call it. Raises NonFiniteError."""
        self.drain()
        self.strategy.synchronize()

    @property
    def incomplete(self) -> bool:
        """Whether a global batch has gradients but no update yet."""
        for one in self._open_yields.values():
            self._left_unused(one)  # marks global batches whose gradients the script has cleared
        return any(
            not one.stepped and (loader.current is not None or one.after_end)
            for loader, one in self._open_yields.items()
        ) or any(yields.has_unused_forward for yields in self._yields.values())

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
        """Whether the script iterates this loader, or has read it to its end with its last yield not done."""
        return loader.current is not None or self._yields[loader].unfinished

    def prepared(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """This optimizer, or the only one. Raises UsageError if it is not prepared, or must be named."""
        if optimizer in self.updates:
            return optimizer
        if optimizer is not None:
            raise UsageError(unprepared(type(optimizer).__name__))
        if len(self.updates) != 1:
            raise UsageError(which_optimizer(len(self.updates)))
        return next(iter(self.updates))

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Raises UsageError if the optimizer has parameters that no prepared model has, or needs a closure."""
        if needs_closure(optimizer):
            raise UsageError(CLOSURE_OF_AN_OPTIMIZER.format(type(optimizer).__name__))
        check_known(optimizer, self.names)
        self._parameter_counts[optimizer] = count
