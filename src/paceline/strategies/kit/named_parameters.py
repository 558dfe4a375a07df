"""Shared by strategies that hold one whole replica per process: equal weights at the start, and state by name.

State is keyed by the user's parameter names. Names of a second model begin with "1/", of a third with "2/", and so on.
An optimizer's state is {"class": name of its class, "groups": [its options, "params": names], "state": {name: state}}.
It does not depend on the order of parameters, the device or the world size. Older checkpoints have no "class".

Master weights are tensors that an optimizer updates in place of a model's parameters: copies on the CPU, or shards. The
optimizer's state belongs to the masters. The optimizer's parameter groups hold the user's parameters, which scripts
clip, freeze and read. Only within `in_place_of` the groups hold the masters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import same_bits
from paceline.comm.dtensor import is_sharded
from paceline.comm.mesh import world_group
from paceline.comm.slices import StoredTensor
from paceline.errors import CheckpointError, ModelError, UsageError


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Parameter -> name. A tied parameter gets its first name."""
    names: dict[Tensor, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}/" if number else ""
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


def listed(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")


def send_models(models: Sequence[nn.Module], device: torch.device, sent: Collection[Tensor] = ()) -> set[Tensor]:
    """Move models to the device, and broadcast parameters and buffers from rank 0, except those in `sent`.

    Returns all parameters and buffers. Collective.
    """
    tensors: set[Tensor] = set()
    for model in models:
        model.to(device)
        own = [*model.parameters(), *model.buffers()]
        world_group().broadcast_tensors([tensor for tensor in own if tensor not in sent])
        tensors.update(own)
    return tensors


def check_dense(models: Sequence[nn.Module], strategy: str = "fsdp") -> None:
    """Raises ModelError for a layer with sparse gradients, since they cannot be sharded."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ModelError(
                    f"strategy {strategy}: {name or type(model).__name__} has sparse=True, and sparse gradients cannot "
                    "be sharded. Build it with sparse=False, or, on CPUs, use strategy='ddp' (NCCL cannot add sparse "
                    "gradients)."
                )


def named_state(names: Mapping[Tensor, str], optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Tensor]]:
    """The parameters, and the tensors of their optimizers' state, as pairs (name, tensor)."""
    named = [(name, p) for p, name in names.items()]
    for number, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            what = f"{names.get(p, '?')} in optimizer {number}"
            named += [(f"{key} of {what}", v) for key, v in sorted(state.items()) if isinstance(v, Tensor)]
    return named


CHANGED_AT_START = "`prepare` made them equal, so the script changed them later, on some"


def check_same_bits(named: Sequence[tuple[str, Tensor]], when: str, why: str) -> None:
    """Raises ModelError, on all ranks, if these tensors are not bit-identical on all ranks. Collective.

    why: how the tensors can have become different. The message continues with "ranks only".
    """
    if differing := same_bits.digest_mismatch(named, world_group()):
        raise ModelError(
            f"the weights differ between ranks {when}: {listed(differing)}. {why} ranks only: load weights and "
            "optimizer states on every rank, or before `prepare`."
        )


@contextmanager
def in_place_of(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Within the block, the optimizer's groups hold the masters in place of their parameters."""
    own = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, own, strict=True):
        group["params"] = [masters.get(p, p) for p in parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, own, strict=True):
            group["params"] = parameters


def replicated_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[Tensor, Tensor] | None = None,
) -> dict[str, Any]:
    """The whole state of models and optimizers. Tensors are not copied: copy them before the next step.

    masters: the user's parameter -> its master, if it has one.
    """
    with ExitStack() as stack:
        names = _with_masters(stack, parameter_names(models), optimizers, masters or {})
        return {
            "models": [dict(model.state_dict()) for model in models],
            "optimizers": [_optimizer_state(optimizer, names) for optimizer in optimizers],
        }


def _with_masters(
    stack: ExitStack,
    names: dict[Tensor, str],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[Tensor, Tensor],
) -> dict[Tensor, str]:
    """Put the masters into the optimizers until the stack closes. Returns the names of parameters and masters."""
    for optimizer in optimizers if masters else ():
        stack.enter_context(in_place_of(optimizer, masters))
    return names_with(names, masters)


def names_with(names: dict[Tensor, str], masters: Mapping[Tensor, Tensor]) -> dict[Tensor, str]:
    """The names of parameters, and of their masters."""
    return names | {masters[p]: name for p, name in names.items() if p in masters}


