"""deepspeed: a DeepSpeed engine trains the model, with ZeRO stage 1, 2 or 3.

Phase 1, forward: the script's model computes. In stage 3 DeepSpeed's hooks gather a module's parameters before it
  computes, and free them afterwards.
Phase 2, backward: Paceline multiplies the loss by its weight and by the number of replicas, since DeepSpeed averages.
  `engine.backward` reduces the gradients of every micro-batch, in stage 1 too, and each rank keeps its shard. Paceline
  adds up the shards in separate tensors.
Phase 3, step: Paceline passes the shards, already clipped, back to DeepSpeed. `engine.step` updates the rank's shard of
  the parameters. In stages 1 and 2 it then all-gathers the parameters.

The table is for n replicas and P parameters in fp32 with Adam. Memory is at the peak of the step, without activations,
buckets, and the layer that stage 3 is gathering:

  stage  parameters  fp32 copy   optimizer  gradient  sent by each replica, times (n - 1) / n
  1, 2   4 P         4 P / n     8 P / n    8 P / n   per micro-batch the gradients (twice, as an all-reduce); per step
                                                      the parameters
  3      4 P / n     4 P / n     8 P / n    8 P / n   per micro-batch the parameters twice (all-gather), the gradients
                                                      once (reduce-scatter)

ZeRO was designed for 16-bit parameters: it updates an fp32 copy of a rank's shard, and during the step it holds the
gradient's shard twice. During a backward, stages 1 and 2 hold whole gradients, 4 P more.

Follows Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", through
https://deepspeed.readthedocs.io: initialize, backward, step, GatheredParameters and the safe_get_full_* functions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import process_group
from paceline.comm.mesh import Mesh
from paceline.config import StrategySpec
from paceline.data.batch_plan import one_shard
from paceline.errors import ModelError, SettingError, UnusedParameterError, UsageError
from paceline.strategies.base import Backward, LoopStrategy
from paceline.strategies.deepspeed.deepspeed_config import merged
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import (
    check_dense,
    listed,
    load_replicated,
    parameter_names,
    replicated_state,
    send_models,
)
from paceline.strategies.kit.one_process import line
from paceline.torch_private.core import will_execute
from paceline.world import World


def check(size: int | None, *, stage: int, config: str) -> None:
    """Raises SettingError for options or DeepSpeed JSON keys that cannot work, and if DeepSpeed is not installed."""
    merged(config, stage)
    if importlib.util.find_spec("deepspeed") is None:
        raise SettingError(
            'strategy deepspeed needs DeepSpeed, which is not installed: pip install "paceline[deepspeed]". '
            "strategy='fsdp' does the same with PyTorch only."
        )


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """Returns the same strategy for one process. It shards nothing, but other settings of the JSON still apply."""
    return spec, line("deepspeed", "shards nothing here")


class DeepSpeed(LoopStrategy):
    """stage: 1, 2 or 3; 0: the stage in the config, or else 2. config: the path of a DeepSpeed JSON."""

    def __init__(self, world: World, device: torch.device, *, stage: int = 0, config: str = "") -> None:
        check(world.size, stage=stage, config=config)
        if world.size == 1:
            process_group.join_alone(device)
        self._config = merged(config, stage)
        self.world, self.device = world, device
        self.mesh = Mesh(device, world.rank, {"shard": world.size})
        self.plan = one_shard(world.size, world.rank)
        self.store = GradientStore(reduces_each=True)
        self.store.factor = world.size  # DeepSpeed's engine averages over the processes
        self._engine: Any = None
        self._names: dict[Tensor, str] = {}
        self._trainable: list[Tensor] = []
        self._nodes: list[Any] = []  # autograd's nodes that accumulate the gradients of `_trainable`

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1 or len(optimizers) > 1:
            raise ModelError(
                f"strategy deepspeed trains one model with one optimizer; {len(models)} model(s) and "
                f"{len(optimizers)} optimizer(s) were prepared. Put the models into one nn.Module with one optimizer, "
                "or use strategy='fsdp', which supports several."
            )
        self.models, self.optimizers = list(models), list(optimizers)
        names = parameter_names(models)
        if self._engine is not None:
            if names != self._names:
                raise ModelError(
                    "strategy deepspeed: parameters were added to or removed from the model after run.prepare, when "
                    "DeepSpeed had already sharded them. Build the whole model before run.prepare."
                )
            return
        for model in models:
            _check_model(model)
        send_models(models, self.device)
        self._names = names
        if models and optimizers:
            self._begin(models[0], optimizers[0])

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from paceline.strategies.deepspeed.deepspeed_build import warn_of_left_locks
        from paceline.strategies.deepspeed.deepspeed_engine import Engine

        if self.world.local_rank == 0:
            warn_of_left_locks()
        _check_optimizer(optimizer, self._names)
        self._trainable = [p for p in self._names if p.requires_grad]
        # Make the nodes before DeepSpeed empties parameters (stage 3): a node keeps the shape of its parameter.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._trainable]
        before = replicated_state([model], [optimizer])["optimizers"][0]
        self._engine = Engine(model, optimizer, self._config, self._trainable, self._names)
        if before["state"]:
            self._engine.load_optimizer(before)
        for p in self._trainable:
            self.store.holders[p] = self._engine.place(p)
        self.store.model_parallel = self.mesh.model

    # --- computing

    def backward(self, work: Backward) -> None:
        if self._engine is None:
            raise UsageError(
                "strategy deepspeed: prepare the optimizer together with its model, before the first backward."
            )
        self._check_frozen()
        pairs = zip(work.losses, work.gradients, strict=True)
        parts = [(loss * gradient).sum().float() for loss, gradient in pairs]
        total = torch.stack(parts).sum()
        total.register_hook(self._check_used)
        self._engine.backward(total, work.retain_graph)
        for p in self._trainable:
            place, part = self.store.holders[p], self._engine.gradient(p)
            place.grad = part if place.grad is None else place.grad.add_(part)

    def explain(self, error: Exception) -> Exception | None:
        partitioned = self._engine is not None and self._engine.partitioned
        if not isinstance(error, RuntimeError) or not partitioned or not re.search(r"\(0\)|\[0\]", str(error)):
            return None
        return UsageError(
            "strategy deepspeed: a loss uses parameters that stage 3 has freed: outside their module's forward (such "
            "as sum(p.square().sum() for p in model.parameters())), or in a gradient of a gradient. Use "
            "strategy='deepspeed:stage=2', where parameters are whole; for weight decay, use the optimizer's option. "
            f"(torch: {error})"
        )

    def _check_frozen(self) -> None:
        changed = [name for p, name in self._names.items() if p.requires_grad is not (p in self.store.holders)]
        if changed:
            raise UsageError(
                f"strategy deepspeed: requires_grad of {listed(changed)} was changed after run.prepare, when "
                "DeepSpeed had already sharded the trainable parameters. Set it before run.prepare, or use "
                "strategy='fsdp'."
            )

    def _check_used(self, _: Tensor) -> None:
        """Raises UnusedParameterError unless the loss uses all parameters.

        A hook at the root of a backward. It runs before any gradient is computed.
        """
        missed = [
            self._names[p] for p, node in zip(self._trainable, self._nodes, strict=True) if not will_execute(node)
        ]
        if missed:
            raise UnusedParameterError(
                f"rank {self.world.rank}: the loss does not reach {listed(missed)}. DeepSpeed updates every parameter "
                "at every step, with zeros for a missing gradient, so weight decay and momentum would still change "
                "them. Make one backward reach all parameters (add up the losses), freeze the others before "
                "run.prepare (requires_grad_(False)), or use strategy='fsdp'. (With torch.utils.checkpoint set "
                "use_reentrant=False, so that recomputed parameters count.)"
            )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.step({p: self.store.holders[p].grad for p in self._trainable})

    # --- state

    def holds(self, parameter: Tensor) -> bool:
        from paceline.strategies.deepspeed.deepspeed_engine import NO_COPY

        if self._engine is not None and self._engine.partitioned:
            raise UsageError(NO_COPY)
        return True

    def state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return replicated_state(self.models, self.optimizers)
        return {"models": [self._engine.weights()], "optimizers": [self._engine.optimizer_state()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._engine is None:
            load_replicated(self.models, self.optimizers, state)
            return
        self._engine.load(state)

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        if self._engine is not None:
            raise UsageError(
                "strategy deepspeed: DeepSpeed has copied the weights, since the optimizer is prepared. Load weights "
                "between run.prepare(model) and run.prepare(optimizer), or before run.prepare."
            )
        write()

    def close(self) -> None:
        self._nodes = []
        if self._engine is not None:
            self._engine.close()


def _check_model(model: nn.Module) -> None:
    check_dense([model], "deepspeed")
    single = [name for name, p in model.named_parameters() if not p.dim()]
    if single:
        raise ModelError(
            f"strategy deepspeed: {single[0]} is a 0-dim parameter, which DeepSpeed does not support. Give it a "
            "dimension (torch.ones(1) instead of torch.tensor(1.0)), or use strategy='fsdp'."
        )
    other = [f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype != torch.float32]
    if other:
        raise ModelError(
            f"strategy deepspeed: parameters must be float32, since DeepSpeed updates a copy in float32; but "
            f"{other[0]}. Convert the model with model.float(), or use strategy='fsdp'. (precision='bf16' computes in "
            "bfloat16 and keeps the parameters' dtype; 'bf16-params' does not.)"
        )


_BY_ELEMENT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop")


def _check_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    cls = type(optimizer)
    if cls not in [getattr(torch.optim, name) for name in _BY_ELEMENT]:
        raise ModelError(
            f"strategy deepspeed: {cls.__name__} may not update each element independently. DeepSpeed passes an "
            "optimizer flat tensors of many parameters' elements, without the parameters' shapes and norms. Use one "
            f"of torch.optim's {', '.join(_BY_ELEMENT)}, or use strategy='fsdp'."
        )
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    left = [name for p, name in names.items() if p.requires_grad and not any(p is other for other in updated)]
    if left:
        raise ModelError(
            f"strategy deepspeed: {listed(left)} are trainable, but the optimizer does not have them. Add them to the "
            "optimizer, or freeze them before run.prepare (requires_grad_(False))."
        )
    if any(not any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups):
        raise ModelError(
            f"strategy deepspeed: a parameter group of {cls.__name__} has no trainable parameter. Drop that group, or "
            "use strategy='fsdp'."
        )
