"""ddp: one process a replica, gradients averaged by ring all-reduce while the backward is still running.

Phase 1, forward: nothing of Paceline's runs. The user calls the model, or any of its methods, as often as needed.
Phase 2, backward of all but the last micro-batch: autograd adds to `.grad`; nothing travels.
Phase 3, backward of the last micro-batch: a hook at its root looks up which parameters this backward will reach, and
  arms the reducer that was made for that set. Autograd then runs; torch's C++ reducer all-reduces a bucket as soon as
  its gradients are there. When the backward returns, `.grad` is the sum over all shards.
Phase 4, step: each replica makes the same update.

Between replicas: gradients, 2 (n - 1) / n of their bytes sent by each of n replicas a step, in buckets of `bucket_mb`.
Memory per replica: parameters, gradients and optimizer state once each, and the buckets once more (not so with
`gradient_as_bucket_view`).

The reducer is torch.nn.parallel.DistributedDataParallel's own (Li et al. 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training"): bucketing, overlap and averaging are its. Only its forward is not used: it arms
the reducer when `model(...)` is called, so that a second backward, a method other than forward, or a loss that
reaches only some parameters is reduced wrongly or never. Here the backward itself says what it will reach, so that
several losses, several models and frozen parameters need no flag: a reducer is kept for each set of parameters.

That set must be the same on all ranks, else they would wait for each other for ever. It is compared when a backward
call (the first, second, ... of a micro-batch) is made for the first time; a rank on which it changes later names the
parameters. `find_unused=true` compares every time, for models whose path depends on the data.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import collectives
from paceline.errors import ModelError, SettingError, UnusedParameterError
from paceline.strategies.base import Layout, Strategy, Term, Weight, Work, as_gradient
from paceline.strategies.replicated import (
    closure_on_one_replica,
    load_replicated,
    parameter_names,
    replicated_state,
)
from paceline.world import World

# torch 2.13 renamed the argument; all buffers are ignored by name too (_Together), so that neither name syncs them.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

Reached = tuple[bool, ...]
"""For each trainable parameter, whether a backward reaches it."""


class DDP(Strategy):
    """bucket_mb: size of a bucket in MB (2**20 bytes). static_graph, gradient_as_bucket_view: as in torch's DDP.
    find_unused: the parameters that a loss reaches may differ between steps and ranks."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        bucket_mb: float = 25.0,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        find_unused: bool = False,
    ) -> None:
        if bucket_mb <= 0:
            raise SettingError(f"strategy ddp: bucket_mb={bucket_mb}: a size above 0, in MB, is needed.")
        if static_graph and find_unused:
            raise SettingError("strategy ddp: static_graph and find_unused contradict each other. Set one of them.")
        self.world, self.device = world, device
        self.layout = Layout(shards=world.size, mine=(world.rank,))
        self.bucket_mb, self.static_graph = bucket_mb, static_graph
        self.views, self.find_unused = gradient_as_bucket_view, find_unused
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: dict[Tensor, str] = {}
        self._flags: tuple[bool, ...] = ()
        self._trainable: list[Tensor] = []
        self._accumulators: list[Any] = []
        self._reducers: dict[Reached, _Reducer] = {}
        self._expected: dict[int, Reached | None] = {}  # backward call -> what it reaches; None: compared every time

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        known = len(self.models)
        self.models, self.optimizers = list(models), list(optimizers)
        for model in self.models[known:]:
            model.to(self.device)
            collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
        self._names = parameter_names(models)
        self._flags = ()

    def forward_backward(self, work: Work) -> list[list[Term]]:
        return closure_on_one_replica(self, work, self.device)

    def backward(
        self,
        roots: Sequence[Tensor],
        weights: Sequence[Weight],
        *,
        final: bool,
        call: int,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        # The reducer averages over replicas: the world's size in the weight turns that into the sum.
        gradients = [as_gradient(weight * self.world.size, root) for root, weight in zip(roots, weights, strict=True)]
        if not final:
            torch.autograd.backward(roots, gradients, inputs=inputs, retain_graph=retain_graph)
            return
        self._follow_requires_grad()
        seen: list[bool] = []
        armed: list[_Reducer] = []

        def arm(_: Tensor) -> None:
            if seen:  # with several roots, only the first that autograd comes to
                return
            seen.append(True)
            mine = tuple(map(torch._C._will_engine_execute_node, self._accumulators))
            reached = self._agreed(call, mine)
            if not any(reached):  # everything that this loss depends on is frozen
                return
            armed.append(self._reducer_of(reached))
            armed[0].arm()
            missing = [p for p, a, b in zip(self._trainable, mine, reached, strict=True) if b and not a]
            if missing:  # other ranks reach these: this rank adds zeros, so that its buckets fill up too
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])

        hooks = [root.register_hook(arm) for root in roots]
        try:
            torch.autograd.backward(roots, gradients, inputs=inputs, retain_graph=retain_graph)
        finally:
            for hook in hooks:
                hook.remove()
        if armed:
            armed[0].check_complete()

    def _follow_requires_grad(self) -> None:
        """Parameters may be frozen and unfrozen between steps, alike on all ranks: start anew when they are."""
        flags = tuple(p.requires_grad for p in self._names)
        if flags == self._flags:
            return
        self._drop_reducers()
        self._flags = flags
        self._trainable = [p for p in self._names if p.requires_grad]
        self._accumulators = [torch.autograd.graph.get_gradient_edge(p).node for p in self._trainable]

    def _agreed(self, call: int, mine: Reached) -> Reached:
        """What any rank's backward reaches, found without communication where that was settled before."""
        expected = self._expected.get(call)
        if expected is None or self.find_unused:
            return self._compare(call, mine)
        if mine != expected:
            raise UnusedParameterError(self._changed_message(call, expected, mine))
        return expected

    def _reducer_of(self, reached: Reached) -> _Reducer:
        if reached not in self._reducers:
            chosen = {p for p, used in zip(self._trainable, reached, strict=True) if used}
            self._reducers[reached] = _Reducer(self, chosen)
        return self._reducers[reached]

    def _compare(self, call: int, mine: Reached) -> Reached:
        first = call not in self._expected
        if first and not self._expected:
            self._check_same_weights()
        everyone = collectives.gather_objects(mine)
        union = tuple(map(any, zip(*everyone, strict=True)))
        if first:
            alike = all(other == union for other in everyone)
            self._expected[call] = union if alike else None
            if not alike and not self.find_unused and self.world.rank == 0:
                warnings.warn(
                    f"the ranks' losses reach different parameters ({self._unlike(everyone)}): they are compared at "
                    "every step from now on. Set strategy='ddp:find_unused=true' if that is meant.",
                    stacklevel=2,
                )
        return union

    def _check_same_weights(self) -> None:
        named = [(name, p) for p, name in self._names.items()]
        differing = collectives.digest_mismatch(named)
        if differing:
            raise ModelError(
                f"the weights differ between ranks before the first step: {', '.join(differing[:5])}"
                f"{' and more' if len(differing) > 5 else ''}. `prepare` made them alike, so they were changed after it on "
                "some ranks only: load weights on every rank, or before `prepare`."
            )

    def _unlike(self, everyone: Sequence[Reached]) -> str:
        names = [self._names[p] for p in self._trainable]
        return ", ".join(name for name, *used in zip(names, *everyone, strict=True) if any(used) and not all(used))

    def _changed_message(self, call: int, expected: Reached, reached: Reached) -> str:
        rows = list(zip([self._names[p] for p in self._trainable], expected, reached, strict=True))
        lost = [name for name, before, now in rows if before and not now]
        new = [name for name, before, now in rows if now and not before]
        what = "; ".join(
            f"{text}: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
            for text, names in (("no longer reached", lost), ("reached only now", new))
            if names
        )
        return (
            f"rank {self.world.rank}: backward call number {call + 1} of this step reaches other parameters than it did "
            f"before ({what}), and the other ranks cannot know. If the path through the model depends on the data or the "
            "step, set strategy='ddp:find_unused=true' (it compares the ranks at every backward); if several losses take "
            "turns, name the optimizer: run.backward(loss, optimizer=...)."
        )

    def _drop_reducers(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers, self._expected = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)

    def close(self) -> None:
        self._drop_reducers()
        self._accumulators = []


