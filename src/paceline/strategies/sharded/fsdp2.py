"""Stages 2 and 3 of fsdp (ZeRO-2, ZeRO-3): torch's `fully_shard` shards parameters, gradients and optimizer state.

Phase 1, forward: before a layer computes, its parameters are all-gathered. Afterwards they are freed (stage 3), or kept
  until the backward is over (stage 2).
Phase 2, backward: freed parameters are gathered again; a layer's gradients are reduce-scattered once they are ready.
  When the backward returns, `.grad` of the user's parameters is this rank's shard of the sum over all data shards.
  Every micro-batch is reduced, so no rank holds whole gradients of more than a layer or two.
Phase 3, step: each rank updates its shard.

A layer here is an entry of a list of layers (see `layers_of`); parameters outside of such layers are gathered together.
Parameters are replaced by DTensors of the whole shape, in the user's optimizers too. 0-dim parameters cannot be
sharded: they are replicated, and their gradients are all-reduced at the end of a backward.

torch's FSDP2 gathers when a wrapped module's forward is called. fsdp_wrapping.py also gathers at other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh, world_group
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.data.shard_sizes import ShardSizes
from paceline.errors import ModelError, UnusedParameterError, UsageError
from paceline.strategies.base import Backward, Kind, LoopStrategy, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.deferred import allocate, is_deferred
from paceline.strategies.kit.named_parameters import check_dense, listed, parameter_names, replicated_state
from paceline.strategies.kit.pickling import PickleGuard
from paceline.strategies.kit.sharded_state import (
    Masters,
    full_state,
    load_full_state,
    replace_parameters,
    shard_loaded,
)
from paceline.strategies.sharded.fsdp_wrapping import Sharding, gather_on_any_call, recompute
from paceline.torch_private import fully_shard as internals
from paceline.torch_private.core import will_execute
from paceline.world import World


class FSDP2(LoopStrategy):
    """Stages 2 and 3.

    mesh: its data dimensions are those over which parameters are sharded. strategy: its name in messages. run_mesh: the
    run's mesh, if its data dimensions are others.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        mesh: Mesh,
        sharding: Sharding,
        strategy: str = "fsdp",
        run_mesh: Mesh | None = None,
    ) -> None:
        self.world, self.device = world, device
        self.mesh, self._parameter_mesh = run_mesh or mesh, mesh
        self.plan: BatchPlan = one_shard(self.mesh.shards, self.mesh.shard)
        self.store = GradientStore(reduces_each=True)
        self._sharding = sharding
        self._offload: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if sharding.offload else OffloadPolicy()
        )
        self._pickle_guard = PickleGuard(strategy)
        self._fill: Callable[[nn.Module], None] | None = None
        self._names: dict[Tensor, str] = {}
        self._masters = Masters(mesh)  # of 0-dim parameters
        self._states: list[Any] = []  # FSDP2's states of the models
        self._params: list[Any] = []  # FSDP2's parameter objects
        self._keep_gathered = False  # until the backward is over, because its graph is differentiated again
        # (whether the micro-batch is the last, call, pass) -> for each trainable parameter, whether it is used
        self._expected: dict[tuple[bool, Kind, int], tuple[bool, ...]] = {}
        self._flags: tuple[bool, ...] = ()
        self._trainable: list[Tensor] = []
        # autograd's nodes that accumulate gradients: for the gathered parameters, and for the shards
        self._nodes: list[Any] = []
        self._shard_nodes: list[Any] = []

    @property
    def parameter_mesh(self) -> Mesh:
        return self._parameter_mesh

    # --- setup

    def fill_with(self, fill: Callable[[nn.Module], None]) -> bool:
        self._fill = fill
        return True

    def split_by(self, sizes: ShardSizes) -> bool:
        self.plan = self.plan.balanced(sizes)
        return True

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_dense(models)
        self._free()
        moved: dict[Tensor, Tensor] = {}
        for model in models:
            if model not in self.models:
                moved |= self._shard(model)
        for optimizer in optimizers:
            replace_parameters(optimizer, moved)
            if optimizer not in self.optimizers:
                self._masters.register(optimizer)
        self.models, self.optimizers = list(models), list(optimizers)
        self._names = parameter_names(models)
        retire(moved)
        self._expected, self._flags = {}, ()
        self._pickle_guard.install(models)

    def _shard(self, model: nn.Module) -> dict[Tensor, Tensor]:
        """Shard a model layer by layer, so that the device never holds all of it. Returns old -> new parameters."""
        _check_fresh(model)
        names = dict(model.named_parameters(remove_duplicate=False))
        scalars = {p for p in model.parameters() if not p.dim()}
        alone = [*scalars, *model.buffers()]
        deferred = is_deferred(model)
        allocate(alone, self.device)
        for tensor in alone:
            tensor.data = tensor.data.to(self.device)
        world_group().broadcast_tensors(alone)
        for p in scalars:
            self._masters.add(p)
        done: set[Tensor] = set()
        layers, mixed = self._sharding.layers(model), self._sharding.mixed
        if self._sharding.checkpointing:
            recompute(layers)
        for layer in [*layers, model]:
            own = [p for p in layer.parameters() if p not in done and p not in scalars]
            for p in own:
                if not dtensor.is_sharded(p):
                    p.data = p.data.contiguous()
            # Parameters of an already split layer were made equal before the split.
            world_group().broadcast_tensors(p for p in own if not dtensor.is_sharded(p) and not p.is_meta)
            _check_one_dtype(layer, own)
            sharded: FSDPModule = fully_shard(
                layer,
                mesh=self._masters.mesh,
                reshard_after_forward=False if self._sharding.keep else None,
                mp_policy=MixedPrecisionPolicy(
                    mixed,
                    torch.float32 if mixed else None,  # the dtype in which gradients are summed
                    torch.float32 if mixed and layer is model else None,  # the output's dtype
                ),
                offload_policy=self._offload,
                ignored_params=scalars,
            )
            done |= set(layer.parameters())
            sharded.set_gradient_divide_factor(1.0)  # sum, not mean: the losses are weighted
            sharded.set_force_sum_reduction_for_comms(True)
        if deferred:
            allocate(model.parameters(), torch.device("cpu") if self._sharding.offload else self.device)
            internals.adopt_memory(model)
            assert self._fill is not None
            self._fill(model)
        state = internals.state_of(sharded)  # the state of the model itself, which was last
        internals.become_root(state)  # this model is the root, whichever of its modules is called first
        gather_on_any_call(model)
        self._states.append(state)
        for group in internals.groups_under(state):
            self._params += group.fsdp_params
            group.reshard = partial(self._reshard, group, group.reshard)
        model.register_load_state_dict_pre_hook(shard_loaded)
        return {names[name]: p for name, p in model.named_parameters(remove_duplicate=False) if names[name] is not p}

    def _reshard(self, group: Any, reshard: Callable[[], None]) -> None:
        """Replaces FSDP2's reshard, and differs from it in two cases. A backward with create_graph=True, as for a
        gradient penalty, leaves a graph that needs the parameters again: they stay gathered until `backward` is over.
        A forward without gradients frees all parameters. Otherwise a later `state_dict` on only one rank
        (`if run.main: ...`) would free them on this rank only. The rank would then wait for ever to gather them
        again."""
        if internals.phase(group) == "FORWARD" and not torch.is_grad_enabled():
            internals.slice_again(group)
            return
        if internals.phase(group) == "POST_BACKWARD" and torch.is_grad_enabled():
            self._keep_gathered = True
        if not self._keep_gathered:
            reshard()

    def _free(self) -> None:
        """Free all gathered parameters, and reduce remaining gradients."""
        self._keep_gathered = False
        for state in self._states:
            with torch.no_grad():
                internals.finish_backward(state)

    # --- computing

    def explain(self, error: Exception) -> Exception | None:
        return UsageError(USED_OUTSIDE) if "mixed torch.Tensor and DTensor" in str(error) else None

    def backward(self, work: Backward) -> None:
        if dtensor.any_sharded(work.losses):
            raise UsageError(USED_OUTSIDE)
        leaves = self.leaves()
        chosen = None if work.inputs is None else [leaves[p] for p in work.inputs if p in leaves]
        scalars = list(self._masters.of)
        before = [p.grad for p in scalars]
        for p in scalars:
            p.grad = None
        hooks = self._comparing(work.losses, (work.final, work.kind, work.number), leaves)
        try:
            backward_here(work._replace(inputs=chosen))
        finally:
            for hook in hooks:
                hook.remove()
        self._free()
        present = [p.grad for p in scalars if p.grad is not None]
        for grad in present:
            grad.copy_(self._parameter_mesh.data.all_reduce(grad))
        for p, earlier in zip(scalars, before, strict=True):
            if earlier is not None:
                p.grad = earlier if p.grad is None else earlier.add_(p.grad)

    def leaves(self) -> dict[Tensor, Tensor]:
        """The user's parameter -> the tensor that graphs use in its place, for parameters that a forward has used."""
        leaves = {
            param.sharded_param: unsharded
            for param in self._params
            if (unsharded := internals.gathered(param)) is not None
        }
        return leaves | {p: p for p in self._masters.of}

    def _comparing(
        self, losses: Sequence[Tensor], key: tuple[bool, Kind, int], leaves: dict[Tensor, Tensor]
    ) -> list[Any]:
        """Add hooks to the losses, which run before any gradient and compare the parameters that this backward uses.
        The first time (with find_unused every time) they compare ranks. Later each rank compares with its first time.
        Ranks that reduce different sets of parameters would wait for each other for ever, or add wrong gradients."""
        flags = tuple(leaf.requires_grad for leaf in leaves.values())
        if flags != self._flags:
            node = torch.autograd.graph.get_gradient_edge
            self._flags, self._expected = flags, {}
            # without parameters of no elements, for which get_gradient_edge fails (torch 2.13)
            self._trainable = [p for p, leaf in leaves.items() if leaf.requires_grad and leaf.numel()]
            self._nodes = [node(leaves[p]).node for p in self._trainable]
            self._shard_nodes = [node(p).node for p in self._trainable if leaves[p] is not p and p.requires_grad]
        compared: list[bool] = []

        def compare(_: Tensor) -> None:
            if not compared:  # with several losses, only at the first one that autograd reaches
                compared.append(True)
                self._compare(key, tuple(map(will_execute, self._nodes)))

        return [loss.register_hook(compare) for loss in losses if loss.requires_grad]

    def _compare(self, key: tuple[bool, Kind, int], mine: tuple[bool, ...]) -> None:
        if any(map(will_execute, self._shard_nodes)):
            raise UsageError(USED_OUTSIDE)
        if key not in self._expected or self._sharding.find_unused:
            everyone = world_group().gather(mine)
            self._expected[key] = mine
            others = [other for other in everyone if other != mine]
        else:
            others = [] if mine == self._expected[key] else [self._expected[key]]
        if others:
            rows = zip(self._trainable, mine, others[0], strict=True)
            differing = [self._names[p] for p, own, other in rows if own != other]
            raise UnusedParameterError(
                _unlike_message(self.world.rank, key[1][0], differing, self._sharding.find_unused)
            )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._free()  # parameters that an evaluation left gathered are about to become outdated
        self._masters.update(optimizer)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        self._free()
        return full_state(self.models, self.optimizers, self._masters.of)

    def held_state(self) -> dict[str, Any]:
        self._free()
        return replicated_state(self.models, self.optimizers, self._masters.of)

    def reads_stored(self) -> bool:
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._free()
        load_full_state(self.models, self.optimizers, self._masters.of, state)

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        self._free()  # gathered copies would keep the old values
        write()

    def close(self) -> None:
        self._free()
        self._masters.close()
        self._pickle_guard.close()
        self._nodes, self._shard_nodes, self._trainable, self._flags = [], [], [], ()


