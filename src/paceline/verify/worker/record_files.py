"""The files of a rank for `paceline verify`: named tensors, whole states, records of steps and of the rank."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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
    """The tensors of the models' states, by name. Names of the second model begin with "1/", and so on."""
    found: dict[str, Tensor] = {}
    for number, state in enumerate(models):
        prefix = f"{number}/" if number else ""
        found |= {prefix + name: value for name, value in state.items() if isinstance(value, Tensor)}
    return found


def save_tensors(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file, atomically. Tensors on the meta device are left out.

    Raises:
        LaunchError: the file cannot be written, for example because the disk is full.
    """
    kept = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items() if not tensor.is_meta}
    try:
        save_file(kept, path + ".part", metadata=metadata)
        os.replace(path + ".part", path)
    except (OSError, SafetensorError) as error:
        raise LaunchError(
            f"cannot write {path} ({error}). The states of all steps are stored there until the end: give fewer "
            "--steps, or point TMPDIR to a larger disk."
        ) from None


def has_disk_space(state: Mapping[str, Any], folder: str) -> bool:
    """Whether the disk has space for another step.

    A step needs twice the size of a state: for the state, and for gradients and files for comparison.
    """
    _, tensors = plain_state.encode({key: state[key] for key in ("models", "optimizers")})
    return 2 * sum(tensor.nbytes for tensor in tensors.values()) < disk_space(folder)


def disk_space(folder: str) -> int:
    """The bytes that may be written to the disk of a folder. A twentieth of the disk stays free."""
    disk = shutil.disk_usage(folder)
    return disk.free - disk.total // 20


def first_value(path: str, value: int) -> int:
    """The value that the first of several processes gave for this file. It decides for all of them."""
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(f"{value}\n")
    while not (text := Path(path).read_text()).endswith("\n"):  # the first has made the file, and not written it yet
        time.sleep(0.001)
    return int(text)


def save_state(state: Mapping[str, Any], path: str) -> None:
    """Write the state of models and optimizers."""
    document, tensors = plain_state.encode({key: state[key] for key in ("models", "optimizers")})
    save_tensors(tensors, path, {"document": json.dumps(document)})


def load_state(path: str) -> dict[str, Any] | None:
    """The state that `save_state` wrote; None if there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()["document"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state: dict[str, Any] = plain_state.decode(document, tensors)
            return state
    except FileNotFoundError:
        return None


def load_gradients(folder: str, step: int, update: int) -> dict[str, Tensor]:
    """Load the gradients that the ranks of a run saved. If several ranks saved a gradient, the first file is used."""
    found: dict[str, Tensor] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"take-{step}-{update}-r*.safetensors"))):
        found = {**load_file(path), **found}
    return found


def new_step_record(epoch: int, number: int) -> dict[str, Any]:
    """An empty record of a step."""
    return {
        "epoch": epoch,
        "step": number,
        "ids": [],  # [loader, shard, micro-batch, indices] for each part of a yield
        "data": [],  # [loader, shard, micro-batch, digests of the examples] for each part of a yield
        "lrs": [],  # learning rates of all groups of parameters, at each update
        "outside": [],  # tensors that were changed since the last update of the previous step
        "between": [],  # tensors that were changed between two updates of this step
        "shard_losses": [],  # [shard, micro-batch, backward call, term, loss]
        "modules": [],  # layers, in the order of their first call
        "not_finite": [],  # parameters with gradients that are not finite
        "gradient_digests": [],  # digests of the gradients before each update
        "others": [],  # states of NumPy's and Python's generators after the computations
        "options": [],  # the options of each group of parameters, at each update
        "losses": {},  # backward call -> [sum, weight]
        "start": {},  # digests of weights and buffers when the step began
        "after": {},  # digests of weights and buffers after the last update
        "unowned_tensors": {},  # digests of trained tensors that are in no model
        # Digests of the optimizers' tensors when the step began, if the strategy refused to return its state because
        # the ranks differ. Otherwise None.
        "optimizer": None,
        "updates": 0,
        "yields": 0,
        "clipped_early": 0,  # number of times that gradients were changed before the last micro-batch
        "drew": False,  # whether random numbers were drawn that depend on the shard
        "scaled": False,  # whether the loss was scaled in the backward
        "counted": False,  # whether a loss comes with a count
        "gathered": False,  # whether the script communicated with all processes before a backward
        # Whether updates use the run's own gradients: the script makes updates itself, or passes a closure to its
        # optimizer.
        "own": False,
    }


def optimizer_options(optimizer: Any) -> list[dict[str, Any]]:
    """For each group of parameters: the options that are a number, a bool or a tuple."""
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, (bool, int, float, tuple))}
        for group in optimizer.param_groups
    ]


def optimizer_digests(optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> dict[str, str]:
    """Digests of the optimizers' state tensors: "PARAMETER KEY" -> digest."""
    return {
        f"{names[parameter]} {key}": digest(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if parameter in names and isinstance(value, Tensor)
    }


def keep_own_options(own: Mapping[str, Any], given: dict[str, Any]) -> None:
    """In the state `given`, replace the options of each group of parameters by those in this run's state, `own`."""
    for mine, theirs in zip(own["optimizers"], given["optimizers"], strict=True):
        by_name = {name: group for group in mine["groups"] for name in group["params"][:1]}
        theirs["groups"] = [
            {**by_name.get((group["params"] or [""])[0], group), "params": group["params"]}
            for group in theirs["groups"]
        ]


def rank_record(run: Run, parts: RunParts, replicated: bool) -> dict[str, Any]:
    """The fields of a rank's record that describe the run, not its steps.

    replicated: each rank holds a complete model.
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
        # Whether the strategy communicates with errors.
        "lossy": any(options.get(key, "none") != "none" for key in ("codec", "mixed")),
        "batch_norm": run.settings.batch_norm,
        "norms": norms,  # the names of batch norms
        "dtypes": dtypes,  # of parameters and buffers
        "precision": run.settings.precision,
        "tf32": allows_tf32(run.device),  # whether float32 products may have 10 bits of mantissa
        "shards": 1 if parts.chunks else plan.shards,  # the number of shards of a global batch
        "local": parts.independent,  # whether replicas are independent between averagings
        "shards_in_sequence": parts.in_sequence,  # number that a process yields in sequence; 0: all at once
        "chunks": parts.chunks,  # the number of chunks of a global batch in a work queue; 0: there is no queue
        "parameters": list(known),  # the names of trained parameters
        "tied": [name for name in tied if name not in now],  # further names of shared parameters
        "late": [name for name in now if replicated and name not in known],  # parameters added after run.prepare
    }