class _Together(nn.Module):
    """All prepared models as one, which is what DistributedDataParallel wants to see."""

    def __init__(self, models: Sequence[nn.Module], reduced: set[Tensor]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        ignored = [name for name, p in self.named_parameters() if p not in reduced]
        self._ddp_params_and_buffers_to_ignore = ignored + [name for name, _ in self.named_buffers()]


class _Reducer:
    """torch's C++ reducer over some of the parameters, driven by the backward and not by a forward."""

    def __init__(self, strategy: DDP, reduced: set[Tensor]) -> None:
        self._ddp = DistributedDataParallel(
            _Together(strategy.models, reduced),
            **_NO_BUFFERS,
            init_sync=False,
            bucket_cap_mb=strategy.bucket_mb,
            gradient_as_bucket_view=strategy.views,
            static_graph=strategy.static_graph,
        )
        self._delay_first = strategy.static_graph

    def arm(self) -> None:
        """From here on a gradient that is ready counts towards its bucket. Called at the root of a backward."""
        reducer = self._ddp.reducer
        reducer._rebuild_buckets()  # after the first backward, once: buckets in the order in which gradients came
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        if self._delay_first:  # a static graph is recorded in its first backward, and reduced at its end
            torch.autograd.Variable._execution_engine.queue_callback(reducer._delay_all_reduce)  # type: ignore[attr-defined]
            self._delay_first = False

    def check_complete(self) -> None:
        """Raises if a bucket still waits for a gradient, which `arm` was told would come."""
        self._ddp.reducer._check_reducer_finalized()

    def close(self) -> None:
        self._ddp.reducer._remove_autograd_hooks()
        # The C++ reducer holds the process group, whose threads must have ended before the interpreter does: let go of
        # it now, and not when the garbage collector comes to the cycle that a DistributedDataParallel is.
        for name in ("reducer", "logger", "process_group"):
            setattr(self._ddp, name, None)