class _Retired(nn.Parameter):
    """A parameter from before `prepare` that a script may still hold. Using it would silently have no effect, so any
    use raises UsageError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UsageError(
            "this parameter was taken before run.prepare, which replaced it by a shard (strategy 'fsdp'). Take "
            "parameters (for clipping, freezing, optimizers) from the model after run.prepare."
        )


def retire(parameters: Any) -> None:
    for p in parameters:
        if not dtensor.is_sharded(p):  # sharded ones come from an already split layer, and no script holds them
            p.data, p.grad = torch.empty(0, dtype=p.dtype, device="meta" if p.is_meta else "cpu"), None
            p.__class__ = _Retired


def _check_fresh(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ModelError(
                f"strategy fsdp: {name or type(model).__name__} is already sharded by fully_shard. Delete that call; "
                "strategy='fsdp' shards the model."
            )


def _check_one_dtype(layer: nn.Module, parameters: Sequence[Tensor]) -> None:
    dtypes = sorted({str(p.dtype) for p in parameters if p.requires_grad})
    if len(dtypes) > 1:
        raise ModelError(
            f"strategy fsdp: trainable parameters of {type(layer).__name__} have several dtypes ({', '.join(dtypes)}), "
            "but are gathered together. Convert them to one dtype, or use strategy='fsdp:stage=1'."
        )


USED_OUTSIDE = (
    "strategy fsdp: a loss uses a model's parameters outside of any forward or method of the model, where stages 2 and "
    "3 hold only shards (such as sum(p.square().sum() for p in model.parameters())). Use strategy='fsdp:stage=1', "
    "where parameters are whole; or compute it in a method of the model; for weight decay, use the optimizer's option."
)


def _unlike_message(rank: int, call: int, names: Sequence[str], compared: bool) -> str:
    return (
        f"rank {rank}: backward call number {call + 1} of this step does not reach the same parameters as "
        f"{'on other ranks' if compared else 'in earlier steps or on other ranks'}. They differ in: {listed(names)}. "
        "In stages 2 and 3 of fsdp all ranks must reach the same parameters. If these change from step to step, in "
        "the same way on all ranks, set strategy='fsdp:find_unused=true'. If they depend on the data, use "
        "strategy='ddp:find_unused=true'."
    )
