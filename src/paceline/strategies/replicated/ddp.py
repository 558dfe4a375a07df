"""ddp: one process a replica, gradients averaged by ring all-reduce while the backward is still running.

Phase 1, forward: nothing of Paceline's runs. The user calls the model, or any of its methods, as often as needed.
Phase 2, backward of all but the last micro-batch: autograd adds to `.grad`; nothing travels.
Phase 3, backward of the last micro-batch: the strategy arms the reducer of the parameters that this backward uses, and
  autograd runs. torch's C++ reducer all-reduces a bucket as soon as its gradients are there. When the backward returns,
  `.grad` is the sum over all shards. (In the first such backward no reducer exists: hooks note the gradients that come,
  and when it is over the reducer is made and used.)
Phase 4, step: each replica makes the same update.

Between replicas: gradients, 2 (n - 1) / n of their bytes sent by each of n replicas a step, in buckets of `bucket_mb`,
the first one of 1 MB; nothing but memory between CPUs of one machine. With another `reducer` than "native", or a
`codec`, ddp_hook.py sums a bucket in place of torch's all-reduce; comm/reducers.py and comm/codecs.py tell its bytes.
Memory per replica: parameters, gradients and optimizer state once each, and the buckets once more (not so with
`gradient_as_bucket_view`). A codec's residuals once more.

The reducer (ddp_reducer.py) is torch.nn.parallel.DistributedDataParallel's own (Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training"). DDP's forward arms it, so that a second backward, a method other
than forward, or a loss that uses only some parameters is reduced wrongly or never. Here the backward arms it, and each
set of parameters has a reducer: several losses, several models and frozen parameters need no flag.

The set must be the same on all ranks, else they would wait for each other for ever. Ranks compare it when a backward
call (the first, second, ... of a micro-batch, for all parameters or for an optimizer's) is made for the first time; a
rank on which it changes later raises an error that names the parameters. With `find_unused=true` ranks compare every
time, for models whose path depends on the data.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.errors import ModelError, SettingError, UnusedParameterError, warn
from paceline.strategies.base import Backward, Kind, LoopStrategy, backward_here, torch_backward
from paceline.strategies.gradient_store import GradientStore, any_gradient
from paceline.strategies.kit.named_parameters import (
    CHANGED_AT_START,
    check_same_bits,
    listed,
    load_replicated,
    named_state,
    parameter_names,
    replicated_state,
    send_models,
)
from paceline.strategies.kit.one_process import line
from paceline.strategies.replicated import ddp_hook
from paceline.strategies.replicated.ddp_reducer import BucketReducer
from paceline.torch_private.core import will_execute
from paceline.torch_private.reducer import cut_compiled_graphs
from paceline.world import World

_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")  # in every step: faster than a generator

IN_PARTS = (
    "the gradient of a parameter comes in several parts in one backward, which it did not at the first: its block is "
    "called several times within torch.utils.checkpoint with use_reentrant=True. Set use_reentrant=False."
)

Used = tuple[bool, ...]
"""For each trainable parameter, whether a backward gives it a gradient."""


def check(
    size: int | None, *, bucket_mb: float, static_graph: bool, find_unused: bool, reducer: str, codec: str
) -> None:
    """Raises SettingError for what cannot work, on any number of processes."""
    if not bucket_mb > 0:
        raise SettingError(
            f"strategy ddp: bucket_mb={bucket_mb}: a size above 0, in MB, is needed, such as 25, or inf: one bucket."
        )
    if static_graph and find_unused:
        raise SettingError("strategy ddp: static_graph and find_unused contradict each other. Set one of them.")
    ddp_hook.check(reducer, codec)


def alone(spec: StrategySpec, device: torch.device, *, codec: str) -> tuple[StrategySpec, str]:
    return spec, line("ddp", "trains as 'single' does here") if codec == "none" else ""


class DDP(LoopStrategy):
    """bucket_mb: size of a bucket in MB (2**20 bytes); the first one is full at 1 MB; inf: one bucket. static_graph,
    gradient_as_bucket_view: as in torch's DDP. find_unused: the parameters that a loss reaches may differ between steps
    and ranks. reducer: "default" (shared memory on the CPUs of one machine, else "native"), "auto", "native",
    "shared_memory", "direct", "ring", "hierarchical" or "reduce_to_one". codec: "none", "bf16", "fp16",
    "powersgd:rank=4" or "topk:ratio=0.01"."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        bucket_mb: float = 25.0,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        find_unused: bool = False,
        reducer: str = ddp_hook.DEFAULT,
        codec: str = "none",
    ) -> None:
        check(
            world.size,
            bucket_mb=bucket_mb,
            static_graph=static_graph,
            find_unused=find_unused,
            reducer=reducer,
            codec=codec,
        )
        self._reduction = ddp_hook.make(self, reducer, codec, world, device)
        self.world, self.device = world, device
        self.mesh = Mesh(device, world.rank, {"replicate": world.size})
        self.plan: BatchPlan = one_shard(world.size, world.rank)
        self.bucket_mb, self.static_graph = bucket_mb, static_graph
        self.find_unused = find_unused
        self.store = GradientStore(aliased=gradient_as_bucket_view)
        if self._reduction is None:  # torch's reducer averages over the replicas
            self.store.factor = world.size
        self._sent: set[Tensor] = set()  # parameters and buffers that have had rank 0's values
        self._names: dict[Tensor, str] = {}
        self._flags: tuple[bool, ...] = ()  # requires_grad of each parameter
        self.trainable: list[Tensor] = []
        self._accumulators: list[Any] = []  # autograd's node that adds to `.grad`, of each trainable parameter
        self._reducers: dict[Used, BucketReducer] = {}
        self._expected: dict[Kind, Used | None] = {}  # the parameters of each call; None: compared every time
        self._steady: dict[Kind, BucketReducer] = {}  # of the calls that always use the same parameters, on all ranks
        self._late: set[Kind] = set()  # the calls whose gradients are reduced when the backward has ended

    def carrier(self) -> str:
        return "shared memory" if self._reduction is not None and self._reduction.shares_memory else ""

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self._sent = send_models(models, self.device, self._sent)
        self._names = parameter_names(models)
        if self._reduction is not None:
            self._reduction.names = self._names
        self._flags = ()
        if self.world.size > 1:
            cut_compiled_graphs(None if self.bucket_mb == math.inf else self.bucket_mb)

    def backward(self, work: Backward) -> None:
        if not work.final or self.world.size == 1:
            backward_here(work)
            if work.final and self._reduction is not None:
                self._reduction.reduce_alone()
            return
        if tuple(map(_requires_grad, self._names)) != self._flags:
            self._follow_requires_grad()
        reducer = self._steady.get(work.kind)
        if reducer is None:
            self._backward_unknown(work)
            return
        for arm in reducer.arm:
            arm()
        torch_backward(work.losses, work.gradients, inputs=work.inputs, retain_graph=work.retain_graph)
        try:
            reducer.check()
            complete = reducer.first.grad is not None  # else perhaps none came, and the reducer knows of no backward
        except RuntimeError:
            complete = False
        if not complete or (reducer.others and any_gradient(reducer.others)):
            raise UnusedParameterError(self._changed_message(work.kind, reducer.used))

    def _backward_unknown(self, work: Backward) -> None:
        """A backward call that has no reducer yet, or that ranks compare each time."""
        run, call = partial(backward_here, work), work.kind
        if call not in self._expected:
            self._backward_first(work.losses, run, call)
        elif call in self._late:
            self._backward_late(run, call)
        else:
            self._backward_compared(work.losses, run, call)
        expected = self._expected[call]
        if expected in self._reducers and call not in self._late and not self.find_unused:
            assert expected is not None
            self._steady[call] = self._reducers[expected]

    def _backward_first(self, losses: Sequence[Tensor], run: Callable[[], None], call: Kind) -> None:
        """Runs without a reducer, and then compares the parameters that had a gradient. So parameters within a
        reentrant checkpoint count too, of which autograd does not know beforehand.

        From then on the call is reduced late if a reducer cannot follow its backward on any rank: it takes a gradient
        that comes in several parts, as of a block that is checkpointed twice, for complete at the first; and where
        ranks reach different parameters, autograd must know them beforehand.
        """
        visible: list[Used] = []

        def look(_: Tensor) -> None:
            visible.append(tuple(map(will_execute, self._accumulators)))

        hooks = [loss.register_hook(look) for loss in losses]
        try:
            with self._recording_order() as order:
                run()
        finally:
            for hook in hooks:
                hook.remove()
        used = self._compare(call, self._with_gradients())
        graded = set(order)
        in_parts = len(order) > len(graded)
        hidden = bool(visible) and any(p in graded and not seen for p, seen in zip(self.trainable, visible[0]))
        late = in_parts or (hidden and (self.find_unused or self._expected[call] is None))
        if any(collectives.gather_objects(late)):
            self._late.add(call)
        self._reduce_late(used, order)

    def _backward_late(self, run: Callable[[], None], call: Kind) -> None:
        """Runs without a reducer, which then reduces what the backward has left."""
        with self._recording_order() as order:
            run()
        mine, used = self._with_gradients(), self._expected[call]
        if used is None or self.find_unused:
            used = self._compare(call, mine)
        elif mine != used:
            raise UnusedParameterError(self._changed_message(call, used))
        self._reduce_late(used, order)

    def _with_gradients(self) -> Used:
        """The parameters that have a gradient of this call, from this micro-batch or an earlier one."""
        return tuple(p.grad is not None for p in self.trainable)

    def _reduce_late(self, used: Used, order: Sequence[Tensor]) -> None:
        """Reduces what a backward without a reducer has left. used: the parameters that it reached on any rank. See
        `_make_reducer`."""
        if used in self._reducers:
            self._reducers[used].reduce()
        elif any(used):  # else everything that the loss depends on is frozen
            self._make_reducer(used, order)

    def _backward_compared(self, losses: Sequence[Tensor], run: Callable[[], None], call: Kind) -> None:
        """The parameters may differ between steps and ranks: a hook at the root of the backward, before any gradient,
        asks autograd for them and compares them with the other ranks'."""
        found: list[Used] = []
        expected: list[Tensor] = []

        def compare(_: Tensor) -> None:
            if found:  # with several losses, only the first that autograd comes to
                return
            mine = tuple(map(will_execute, self._accumulators))
            earlier = self._with_gradients()  # of micro-batches before
            found.append(self._compare(call, tuple(map(operator.or_, mine, earlier))))
            expected.extend(p for p, used in zip(self.trainable, mine, strict=True) if used)
            reducer = self._reducers.get(found[0])
            if reducer is not None:
                for arm in reducer.arm:
                    arm()
                missing = [p for p, a, b in zip(self.trainable, mine, found[0], strict=True) if b and not a]
                expected.extend(missing)
                if missing:  # this rank adds zeros, so that its buckets fill up as those of ranks that use them
                    torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])

        hooks: list[Any] = [loss.register_hook(compare) for loss in losses]
        try:
            with self._recording_order() as order:
                run()
        finally:
            for hook in hooks:
                hook.remove()
        hidden = set(order) - set(expected)
        if hidden:
            raise ModelError(self._hidden_message(hidden))
        if any(found[0]) and found[0] not in self._reducers:
            self._make_reducer(found[0], order)

    @contextmanager
    def _recording_order(self) -> Iterator[list[Tensor]]:
        """The trainable parameters, in the order in which their gradients come within the block."""
        order: list[Tensor] = []
        hooks = [p.register_post_accumulate_grad_hook(order.append) for p in self.trainable]
        try:
            yield order
        finally:
            for hook in hooks:
                hook.remove()

    def _make_reducer(self, used: Used, order: Sequence[Tensor]) -> None:
        """Makes the reducer of this set of parameters, and reduces the gradients that its first backward has left.

        That backward ran without a reducer and has shown the order in which gradients come. So all steps have one
        bucket layout, also the first one after a checkpoint is restored. The bits of a sum over three ranks or more
        depend on the layout.
        """
        numbers = {p: i for i, p in enumerate(self.trainable)}
        complete = list(dict.fromkeys(reversed(order)))[::-1]  # a gradient may have come in parts
        ready = collectives.broadcast_object([numbers[p] for p in complete])
        ready += [i for i, there in enumerate(used) if there and i not in set(ready)]
        parameters = [self.trainable[i] for i in ready]
        chosen = set(parameters)
        self._reducers[used] = reducer = BucketReducer(
            self.models,
            parameters,
            [p for p in self.trainable if p not in chosen],
            self._reduction,
            used=used,
            bucket_mb=self.bucket_mb,
            views=self.store.aliased,
            static_graph=self.static_graph,
        )
        reducer.reduce()

    def _follow_requires_grad(self) -> None:
        """Parameters may be frozen and unfrozen between steps, alike on all ranks: start anew when they are."""
        self._drop_reducers()
        self._flags = tuple(map(_requires_grad, self._names))
        self.trainable = [p for p in self._names if p.requires_grad]
        self._accumulators = [torch.autograd.graph.get_gradient_edge(p).node for p in self.trainable]

    def _compare(self, call: Kind, mine: Used) -> Used:
        """The parameters that this call uses on any rank. Collective."""
        first = call not in self._expected
        if first and not self._expected:
            self._check_at_start()
        everyone = collectives.gather_objects(mine)
        union = tuple(map(any, zip(*everyone, strict=True)))
        if first:
            alike = all(other == union for other in everyone)
            self._expected[call] = union if alike else None
            if not alike and not self.find_unused and self.world.rank == 0:
                warn(
                    f"the ranks' losses reach different parameters ({self._unlike(everyone)}): they are compared at "
                    "every step from now on. Set strategy='ddp:find_unused=true' if that is meant.",
                )
        return union

    def _check_alike(self, when: str, why: str) -> None:
        """Raises ModelError, on all ranks, where weights or optimizer state are not the same bits on all."""
        named = named_state(self._names, self.optimizers)
        check_same_bits([(name, t) for name, t in named if not dtensor.is_sharded(t)], when, why)

    def _unlike(self, everyone: Sequence[Used]) -> str:
        names = [self._names[p] for p in self.trainable]
        return ", ".join(name for name, *used in zip(names, *everyone, strict=True) if any(used) and not all(used))

    def _changed_message(self, call: Kind, expected: Used) -> str:
        rows = [
            (self._names[p], before, p.grad is not None) for p, before in zip(self.trainable, expected, strict=True)
        ]
        lost = [name for name, before, now in rows if before and not now]
        new = [name for name, before, now in rows if now and not before]
        what = "; ".join(
            f"{text}: {listed(names)}"
            for text, names in (("no longer reached", lost), ("reached only now", new))
            if names
        )
        return (
            f"rank {self.world.rank}: backward call number {call[0] + 1} of this step reaches other parameters than it "
            f"did before ({what}), and the other ranks cannot know. If the path through the model depends on the data "
            "or the step, set strategy='ddp:find_unused=true' (it compares the ranks at every backward); if several "
            "losses take turns, name the optimizer: run.backward(loss, optimizer=...)."
        )

    def _hidden_message(self, hidden: Collection[Tensor]) -> str:
        names = [self._names[p] for p in self.trainable if p in hidden]
        return (
            f"a loss reached {listed(names)} of which its graph does not tell, as within torch.utils.checkpoint with "
            "use_reentrant=True: where ranks reach different parameters they cannot be compared beforehand. Set "
            "use_reentrant=False."
        )

    def _drop_reducers(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers, self._steady, self._expected, self._late = {}, {}, {}, set()

    def _check_at_start(self) -> None:
        self._check_alike("before the first step", CHANGED_AT_START)

    def _check_at_checkpoint(self) -> None:
        self._check_alike(
            "at a checkpoint",
            "After each update they were the same, so that something changed them beside run.backward and run.step "
            "(loss.backward(), a gradient or weight written to, another learning rate, batches left out), on some",
        )

    def explain(self, error: Exception) -> Exception | None:
        if "mark a variable ready only once" not in str(error):
            return None
        return ModelError(IN_PARTS)

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        self._check_at_checkpoint()
        state = replicated_state(self.models, self.optimizers)
        return state if self._reduction is None else state | self._reduction.state_dict(self._names)

    def own_state(self) -> dict[str, Any] | None:
        if self._reduction is not None and self._reduction.codec is not None:
            return None  # what it has yet to send belongs to the state of all
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        ddp_hook.load(self._reduction, state, self._names)

    def close(self) -> None:
        cut_compiled_graphs(None)
        self._drop_reducers()
        self._accumulators = []
        if self._reduction is not None:
            self._reduction.close()
