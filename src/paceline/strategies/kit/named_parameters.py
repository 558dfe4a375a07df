"""What strategies that hold one whole replica in a process share: equal weights at the start, and state by name.

State goes by the user's own parameter names. Names of a second model begin with "1/", of a third with "2/", and so on.
An optimizer's state is {"class": name of its class, "groups": [its options, "params": names], "state": {name: state}}.
It depends on no order of parameters, no device and no world size. Older checkpoints have no "class".

Master weights are tensors that an optimizer updates in place of a model's parameters: copies on the CPU, or shards. The
optimizer's state belongs to them. Its groups hold the user's own parameters, which scripts clip, freeze and read; only
within `in_place_of` do the masters stand there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.errors import CheckpointError, ModelError, UsageError


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Parameter -> name. A tied parameter has its first name."""
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
    """Moves models to the device, and overwrites parameters and buffers by rank 0's, but for those in `sent`. Returns
    all parameters and buffers. Collective."""
    tensors: set[Tensor] = set()
    for model in models:
        model.to(device)
        own = [*model.parameters(), *model.buffers()]
        collectives.broadcast_tensors([tensor for tensor in own if tensor not in sent])
        tensors.update(own)
    return tensors


def check_dense(models: Sequence[nn.Module], strategy: str = "fsdp") -> None:
    """Raises ModelError for layers whose gradients cannot be sharded."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ModelError(
                    f"strategy {strategy}: {name or type(model).__name__} has sparse=True, and sparse gradients cannot "
                    "be sliced. Build it with sparse=False, or, on CPUs, use strategy='ddp' (NCCL adds no sparse "
                    "gradients)."
                )


def named_state(names: Mapping[Tensor, str], optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Tensor]]:
    """The parameters, and the tensors of their optimizers' state, each with a name."""
    named = [(name, p) for p, name in names.items()]
    for number, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            what = f"{names.get(p, '?')} in optimizer {number}"
            named += [(f"{key} of {what}", v) for key, v in sorted(state.items()) if isinstance(v, Tensor)]
    return named


CHANGED_AT_START = "`prepare` made them alike, so they were changed after it on some"


def check_same_bits(named: Sequence[tuple[str, Tensor]], when: str, why: str) -> None:
    """Raises ModelError, on all ranks, where these tensors are not the same bits on all. Collective. why: how they can
    have become different, up to the word before "ranks only"."""
    if differing := collectives.digest_mismatch(named):
        raise ModelError(
            f"the weights differ between ranks {when}: {listed(differing)}. {why} ranks only: load weights and "
            "optimizer states on every rank, or before `prepare`."
        )


@contextmanager
def in_place_of(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Within the block the optimizer's groups hold the masters of those parameters that have one."""
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
    """The whole state, as each process holds it. Tensors are the live ones: copy them before the next step.

    masters: the user's parameter -> its master, for those that have one.
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
    """Until the stack is closed the optimizers hold the masters. Returns the names of parameters and masters."""
    for optimizer in optimizers if masters else ():
        stack.enter_context(in_place_of(optimizer, masters))
    return names_with(names, masters)


def names_with(names: dict[Tensor, str], masters: Mapping[Tensor, Tensor]) -> dict[Tensor, str]:
    """The names of parameters, and of their masters."""
    return names | {masters[p]: name for p, name in names.items() if p in masters}


def unknown_parameters(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> str:
    """The optimizer's parameters that no prepared model has, in words; "" where there are none."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
    return f"{len(unknown)} parameter(s) (shapes {shapes})" if unknown else ""


def check_known(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> None:
    """Raises UsageError where the optimizer has parameters that no prepared model has."""
    if unknown := unknown_parameters(optimizer, known):
        raise UsageError(
            f"{type(optimizer).__name__} has {unknown} that the prepared models did not have: their gradients are not "
            "combined over the processes. Call run.prepare(model) again, on every process, after adding them to the "
            "model."
        )


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    check_known(optimizer, names)
    return named_optimizer(optimizer, names, {names[p]: dict(values) for p, values in optimizer.state.items()})


def named_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: dict[str, Any]
) -> dict[str, Any]:
    """An optimizer as checkpoints hold it, with this state by name."""
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def load_replicated(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    masters: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Loads a whole state. The optimizers' state becomes that of the masters where there are any; the masters' own
    values are not touched. Raises CheckpointError, before it changes anything, where the state is of another
    program."""
    if len(state["models"]) < len(models) or len(state["optimizers"]) < len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(state['models'])} model(s) and {len(state['optimizers'])} optimizer(s), but "
            f"this script prepared {len(models)} and {len(optimizers)}. Prepare what the checkpoint's script prepared, "
            "in the same order."
        )
    for number, model in enumerate(models):
        check_same_model(model, state["models"][number], number)
    with ExitStack() as stack:
        names = _with_masters(stack, parameter_names(models), optimizers, masters or {})
        for number, optimizer in enumerate(optimizers):
            check_same_optimizer(optimizer, state["optimizers"][number], names, number)
        for number, model in enumerate(models):
            model.load_state_dict(state["models"][number])
        for number, optimizer in enumerate(optimizers):
            _load_optimizer(optimizer, state["optimizers"][number], names)


def check_same_model(model: nn.Module, saved: dict[str, Any], number: int = 0) -> None:
    """Raises CheckpointError that names the first entries in which a model and a saved state differ."""
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
            f"the checkpoint is of another model than the prepared {type(model).__name__} (number {number}):\n  "
            f"{shown}\n"
            "Build the model as the checkpoint's script did, or load what fits by hand: "
            "model.load_state_dict(..., strict=False)."
        )


def check_same_class(own: Any, saved: str | None, kind: str, number: int) -> None:
    """Raises CheckpointError where an optimizer or a scheduler is of another class than the saved one (None: an older
    checkpoint does not tell): the state of one class means something else to another."""
    name = type(own).__qualname__
    if saved is not None and saved != name:
        raise CheckpointError(
            f"the checkpoint's {kind} number {number} is of the class {saved}, this script's of {name}: the state of "
            f"one is not that of the other. Prepare {saved}, as the checkpoint's script did; or, to go on with another "
            "one, load the weights alone (run.export, safetensors.torch.load_file) and start anew."
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
            f"the checkpoint's optimizer number {number} updates {len(theirs)} parameters, this script's "
            f"{type(optimizer).__name__} {len(own)}; the first that differ: {', '.join(differing)}. Give the optimizer "
            "the parameters that it had."
        )
    if len(optimizer.param_groups) != len(saved["groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer number {number} has {len(saved['groups'])} parameter groups, this script's "
            f"{type(optimizer).__name__} {len(optimizer.param_groups)}. Make the groups as the checkpoint's script did."
        )


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: dict[Tensor, str]) -> None:
    """Loads by the optimizer's own load_state_dict, which casts tensors to the parameter's dtype. A resumed run must
    have the same bits, so that the tensors are then loaded once more as they were saved."""
    by_name = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
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
                kept = value.to(loaded.device, copy=True)
                if kept.shape == parameter.shape and kept.stride() != parameter.stride():
                    # Fused optimizers go through memory in its order, without looking at strides (channels_last).
                    kept = torch.empty_like(parameter, dtype=kept.dtype, device=kept.device).copy_(kept)
                optimizer.state[parameter][key] = kept
