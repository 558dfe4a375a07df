"""The files of a side of `paceline verify`: named tensors and whole states, as safetensors; what a rank is."""

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
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import LaunchError
from paceline.run import Run
from paceline.train import tree


def named(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Models' state by name; that of a second model is marked "1/", and so on."""
    found: dict[str, Tensor] = {}
    for number, state in enumerate(models):
        prefix = f"{number}/" if number else ""
        found |= {prefix + name: value for name, value in state.items() if isinstance(value, Tensor)}
    return found


def save(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
    """Whole, or not at all. Tensors without memory are left out. Raises LaunchError where the disk takes no more."""
    kept = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items() if not tensor.is_meta}
    try:
        save_file(kept, path + ".part", metadata=metadata)
        os.replace(path + ".part", path)
    except (OSError, SafetensorError) as error:
        raise LaunchError(
            f"{path} cannot be written ({error}). The states of all steps lie there until the end: take fewer --steps, "
            "or point TMPDIR to a larger disk."
        ) from None


def room(state: Mapping[str, Any], folder: str) -> bool:
    """Whether the disk has room for another step: for a state, and for as much again, of gradients and of what is only
    compared. A twentieth of the disk is left to others."""
    _, tensors = tree.encode({key: state[key] for key in ("models", "optimizers")})
    needed = 2 * sum(tensor.nbytes for tensor in tensors.values())
    disk = shutil.disk_usage(folder)
    return disk.free - needed > disk.total // 20


def save_state(state: Mapping[str, Any], path: str) -> None:
    """Models and optimizers."""
    document, tensors = tree.encode({key: state[key] for key in ("models", "optimizers")})
    save(tensors, path, {"document": json.dumps(document)})


def load_state(path: str) -> dict[str, Any] | None:
    """None where there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()["document"])
            state: dict[str, Any] = tree.decode(document, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            return state
    except FileNotFoundError:
        return None


def load_gradients(folder: str, step: int, update: int) -> dict[str, Tensor]:
    """What the ranks have left of them together; those that several have, of the first."""
    found: dict[str, Tensor] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"take-{step}-{update}-r*.safetensors"))):
        found = {**load_file(path), **found}
    return found


def fresh(epoch: int, number: int) -> dict[str, Any]:
    """The record of a step. ids, data: [loader or shard, ..., values] for each part of a yield. losses: by backward
    call, [sum, weight]. apart: [shard, micro-batch, call, term, loss]. strangers: digests of tensors with gradients
    that are in no model. modules: in the order in which they were called first. between: what was changed
    between two updates of the step. graded: digests of the gradients before each update. gathered: whether
    all processes were asked for something before a backward. others: states of NumPy's and Python's generators after
    what was computed. options: of each group of parameters, at each update: what its optimizer is set to. own: the
    update was made from the side's own gradients: by the script itself, or by an optimizer that is given a closure."""
    lists: dict[str, Any] = {
        key: []
        for key in (
            "ids",
            "data",
            "lrs",
            "outside",
            "between",
            "apart",
            "modules",
            "not_finite",
            "graded",
            "others",
            "options",
        )
    }
    empty: dict[str, Any] = {"losses": {}, "start": {}, "after": {}, "strangers": {}}
    counts = {
        "updates": 0,
        "yields": 0,
        "clipped_early": 0,
        "drew": False,
        "scaled": False,
        "counted": False,
        "gathered": False,
        "own": False,
    }
    return {"epoch": epoch, "step": number, **lists, **empty, **counts}


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Of each group: what is a number, a bool or a pair of numbers."""
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, (bool, int, float, tuple))}
        for group in optimizer.param_groups
    ]


def keep_options(own: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Into a state that is to be taken over: each group's options as they were."""
    for mine, theirs in zip(own["optimizers"], given["optimizers"], strict=True):
        by_name = {name: group for group in mine["groups"] for name in group["params"][:1]}
        theirs["groups"] = [
            {**by_name.get((group["params"] or [""])[0], group), "params": group["params"]}
            for group in theirs["groups"]
        ]


def about(run: Run, replicated: bool) -> dict[str, Any]:
    """What a rank's record says beside its steps. replicated: each rank holds a whole model."""
    layout, spec = run._strategy.layout, run.settings.strategy
    options = {} if spec is None else spec.options
    known = dict.fromkeys(run._stepper.names.values())
    now: dict[str, nn.Parameter] = {}
    tied: dict[str, nn.Parameter] = {}
    norms: list[str] = []
    dtypes: dict[str, str] = {}
    for number, model in enumerate(run._models):
        prefix = f"{number}/" if number else ""
        now |= {prefix + name: p for name, p in model.named_parameters()}
        tied |= {prefix + name: p for name, p in model.named_parameters(remove_duplicate=False)}
        dtypes |= {prefix + name: str(x.dtype).removeprefix("torch.") for name, x in model.state_dict().items()
                   if isinstance(x, Tensor)}  # fmt: skip
        norms += [prefix + name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return {
        "strategy": None if spec is None else str(spec),
        "lossy": any(options.get(key, "none") != "none" for key in ("codec", "mixed")),
        "batch_norm": run.settings.batch_norm,
        "norms": norms,
        "dtypes": dtypes,
        "precision": run.settings.precision,
        "tf32": bool(run.settings.tf32) and run.device.type == "cuda",
        "shards": layout.shards,
        "local": layout.local,
        "turns": layout.turns,
        "dealt": layout.dealt,
        "parameters": list(known),
        "tied": [name for name in tied if name not in now],
        "late": [name for name in now if replicated and name not in known],
    }
