"""deepspeed: a DeepSpeed engine trains the model, by ZeRO stage 1, 2 or 3.

Phase 1, forward: the script's own model computes. In stage 3 DeepSpeed's hooks gather a module's parameters before it
  computes, and free them after it.
Phase 2, backward: `engine.backward` of the loss times its weight and the number of replicas, since DeepSpeed averages.
  It reduces the gradients of every micro-batch, in stage 1 too, and each rank keeps its shard. Paceline adds the shards
  up, in tensors of its own.
Phase 3, step: the shards, clipped by now, go back to DeepSpeed. `engine.step` updates the rank's shard of the
  parameters, and all-gathers them (stages 1 and 2).

With n replicas and P parameters; memory for fp32 with Adam, at its fullest within the step, beside activations,
buckets, and the layer that stage 3 is gathering:

  stage  parameters  their copy  optimizer  gradient  sent by each replica, times (n - 1) / n
  1, 2   4 P         4 P / n     8 P / n    8 P / n   a micro-batch the gradients (twice, as an all-reduce); a step the
                                                      parameters
  3      4 P / n     4 P / n     8 P / n    8 P / n   a micro-batch the parameters twice (all-gather), the gradients
                                                      once (reduce-scatter)

ZeRO was made for 16-bit parameters: it updates an fp32 copy of a rank's shard, and has the shard of the gradient twice
in the step. In a backward stages 1 and 2 have whole gradients, 4 P more.

Follows Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", by
https://deepspeed.readthedocs.io: initialize, backward, step, GatheredParameters and the safe_get_full_* functions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
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
    """Raises SettingError for what cannot work, in the DeepSpeed JSON too, and where the library is missing."""
    merged(config, stage)
    if importlib.util.find_spec("deepspeed") is None:
        raise SettingError(
            'strategy deepspeed needs the library DeepSpeed, which is not installed: pip install "paceline'
            "[deepspeed]\". strategy='fsdp' does the same with PyTorch alone."
        )


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    """One process gathers and reduces nothing. What the DeepSpeed JSON sets besides is done (offload, bf16)."""
    return spec, line("deepspeed", "shards nothing here")


class DeepSpeed(LoopStrategy):
    """stage: 1, 2 or 3; 0 for what the config says, or 2. config: the path of a DeepSpeed JSON."""

    def __init__(self, world: World, device: torch.device, *, stage: int = 0, config: str = "") -> None:
        check(world.size, stage=stage, config=config)
        if world.size == 1:
            process_group.join_alone(device)
        self._config = merged(config, stage)
        self.world, self.device = world, device
        self.mesh = Mesh(device, world.rank, {"shard": world.size})
        self.plan = one_shard(world.size, world.rank)
        self.store = GradientStore(reduces_each=True)
        self.store.factor = world.size  # its engine averages over the processes
        self._engine: Any = None
        self._names: dict[Tensor, str] = {}
        self._trainable: list[Tensor] = []
        self._nodes: list[Any] = []  # autograd's node that accumulates each one's gradient

    # --- setup

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(models) > 1 or len(optimizers) > 1:
            raise ModelError(
                f"strategy deepspeed trains one model with one optimizer; {len(models)} model(s) and "
                f"{len(optimizers)} optimizer(s) were prepared. Put the models into one nn.Module with one optimizer, "
                "or take strategy='fsdp', which does the same for several."
            )
        self.models, self.optimizers = list(models), list(optimizers)
        names = parameter_names(models)
        if self._engine is not None:
            if names != self._names:
                raise ModelError(
                    "strategy deepspeed: parameters were added to the model or taken out of it after `prepare`, where "
                    "DeepSpeed has sliced them. Build the whole model before run.prepare."
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
        # Before DeepSpeed empties parameters (stage 3): a node keeps the shape of its parameter.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._trainable]
        before = replicated_state([model], [optimizer])["optimizers"][0]
        self._engine = Engine(model, optimizer, self._config, self._trainable, self._names)
        if before["state"]:
            self._engine.load_optimizer(before)
        for p in self._trainable:
            self.store.places[p] = self._engine.place(p)
        self.store.others = self.mesh.model

    # --- computing

    def backward(self, work: Backward) -> None:
        if self._engine is None:
            raise UsageError("strategy deepspeed: prepare the optimizer together with its model, before a backward.")
        self._check_frozen()
        pairs = zip(work.losses, work.gradients, strict=True)
        parts = [(loss * gradient).sum().float() for loss, gradient in pairs]
        total = torch.stack(parts).sum()
        total.register_hook(self._check_used)
        self._engine.backward(total, work.retain_graph)
        for p in self._trainable:
            place, part = self.store.places[p], self._engine.gradient(p)
            place.grad = part if place.grad is None else place.grad.add_(part)

    def explain(self, error: Exception) -> Exception | None:
        partitioned = self._engine is not None and self._engine.partitioned
        if not isinstance(error, RuntimeError) or not partitioned or not re.search(r"\(0\)|\[0\]", str(error)):
            return None
        return UsageError(
            "strategy deepspeed: a loss uses parameters where stage 3 has put them away: outside of the forward of "
            "the module that they belong to (as sum(p.square().sum() for p in model.parameters())), or in the "
            "gradient of a gradient. Use strategy='deepspeed:stage=2', where parameters are whole; or, of weight "
            f"decay, let the optimizer do it. (torch: {error})"
        )

    def _check_frozen(self) -> None:
        changed = [name for p, name in self._names.items() if p.requires_grad is not (p in self.store.places)]
        if changed:
            raise UsageError(
                f"strategy deepspeed: requires_grad of {listed(changed)} was changed after `prepare`, where "
                "DeepSpeed has sliced what is trained. Set it before run.prepare, or take strategy='fsdp'."
            )

    def _check_used(self, _: Tensor) -> None:
        """A hook at the root of a backward, before any gradient: refuses one that does not use all parameters."""
        missed = [
            self._names[p] for p, node in zip(self._trainable, self._nodes, strict=True) if not will_execute(node)
        ]
        if missed:
            raise UnusedParameterError(
                f"rank {self.world.rank}: a loss does not reach {listed(missed)}. DeepSpeed updates every "
                "parameter at every step, with a gradient of zeros where there is none, so that weight decay and "
                "momentum would move these. Let one backward reach all parameters (add up the losses), freeze the "
                "others before run.prepare (requires_grad_(False)), or take strategy='fsdp'. (What is recomputed by "
                "torch.utils.checkpoint is seen with use_reentrant=False.)"
            )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.step({p: self.store.places[p].grad for p in self._trainable})

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

    def close(self) -> None:
        self._nodes = []
        if self._engine is not None:
            self._engine.close()


def _check_model(model: nn.Module) -> None:
    check_dense([model], "deepspeed")
    single = [name for name, p in model.named_parameters() if not p.dim()]
    if single:
        raise ModelError(
            f"strategy deepspeed: {single[0]} is a single number without a dimension, which DeepSpeed cannot take. "
            "Give it one (torch.ones(1) in place of torch.tensor(1.0)), or take strategy='fsdp'."
        )
    other = [f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype != torch.float32]
    if other:
        raise ModelError(
            f"strategy deepspeed: parameters in float32 are needed, since what DeepSpeed updates is a copy in float32; "
            f"{other[0]}. Convert the model with model.float(), or take strategy='fsdp'. (precision='bf16' computes "
            "in bfloat16, and leaves parameters as they are; 'bf16-params' does not.)"
        )


_BY_ELEMENT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop")


def _check_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    cls = type(optimizer)
    if cls not in [getattr(torch.optim, name) for name in _BY_ELEMENT]:
        raise ModelError(
            f"strategy deepspeed: {cls.__name__} is not known to update each element by itself, and DeepSpeed hands "
            "an optimizer flat tensors of many parameters' elements, without their shapes and norms. Use one of "
            f"torch.optim's {', '.join(_BY_ELEMENT)}, or take strategy='fsdp'."
        )
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    left = [name for p, name in names.items() if p.requires_grad and not any(p is other for other in updated)]
    if left:
        raise ModelError(
            f"strategy deepspeed: {listed(left)} can be trained, but the optimizer does not have them. Give "
            "them to the optimizer, or freeze them before run.prepare (requires_grad_(False))."
        )
    if any(not any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups):
        raise ModelError(
            f"strategy deepspeed: a parameter group of {cls.__name__} has no parameter that is trained. Leave such a "
            "group out, or take strategy='fsdp'."
        )
