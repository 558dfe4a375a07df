"""The files that a rank leaves for `paceline verify`: named tensors, whole states, records of steps and rank."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline import plain_state
from paceline.errors import LaunchError
from paceline.observe.digests import digest
from paceline.run import Run, RunParts
from paceline.step.backends import allows_tf32
from paceline.torch_private.core import BatchNormBase


def named_tensors(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The state of the models by name. Names of a second model begin with "1/", and so on."""
    found: dict[str, Tensor] = {}
    for number, state in enumerate(models):
        prefix = f"{number}/" if number else ""
        found |= {prefix + name: value for name, value in state.items() if isinstance(value, Tensor)}
    return found


def save_tensors(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
    """Write the whole file, or none. Tensors without memory are left out.

    Raises:
        LaunchError: the disk takes no more.
    """
    kept = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items() if not tensor.is_meta}
    try:
        save_file(kept, path + ".part", metadata=metadata)
        os.replace(path + ".part", path)
    except (OSError, SafetensorError) as error:
        raise LaunchError(
            f"{path} cannot be written ({error}). The states of all steps lie there until the end: take fewer --steps, "
            "or point TMPDIR to a larger disk."
        ) from None


def has_room(state: Mapping[str, Any], folder: str) -> bool:
    """Whether the disk has room for another step.

    A step needs a state, and as much again for gradients and for what is only compared. A twentieth of the disk is left
    to others.
    """
    _, tensors = plain_state.encode({key: state[key] for key in ("models", "optimizers")})
    needed = 2 * sum(tensor.nbytes for tensor in tensors.values())
    disk = shutil.disk_usage(folder)
    return disk.free - needed > disk.total // 20


def save_state(state: Mapping[str, Any], path: str) -> None:
    """Write the state of models and optimizers."""
    document, tensors = plain_state.encode({key: state[key] for key in ("models", "optimizers")})
    save_tensors(tensors, path, {"document": json.dumps(document)})


def load_state(path: str) -> dict[str, Any] | None:
    """The state that `save_state` has written; None where there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()["document"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state: dict[str, Any] = plain_state.decode(document, tensors)
            return state
    except FileNotFoundError:
        return None


def load_gradients(folder: str, step: int, update: int) -> dict[str, Tensor]:
    """The gradients that the ranks have left together. Where several ranks have a gradient, the first rank's."""
    found: dict[str, Tensor] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"take-{step}-{update}-r*.safetensors"))):
        found = {**load_file(path), **found}
    return found


def new_step_record(epoch: int, number: int) -> dict[str, Any]:
    """The record of a step, still empty."""
    return {
        "epoch": epoch,
        "step": number,
        "ids": [],  # [loader, shard, micro-batch, indices] for each part of a yield
        "data": [],  # [loader, shard, micro-batch, digests of the examples] for each part of a yield
        "lrs": [],  # learning rates of all groups of parameters, at each update
        "outside": [],  # tensors that were changed since the last update of the step before
        "between": [],  # tensors that were changed between two updates of this step
        "apart": [],  # [shard, micro-batch, backward call, term, loss]
        "modules": [],  # layers, in the order of their first call
        "not_finite": [],  # parameters whose gradients are not finite
        "graded": [],  # digests of the gradients before each update
        "others": [],  # states of NumPy's and Python's generators after what was computed
        "options": [],  # the options of each group of parameters, at each update
        "losses": {},  # backward call -> [sum, weight]
        "start": {},  # digests of weights and buffers when the step began
        "after": {},  # digests of weights and buffers after the last update
        "strangers": {},  # digests of tensors with gradients that are in no model
        # Digests of the optimizers' tensors when the step began, where the ranks' states are not alike; None where they
        # are, or where the strategy does not say.
        "optimizer": None,
        "updates": 0,
        "yields": 0,
        "clipped_early": 0,  # how often gradients were changed before the last micro-batch
        "drew": False,  # whether random numbers were drawn that depend on the shard
        "scaled": False,  # whether the loss was scaled in the backward
        "counted": False,  # whether a loss says over how many things it is
        "gathered": False,  # whether the script asked all processes for something before a backward
        # Whether updates follow from the run's own gradients: the script makes them itself, or gives its optimizer a
        # closure.
        "own": False,
    }


def optimizer_options(optimizer: Any) -> list[dict[str, Any]]:
    """Of each group of parameters: the options that are a number, a bool or a tuple."""
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, (bool, int, float, tuple))}
        for group in optimizer.param_groups
    ]


def optimizer_digests(optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> dict[str, str]:
    """Digests of the tensors that the optimizers keep: "PARAMETER KEY" -> digest."""
    return {
        f"{names[parameter]} {key}": digest(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if parameter in names and isinstance(value, Tensor)
    }


def keep_own_options(own: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Put this run's own options of each group of parameters into a state that is to be loaded."""
    for mine, theirs in zip(own["optimizers"], given["optimizers"], strict=True):
        by_name = {name: group for group in mine["groups"] for name in group["params"][:1]}
        theirs["groups"] = [
            {**by_name.get((group["params"] or [""])[0], group), "params": group["params"]}
            for group in theirs["groups"]
        ]


def rank_record(run: Run, parts: RunParts, replicated: bool) -> dict[str, Any]:
    """What a rank's record says beside its steps.

    replicated: each rank holds a whole model.
    """
    plan, spec = parts.strategy.plan, run.settings.strategy
    options = {} if spec is None else spec.options
    known = dict.fromkeys(parts.names.values())
    now: dict[str, nn.Parameter] = {}
    tied: dict[str, nn.Parameter] = {}
    norms: list[str] = []
    dtypes: dict[str, str] = {}
    for number, model in enumerate(parts.models):
        prefix = f"{number}/" if number else ""
        now |= {prefix + name: p for name, p in model.named_parameters()}
        tied |= {prefix + name: p for name, p in model.named_parameters(remove_duplicate=False)}
        dtypes |= {prefix + name: str(x.dtype).removeprefix("torch.") for name, x in model.state_dict().items()
                   if isinstance(x, Tensor)}  # fmt: skip
        norms += [prefix + name for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    return {
        "strategy": None if spec is None else str(spec),
        # Whether the strategy sends numbers with errors.
        "lossy": any(options.get(key, "none") != "none" for key in ("codec", "mixed")),
        "batch_norm": run.settings.batch_norm,
        "norms": norms,  # the names of batch norms
        "dtypes": dtypes,  # of parameters and buffers
        "precision": run.settings.precision,
        "tf32": allows_tf32(run.device),  # whether float32 products may have 10 bits of mantissa
        "shards": plan.shards if plan.in_step else 1,  # of a global batch
        "local": parts.strategy.mesh.independent,  # whether replicas train apart
        "turns": plan.sequential,  # in which a process yields its shards one after the other; 0: at once
        "dealt": 0
        if plan.in_step
        else plan.shards,  # parts of a global batch that a work queue hands out; 0: there is none
        "parameters": list(known),  # that are trained
        "tied": [name for name in tied if name not in now],  # further names of shared parameters
        "late": [name for name in now if replicated and name not in known],  # added after run.prepare
    }
