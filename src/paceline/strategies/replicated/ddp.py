"""ddp: one replica per process; gradients are averaged by ring all-reduce while the backward is still running.

Phase 1, forward: Paceline runs no code. The user may call any method of the model, any number of times.
Phase 2, backward of all but the last micro-batch: autograd adds to `.grad`; nothing is sent.
Phase 3, backward of the last micro-batch: the strategy arms the reducer of the parameters that this backward uses, and
  autograd runs. torch's C++ reducer all-reduces a bucket once its gradients are ready. When the backward returns,
  `.grad` is the sum over all shards. (The first such backward has no reducer yet: hooks record the order of the
  gradients, and the reducer is made and used afterwards.)
Phase 4, step: each replica makes the same update.

Traffic per step: each of n replicas sends 2 (n - 1) / n of the gradients' bytes, in buckets of `bucket_mb` (the first
bucket has 1 MB). Between CPUs of one machine, gradients go through shared memory. With a `reducer` other than "native",
or with a `codec`, ddp_hook.py sums the buckets in place of torch's all-reduce; for the traffic see comm/reducers.py and
comm/codecs.py.
Memory per replica: parameters, gradients and optimizer state once each, plus the buckets (not with
`gradient_as_bucket_view`) and a codec's residuals, each as large as the gradients.

The reducer (ddp_reducer.py) is the C++ reducer of torch.nn.parallel.DistributedDataParallel (Li et al. 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training"). In torch the forward arms the reducer. So the
gradients of a second backward, of a method other than forward, or of a loss that uses only some parameters are reduced
wrongly or never. Here the backward arms the reducer, and each set of used parameters has a separate reducer. So several
losses, several models and frozen parameters need no flag.

The set of used parameters must be the same on all ranks. Otherwise ranks would wait for each other for ever. Ranks
compare their sets when they run a backward call for the first time. (A call is identified by its number in the
micro-batch, and by the optimizer, if the call is for one optimizer.) If the set changes later on a rank, that rank
raises an error with the parameters' names. With `find_unused=true`, for models with a data-dependent path, ranks
compare their sets every time.
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

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh, world_group
from paceline.config import StrategySpec
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.data.shard_sizes import ShardSizes
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
from paceline.torch_private.reducer import split_compiled_graphs
from paceline.world import World

_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")  # runs in every step: faster than a generator

IN_PARTS = (
    "in one backward, unlike in the first, a parameter's gradient arrived in several parts: its block is called "
    "several times within torch.utils.checkpoint with use_reentrant=True. Set use_reentrant=False."
)

Used = tuple[bool, ...]
"""For each trainable parameter, whether a backward reaches it."""


def check(
    size: int | None, *, bucket_mb: float, static_graph: bool, find_unused: bool, reducer: str, codec: str
) -> None:
    """Raises SettingError for invalid options. The number of processes does not matter."""
    if not bucket_mb > 0:
        raise SettingError(
            f"strategy ddp: bucket_mb={bucket_mb}: use a size above 0, in MB, such as 25; or inf for one bucket."
        )
    if static_graph and find_unused:
        raise SettingError("strategy ddp: static_graph and find_unused contradict each other. Set one of them.")
    ddp_hook.check(reducer, codec)


def alone(spec: StrategySpec, device: torch.device, *, codec: str) -> tuple[StrategySpec, str]:
    return spec, line("ddp", "trains like 'single'") if codec == "none" else ""


class DDP(LoopStrategy):
    """bucket_mb: size of a bucket in MB (2**20 bytes); the first bucket has 1 MB; inf: one bucket. static_graph,
    gradient_as_bucket_view: as in torch's DDP. find_unused: the parameters that a loss reaches may differ between steps
    and ranks. reducer: "default" (shared memory on the CPUs of one machine, else "native"), "native",
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
        self._sent: set[Tensor] = set()  # parameters and buffers that have received rank 0's values
        self._names: dict[Tensor, str] = {}
        self._flags: tuple[bool, ...] = ()  # requires_grad of each parameter
        self.trainable: list[Tensor] = []
        self._accumulators: list[Any] = []  # autograd's nodes that add to `.grad`, one per trainable parameter
        self._reducers: dict[Used, BucketReducer] = {}
        self._expected: dict[Kind, Used | None] = {}  # the parameters of each call; None: compared every time
        self._steady: dict[Kind, BucketReducer] = {}  # for calls that always use the same parameters, on all ranks
        self._late: set[Kind] = set()  # calls with gradients that are reduced after the backward

    def carrier(self) -> str:
        return "shared memory" if self._reduction is not None and self._reduction.shares_memory else ""

    def split_by(self, sizes: ShardSizes) -> bool:
        self.plan = self.plan.balanced(sizes)
        return True

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self._sent = send_models(models, self.device, self._sent)
        self._names = parameter_names(models)
        if self._reduction is not None:
            self._reduction.names = self._names
        self._flags = ()
        if self.world.size > 1:
            split_compiled_graphs(None if self.bucket_mb == math.inf else self.bucket_mb)

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
            complete = reducer.first.grad is not None  # None: no gradient may have come at all, unseen by `check`
        except RuntimeError:
            complete = False
        if not complete or (reducer.others and any_gradient(reducer.others)):
            raise UnusedParameterError(self._changed_message(work.kind, reducer.used))

    def _backward_unknown(self, work: Backward) -> None:
        """Run a backward call that has no reducer yet, or for which ranks compare the used parameters each time."""
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
        """Run without a reducer, and then compare the parameters that got a gradient with the other ranks. These
        include parameters within a reentrant checkpoint, which autograd does not know before the backward.

        If a reducer cannot follow this backward on some rank, later calls are reduced late, after their backward. There
        are two such cases. A gradient arrives in several parts, from a block that is checkpointed twice: a reducer
        takes the first part for the complete gradient. Or ranks reach different parameters, and autograd does not know
        all of them before the backward.
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
        with_gradient = set(order)
        in_parts = len(order) > len(with_gradient)
        hidden = bool(visible) and any(p in with_gradient and not seen for p, seen in zip(self.trainable, visible[0]))
        late = in_parts or (hidden and (self.find_unused or self._expected[call] is None))
        if any(world_group().gather(late)):
            self._late.add(call)
        self._reduce_late(used, order)

    def _backward_late(self, run: Callable[[], None], call: Kind) -> None:
        """Run without a reducer, and reduce the gradients afterwards."""
        with self._recording_order() as order:
            run()
        mine, used = self._with_gradients(), self._expected[call]
        if used is None or self.find_unused:
            used = self._compare(call, mine)
        elif mine != used:
            raise UnusedParameterError(self._changed_message(call, used))
        self._reduce_late(used, order)

    def _with_gradients(self) -> Used:
        """For each trainable parameter, whether it has a gradient, from this micro-batch or an earlier one."""
        return tuple(p.grad is not None for p in self.trainable)

    def _reduce_late(self, used: Used, order: Sequence[Tensor]) -> None:
        """Reduce the gradients of a backward that ran without a reducer. used: the parameters that the backward reached
        on any rank. order: see `_make_reducer`."""
        if used in self._reducers:
            self._reducers[used].reduce()
        elif any(used):  # if not, the loss depends only on frozen parameters
            self._make_reducer(used, order)

    def _backward_compared(self, losses: Sequence[Tensor], run: Callable[[], None], call: Kind) -> None:
        """Run a backward with parameters that may differ between steps and ranks. A hook at the loss runs before any
        gradient arrives. It asks autograd for the used parameters, and compares them with those of the other ranks."""
        found: list[Used] = []
        expected: list[Tensor] = []

        def compare(_: Tensor) -> None:
            if found:  # with several losses, only the first one that autograd reaches counts
                return
            mine = tuple(map(will_execute, self._accumulators))
            earlier = self._with_gradients()  # from earlier micro-batches
            found.append(self._compare(call, tuple(map(operator.or_, mine, earlier))))
            expected.extend(p for p, used in zip(self.trainable, mine, strict=True) if used)
            reducer = self._reducers.get(found[0])
            if reducer is not None:
                for arm in reducer.arm:
                    arm()
                missing = [p for p, a, b in zip(self.trainable, mine, found[0], strict=True) if b and not a]
                expected.extend(missing)
                if missing:  # this rank adds zeros, so that its buckets fill up as on ranks that use these parameters
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
        """Yield the trainable parameters in the order of their gradients' arrival within the block."""
        order: list[Tensor] = []
        hooks = [p.register_post_accumulate_grad_hook(order.append) for p in self.trainable]
        try:
            yield order
        finally:
            for hook in hooks:
                hook.remove()

    def _make_reducer(self, used: Used, order: Sequence[Tensor]) -> None:
        """Make the reducer of this set of parameters, and reduce the gradients of its first backward.

        That backward ran without a reducer. The order in which its gradients arrived defines the buckets. So all steps
        have the same bucket layout, including the first step after a restored checkpoint. The bits of a sum over three
        or more ranks depend on the layout.
        """
        numbers = {p: i for i, p in enumerate(self.trainable)}
        complete = list(dict.fromkeys(reversed(order)))[::-1]  # a gradient may have arrived in parts
        ready = world_group().broadcast([numbers[p] for p in complete])
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
        """Drop all reducers after parameters were frozen or unfrozen. All ranks must freeze the same parameters."""
        self._drop_reducers()
        self._flags = tuple(map(_requires_grad, self._names))
        self.trainable = [p for p in self._names if p.requires_grad]
        self._accumulators = [torch.autograd.graph.get_gradient_edge(p).node for p in self.trainable]

    def _compare(self, call: Kind, mine: Used) -> Used:
        """The parameters that this call uses on at least one rank. Collective."""
        first = call not in self._expected
        if first and not self._expected:
            self._check_at_start()
        everyone = world_group().gather(mine)
        union = tuple(map(any, zip(*everyone, strict=True)))
        if first:
            alike = all(other == union for other in everyone)
            self._expected[call] = union if alike else None
            if not alike and not self.find_unused and self.world.rank == 0:
                warn(
                    f"the ranks' losses reach different parameters ({self._unlike(everyone)}), so Paceline compares "
                    "them at every step from now on. If this is intended, set strategy='ddp:find_unused=true'.",
                )
        return union

    def _check_alike(self, when: str, why: str) -> None:
        """Raises ModelError on all ranks if weights or optimizer state are not bit-identical on all ranks."""
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
            f"rank {self.world.rank}: backward call number {call[0] + 1} of this step uses different parameters than "
            f"in earlier steps ({what}), and the other ranks cannot detect that. If the path through the model "
            "depends on the data or the step, set strategy='ddp:find_unused=true', which compares the ranks at every "
            "backward. If several losses alternate, name the optimizer: run.backward(loss, optimizer=...)."
        )

    def _hidden_message(self, hidden: Collection[Tensor]) -> str:
        names = [self._names[p] for p in self.trainable if p in hidden]
        return (
            f"a loss reached {listed(names)}, which its graph did not show in advance, as within "
            "torch.utils.checkpoint with use_reentrant=True. Ranks that reach different parameters must compare them "
            "before the backward. Set use_reentrant=False."
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
            "Each update made them the same, so something other than run.backward and run.step changed them "
            "(loss.backward(), a write to a gradient or weight, a different learning rate, skipped batches), on some",
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

    def local_state(self) -> dict[str, Any] | None:
        if self._reduction is not None and self._reduction.codec is not None:
            return None  # the residuals of all replicas belong to the state
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        ddp_hook.load(self._reduction, state, self._names)

    def close(self) -> None:
        split_compiled_graphs(None)
        self._drop_reducers()
        self._accumulators = []
        if self._reduction is not None:
            self._reduction.close()
