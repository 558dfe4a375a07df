"""What strategies that hold one whole replica in a process share: the closure, and state by name.

State is named by the user's own parameter names. Those of a second model are marked "1/", of a third "2/", and so on.
An optimizer's state is {"class": its class's name, "groups": [its options, "params": names], "state": {name: its
state}}: independent of the order in which parameters were given to it, of devices and of world size. Older checkpoints
have no "class".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, UsageError
from paceline.strategies.masters import in_place_of


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Parameter -> name. A tied parameter has its first name."""
    names: dict[Tensor, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}/" if number else ""
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


def replicated_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[Tensor, Tensor] | None = None,
) -> dict[str, Any]:
    """The whole state, as each process holds it. Tensors are the live ones: copy before the next step.

    masters: of the parameters that have one, whose the optimizers' state then is (masters.py).
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
    """Until the stack is left the optimizers hold the masters, which have their parameters' names."""
    for optimizer in optimizers if masters else ():
        stack.enter_context(in_place_of(optimizer, masters))
    return names | {masters[p]: name for p, name in names.items() if p in masters}


def strange_parameters(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> str:
    """Which of its parameters no prepared model has, in words; nothing where all are known."""
    strange = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
    return f"{len(strange)} parameter(s) (shapes {shapes})" if strange else ""


def check_known(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> None:
    """Raises UsageError where it has got parameters that no prepared model has."""
    strange = strange_parameters(optimizer, known)
    if strange:
        raise UsageError(
            f"{type(optimizer).__name__} has {strange} that the prepared models did not have: their gradients are not "
            "combined over the processes. Call run.prepare(model) again, on every process, after adding them to the "
            "model."
        )


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    check_known(optimizer, names)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state = {names[p]: dict(values) for p, values in optimizer.state.items()}
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def load_replicated(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    masters: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Puts back a whole state, of the optimizers into the masters' where there are any; the masters' own values are not
    touched. Raises CheckpointError, before it changes anything, where it is of another program."""
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
    """Raises CheckpointError where an optimizer or a scheduler is of another class than the saved one (None: not
    known, of an older checkpoint), whose state means something else."""
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
    """Through the optimizer's own load_state_dict, then tensors once more, since that casts them to the parameter's
    dtype and a resumed run must have the same bits."""
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