def unknown_parameters(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> str:
    """A description of the optimizer's parameters that are in no prepared model; "" if there are none."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
    return f"{len(unknown)} parameter(s) (shapes {shapes})" if unknown else ""


def check_known(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> None:
    """Raises UsageError if the optimizer has parameters that are in no prepared model."""
    if unknown := unknown_parameters(optimizer, known):
        raise UsageError(
            f"{type(optimizer).__name__} has {unknown} that the prepared models did not have: their gradients are not "
            "combined over the processes. Call run.prepare(model) again, on every process, after you add them to the "
            "model."
        )


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    check_known(optimizer, names)
    return named_optimizer(optimizer, names, {names[p]: dict(values) for p, values in optimizer.state.items()})


def named_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: dict[str, Any]
) -> dict[str, Any]:
    """An optimizer in the format of a checkpoint. state: the optimizer's state by parameter name."""
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def load_replicated(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    masters: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Load a whole state. Raises CheckpointError, before any change, if the state is from a different program.

    StoredTensors are read from their files, into the models' memory where possible. With masters, the optimizers' state
    becomes that of the masters. The masters' values do not change.
    """
    if len(state["models"]) < len(models) or len(state["optimizers"]) < len(optimizers):
        raise CheckpointError(
            f"the checkpoint has {len(state['models'])} model(s) and {len(state['optimizers'])} optimizer(s), but "
            f"this script prepared {len(models)} and {len(optimizers)}. Prepare the same models and optimizers as in "
            "the script that wrote the checkpoint, in the same order."
        )
    for number, model in enumerate(models):
        check_same_model(model, state["models"][number], number)
    with ExitStack() as stack:
        names = _with_masters(stack, parameter_names(models), optimizers, masters or {})
        for number, optimizer in enumerate(optimizers):
            check_same_optimizer(optimizer, state["optimizers"][number], names, number)
        for number, model in enumerate(models):
            model.load_state_dict(_read_in_place(model.state_dict(), state["models"][number]))
        for number, optimizer in enumerate(optimizers):
            _load_optimizer(optimizer, state["optimizers"][number], names)


def _read_in_place(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Read stored tensors into a model's own tensors, so that no second copy is in memory. Returns the loaded state."""
    loaded: dict[str, Any] = dict(saved)
    for name, value in saved.items():
        if isinstance(value, StoredTensor):
            mine = own[name]
            if mine.dtype == value.dtype:
                value.read(mine)
                loaded[name] = mine
            else:
                loaded[name] = value.like(mine)
    return loaded


def read_stored(saved: Mapping[str, Mapping[str, Any]], by_name: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """An optimizer's saved state by parameter name, with its StoredTensors read. by_name: name -> own parameter."""
    return {
        name: {
            key: value.like(by_name.get(name)) if isinstance(value, StoredTensor) else value
            for key, value in values.items()
        }
        for name, values in saved.items()
    }


def check_same_model(model: nn.Module, saved: dict[str, Any], number: int = 0) -> None:
    """Raises CheckpointError with the first differences between a model and a saved state."""
    own = model.state_dict()
    faults = []
    for name in [*own, *(name for name in saved if name not in own)]:
        if name not in saved:
            faults.append(f"{name}: in the model, not in the checkpoint")
        elif name not in own:
            faults.append(f"{name}: in the checkpoint, not in the model")
        elif isinstance(own[name], Tensor) and own[name].shape != saved[name].shape:
            faults.append(
                f"{name}: {tuple(own[name].shape)} in the model, {tuple(saved[name].shape)} in the checkpoint"
            )
    if faults:
        shown = "\n  ".join(faults[:5]) + (f"\n  and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise CheckpointError(
            f"the checkpoint's model differs from the prepared {type(model).__name__} (number {number}):\n"
            f"  {shown}\n"
            "Build the same model as the script that wrote the checkpoint; or load only matching entries with "
            "model.load_state_dict(..., strict=False)."
        )


def check_same_class(own: Any, saved: str | None, kind: str, number: int) -> None:
    """Raises CheckpointError if an optimizer or a scheduler has a different class than in the checkpoint.

    The two classes would interpret the state differently. saved: the class in the checkpoint; None if it is an older
    checkpoint without classes.
    """
    name = type(own).__qualname__
    if saved is not None and saved != name:
        raise CheckpointError(
            f"{kind} number {number} is {saved} in the checkpoint, but {name} in this script, which cannot load its "
            f"state. Prepare {saved}. To continue with {name}, load only the weights (run.export, "
            "safetensors.torch.load_file) and start a new run."
        )


def check_same_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: dict[Tensor, str], number: int
) -> None:
    check_same_class(optimizer, saved.get("class"), "optimizer", number)
    own = [names[p] for group in optimizer.param_groups for p in group["params"]]
    theirs = [name for group in saved["groups"] for name in group["params"]]
    if sorted(own) != sorted(theirs):
        differing = sorted(set(own) ^ set(theirs))[:5]
        raise CheckpointError(
            f"optimizer number {number} ({type(optimizer).__name__}) updates {len(theirs)} parameters in the "
            f"checkpoint, but {len(own)} in this script. The first that differ: {', '.join(differing)}. Give the "
            "optimizer the same parameters as in the script that wrote the checkpoint."
        )
    if len(optimizer.param_groups) != len(saved["groups"]):
        raise CheckpointError(
            f"optimizer number {number} ({type(optimizer).__name__}) has {len(saved['groups'])} parameter groups in "
            f"the checkpoint, but {len(optimizer.param_groups)} in this script. Make the same groups as the script "
            "that wrote the checkpoint."
        )


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: dict[Tensor, str]) -> None:
    """Load a saved optimizer, without a change of bits.

    The optimizer's load_state_dict casts tensors to the parameter's dtype. A resumed run must have the same bits, so
    the saved tensors then replace the cast tensors. Sharded tensors were made for this optimizer, and are not copied.
    """
    by_name = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    saved = {**saved, "state": read_stored(saved["state"], by_name)}
    index = {name: number for number, name in enumerate(n for group in saved["groups"] for n in group["params"])}
    own_order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    groups = []
    for own_group, group in zip(optimizer.param_groups, saved["groups"], strict=True):
        groups.append({**group, "params": [index[names[p]] for p in own_group["params"]]})
    state = {index[name]: saved["state"][name] for name in own_order if name in saved["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, values in saved["state"].items():
        parameter = by_name[name]
        for key, value in values.items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor):
                kept = value if is_sharded(value) else value.to(loaded.device, copy=True)
                if kept.shape == parameter.shape and kept.stride() != parameter.stride():
                    # Fused optimizers process memory in order and ignore strides (channels_last).
                    kept = torch.empty_like(parameter, dtype=kept.dtype, device=kept.device).copy_(kept)
                optimizer.state[parameter][key] = kept
