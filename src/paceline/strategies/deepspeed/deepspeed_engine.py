"""A DeepSpeed engine with the interface that the strategy needs: gradients as shards, and whole state by name.

A shard here is the part of a parameter that ZeRO keeps on this rank. In stages 1 and 2 the flat tensor of a parameter
group is split evenly, so a shard is a contiguous range of the parameter's elements, and may be empty. In stage 3 it is
a chunk of the parameter, padded at its end.

All calls of DeepSpeed are in this file. DeepSpeed does not document these parts: `engine.optimizer`; its flat tensors
(`single_partition_of_fp32_groups`, `fp32_partitioned_groups_flat`) and the lists of parameters in them; and a
parameter's `_hp_mapping` in stages 1 and 2. Run `make deepspeed` with a new version of DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import CheckpointError, UsageError
from paceline.strategies.kit.named_parameters import check_same_model, check_same_optimizer, listed, named_optimizer
from paceline.strategies.kit.pickling import refuse_deepcopy
from paceline.torch_private.core import version_of


class Engine:
    """An engine around the script's model and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        trainable: Sequence[Tensor],
        names: Mapping[Tensor, str],
    ) -> None:
        self.model, self.optimizer, self.names = model, optimizer, names
        self.device = trainable[0].device
        self.rank = dist.get_rank()
        self._busy = 0  # number of open `_inside` blocks
        self._shapes = {p: p.shape for p in names}
        self._own = [list(group["params"]) for group in optimizer.param_groups]
        self.partitioned = config["zero_optimization"]["stage"] == 3
        zero = {"reduce_bucket_size": max(sum(p.numel() for p in trainable) // 4, 2**20)} | config["zero_optimization"]
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._refuse_direct_backward) for p in trainable]
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)  # read when DeepSpeed is imported
        with _quietly():
            import deepspeed

            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            self._zero3, self._utils = deepspeed.zero, deepspeed.utils
            if not deepspeed.comm.is_initialized():  # uses the existing process group
                deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
            self._engine: Any = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config={**config, "zero_optimization": zero},
                dist_init_required=False,
            )[0]
        self._zero: Any = self._engine.optimizer
        self._flat_groups = [list(group["params"]) for group in optimizer.param_groups]
        self._put(self._own)
        self._versions = {p: version_of(p) for p in names}
        self._refuse()
        for p in trainable:
            if type(p) is nn.Parameter:
                p.__class__ = _ShardedGradient

    def _put(self, groups: Sequence[list[Tensor]]) -> None:
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A block for calls of DeepSpeed. Nothing is refused in it, and the optimizer has DeepSpeed's flat tensors."""
        if not self._busy:
            self._check_untouched()
        self._busy += 1
        _ShardedGradient.busy += 1
        self._put(self._flat_groups)
        try:
            yield
        finally:
            self._put(self._own)
            self._busy -= 1
            _ShardedGradient.busy -= 1
            self._versions = {p: version_of(p) for p in self.names}

    # --- computing

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Compute the loss's gradients, averaged over the ranks, as shards.

        The engine requires a forward before a backward. The loss is already computed, so the engine runs the forward of
        an identity.
        """
        with self._inside():
            self._drop_gradients()
            self._engine.module = nn.Identity()
            try:
                loss = self._engine(loss)
            finally:
                self._engine.module = self.model
            self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def _drop_gradients(self) -> None:
        if not self.partitioned:  # in stage 3 `gradient` has set them to zero
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None

    def place(self, p: Tensor) -> Tensor:
        """(elements of the shard,): a tensor that will hold this rank's shard of the gradient in its `.grad`."""
        if self.partitioned:
            each = p.ds_tensor.numel()  # type: ignore[attr-defined]
            size = min(max(self._shapes[p].numel() - each * self.rank, 0), each)
        else:
            mapping = p._hp_mapping  # type: ignore[attr-defined]
            size = 0 if mapping is None else mapping.lp_fragment_address.numel
        # The tensor's values are never read, so it is one number, expanded.
        place = torch.zeros((), dtype=torch.float32, device=self.device).expand(size)
        p._gradient_of = place  # type: ignore[attr-defined]
        return place

    def _slot(self, p: Tensor) -> Tensor:
        """The memory where DeepSpeed stores this rank's shard of the gradient."""
        if self.partitioned:
            found: Tensor = self._utils.safe_get_local_grad(p)
            return found[: p._gradient_of.numel()]  # type: ignore[attr-defined]
        mapping = p._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return torch.empty(0, device=self.device)
        part: Tensor = mapping.get_lp_grad_fragment(p._index_in_param_group)  # type: ignore[attr-defined]
        return part.view(-1)

    def gradient(self, p: Tensor) -> Tensor:
        """This rank's shard of the gradient of the last backward."""
        slot = self._slot(p).detach()
        if not self.partitioned:
            return slot
        part = slot.clone()
        slot.zero_()  # otherwise DeepSpeed would add the next gradient to it
        return part

    def step(self, gradients: Mapping[Tensor, Tensor | None]) -> None:
        with self._inside():
            for p, part in gradients.items():
                slot = self._slot(p)
                if part is not None and slot.data_ptr() != part.data_ptr():
                    slot.copy_(part)
            self._zero.refresh_fp32_params()  # a script may have changed the parameters
            self._engine.step()

    # --- state

    def _flats(self) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Yield the tensors that the optimizer updates, each with the parameters in it."""
        zero = self._zero
        if self.partitioned:
            yield from zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        else:
            yield from zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)

    def weights(self) -> dict[str, Any]:
        """The model's whole state. In stage 3, ranks other than 0 get parameters without data. Collective."""
        with self._inside():
            state: dict[str, Any] = dict(self.model.state_dict(keep_vars=True))
            made: dict[Tensor, Tensor] = {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if hasattr(value, "ds_id") and value not in made:
                    with self._zero3.GatheredParameters([value]):
                        made[value] = self._on_main(value.detach().clone())
                state[name] = made.get(value, value.detach())
        return state

    def _on_main(self, whole: Tensor) -> Tensor:
        return whole.cpu() if self.rank == 0 else torch.empty_like(whole, device="meta")

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state by parameter name. Collective.

        Tensors with one value per element are whole on rank 0, and have no data on the other ranks.
        """
        state: dict[str, dict[str, Any]] = {}
        with self._inside():
            self._link()
            for flat, parameters in self._flats():
                for p in parameters if self.optimizer.state.get(flat) else ():
                    state[self.names[p]] = {
                        key: self._on_main(self._utils.safe_get_full_optimizer_state(p, key).view(self._shapes[p]))
                        if _per_element(value, flat)
                        else _copied(value)
                        for key, value in self.optimizer.state[flat].items()
                    }
        return named_optimizer(self.optimizer, self.names, state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a whole state, the same on every rank. In stage 3 each rank holds the whole model during the load."""
        if len(state["models"]) < 1 or len(state["optimizers"]) < 1:
            raise CheckpointError("the checkpoint has no model or no optimizer, but this script prepared one of each.")
        saved = state["optimizers"][0]
        check_same_optimizer(self.optimizer, saved, dict(self.names), 0)
        _check_alike(saved["state"], [[self.names[p] for p in parameters] for _, parameters in self._flats()])
        with self._inside(), self._whole():
            check_same_model(self.model, state["models"][0])
            self.model.load_state_dict(state["models"][0])
        self._zero.refresh_fp32_params()
        self.load_optimizer(saved)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if not self.partitioned:
            yield
            return
        with self._zero3.GatheredParameters(list(self.model.parameters()), modifier_rank=0):
            yield

    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load the optimizer's options and state, by parameter name."""
        by_name = {name: group for group in saved["groups"] for name in group["params"]}
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            group.update({k: v for k, v in by_name[self.names[own[0]]].items() if k != "params"})
        with self._inside():
            self.optimizer.state.clear()
            filled = []
            for flat, parameters in self._flats():
                theirs = {p: saved["state"][self.names[p]] for p in parameters if self.names[p] in saved["state"]}
                if theirs:
                    whole = self._by_element(theirs)
                    self.optimizer.state[flat] = {
                        key: torch.zeros_like(flat) if key in whole else _copied(value)
                        for key, value in next(iter(theirs.values())).items()
                    }
                    filled.append((theirs, whole))
            self._link()
            for theirs, whole in filled:
                for p, values in theirs.items():
                    for key in whole:
                        self._write(p, key, values[key].to(self.device, torch.float32))

    def _link(self) -> None:
        """In stages 1 and 2, link each parameter to its optimizer state.

        DeepSpeed does so only once, after the first group's first update, when other groups have no state yet.
        """
        if not self.partitioned and any(self.optimizer.state.get(flat) for flat, _ in self._flats()):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _by_element(self, states: Mapping[Tensor, Mapping[str, Any]]) -> list[str]:
        """The keys of these states that have one value for each element of the parameter.

        If all parameters are 0-dim, "step" has the shape of a parameter too, and is left out.
        """
        return [
            key
            for key in next(iter(states.values()))
            if all(
                isinstance(state[key], Tensor) and state[key].shape == self._shapes[p] for p, state in states.items()
            )
            and (key != "step" or any(self._shapes[p] for p in states))
        ]

    def _write(self, p: Tensor, key: str, whole: Tensor) -> None:
        if not self.partitioned:
            self._utils.safe_set_full_optimizer_state(p, whole, key)
            return
        each = p.ds_tensor.numel()  # type: ignore[attr-defined]
        part = whole.new_zeros(each)
        own = whole.flatten()[each * self.rank : each * (self.rank + 1)]
        part[: own.numel()] = own
        self._utils.safe_set_local_optimizer_state(p, part, key)

    # --- errors for actions that would silently have no effect, or do harm

    def _check_untouched(self) -> None:
        if len(self.optimizer.param_groups) != len(self._own):
            raise UsageError(
                "strategy deepspeed: a parameter group was added to the optimizer after run.prepare, when DeepSpeed "
                "had already sharded the trainable parameters. Add it before run.prepare, or use strategy='fsdp'."
            )
        if not self.partitioned:
            return
        written = [name for p, name in self.names.items() if version_of(p) != self._versions[p]]
        if written:
            raise UsageError(
                f"strategy deepspeed: the script wrote to {listed(written)}. In stage 3 a whole parameter is only a "
                "temporary copy, so the write is lost. Use strategy='deepspeed:stage=2', or write before run.prepare."
            )

    def _refuse_direct_backward(self, _: Tensor) -> None:
        """Raises UsageError for a direct backward of the script. A hook on parameters, before DeepSpeed's hook."""
        if not self._busy:
            raise UsageError(
                "strategy deepspeed: loss.backward() was called directly, so its gradients are not weighted by their "
                "share of the global batch, and DeepSpeed does not get them. Use run.backward(loss) instead."
            )

    def _refuse(self) -> None:
        def refuse(*_: Any) -> None:
            if not self._busy:
                raise UsageError(_IN_SLICES)

        if self.partitioned:
            refuse_deepcopy(self.model, UsageError(NO_COPY))
        kinds: list[Any] = [self.optimizer, *([self.model] if self.partitioned else [])]
        for one in kinds:
            self._hooks.append(one.register_state_dict_pre_hook(refuse))
            self._hooks.append(one.register_load_state_dict_pre_hook(refuse))

    def close(self) -> None:
        vars(self.model).pop("__deepcopy__", None)
        for hook in self._hooks:
            hook.remove()
        groups = self.optimizer.param_groups
        added, groups[len(self._own) :] = groups[len(self._own) :], []  # DeepSpeed would look for their shards
        self._engine.destroy()
        groups.extend(added)


NO_COPY = (
    "strategy deepspeed: a model with sharded parameters (stage 3) cannot be copied with copy.deepcopy, or have "
    "an average of its weights (run.ema). Use strategy='deepspeed:stage=2', where parameters are whole."
)


_IN_SLICES = (
    "strategy deepspeed: optimizer state, and in stage 3 the model's weights, are sharded, and this process has only "
    "its shards. Use run.save and run.restore for all of it, or run.export for the weights. Load pretrained weights "
    "before run.prepare."
)


_GRAD: Any = torch.Tensor.grad


class _ShardedGradient(nn.Parameter):
    """A parameter with its gradient shard stored in another tensor.

    Reading `.grad` raises UsageError, since torch would silently return None.
    """

    busy = 0

    @property
    def grad(self) -> Tensor | None:
        place = self.__dict__.get("_gradient_of")
        if place is not None and place.grad is not None and not _ShardedGradient.busy:
            raise UsageError(
                "strategy deepspeed: a parameter's gradient is sharded, and `.grad` does not have it. Clip with "
                "run.step(optimizer, max_grad_norm=...). For other uses of gradients use strategy='fsdp'."
            )
        found: Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


def _per_element(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check_alike(states: Mapping[str, Mapping[str, Any]], together: Sequence[Sequence[str]]) -> None:
    """Raises CheckpointError if parameters in one flat tensor have made different numbers of steps."""
    for names in together:
        first = names[0]
        for name in names:
            own, other = states.get(name, {}), states.get(first, {})
            steps = {float(state["step"]) for state in (own, other) if isinstance(state.get("step"), Tensor)}
            if sorted(own) != sorted(other) or len(steps) > 1:
                raise CheckpointError(
                    f"strategy deepspeed: in the checkpoint {name} and {first} have different numbers of updates, but "
                    "DeepSpeed has one count per parameter group. Restore it with another strategy (fsdp, ddp)."
                )


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence DeepSpeed within the block. Its errors still raise.

    DeepSpeed prints its set-up to standard output, warns of optimizers that Paceline checks itself, and calls
    collectives that newer versions of torch have deprecated.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logger, before = logging.getLogger("DeepSpeed"), logging.WARNING
    with redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            logger.setLevel(before)
