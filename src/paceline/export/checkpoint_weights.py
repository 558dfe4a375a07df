"""Find the requested model in a checkpoint, and return its tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import CheckpointError, ExportError, SettingError, suggest
from paceline.state import checkpoint
from paceline.torch_private.core import METADATA

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MODEL = "model_"  # prefix of the models in a checkpoint; a number follows, in the order of run.prepare
_MOST_NAMES = 8  # maximum number of names in a message


class Weights(NamedTuple):
    """A model's state_dict from a checkpoint, on the host."""

    state: OrderedDict[str, Any]  # tensors, and the results of modules' get_extra_state
    model: str  # its name in the checkpoint: model_0, or that of a tracked object
    path: Path  # the checkpoint
    damage: list[str]  # a line for each damaged file of newer checkpoints, which were skipped

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in the state."""
        return {name: value for name, value in self.state.items() if isinstance(value, Tensor)}

    @property
    def others(self) -> list[str]:
        """The names of the entries that are not tensors."""
        return [name for name, value in self.state.items() if not isinstance(value, Tensor)]

    @property
    def dtypes(self) -> str:
        """The dtypes of the floating-point tensors, for messages: "float32", "bfloat16 and float32"."""
        found = {str(value.dtype).removeprefix("torch.") for value in self.tensors.values() if _real(value)}
        return " and ".join(sorted(found)) or "no floating-point numbers"


def read_weights(directory: Path, name: str | None = None, prefix: str = "") -> Weights:
    """Read one model from the newest whole checkpoint in `directory`, or from `directory` itself if it is a checkpoint.

    name: the model's name in the checkpoint (model_1 or 1), or the name of a tracked object such as an EMA. None: the
        only model in the checkpoint.
    prefix: keep only entries with this prefix, and remove the prefix from their names.

    Raises CheckpointError if there is no whole checkpoint, and SettingError if it contains no such model.
    """
    _refuse_file(directory)
    found = checkpoint.find(directory)
    models = [part for part in checkpoint.part_names(found.path) if part.startswith(_MODEL)]
    chosen = f"{_MODEL}{name}" if name is not None and name.isdecimal() else name
    if chosen is None:
        if len(models) != 1:
            raise SettingError(f"{found.path} contains {_several(found.path, models)} Choose one: --name {models[-1]}.")
        chosen = models[0]
    state = _part(found.path, chosen) if chosen in models else _tracked(found.path, chosen, models)
    kept = OrderedDict((key.removeprefix(prefix), value) for key, value in state.items() if key.startswith(prefix))
    if not any(isinstance(value, Tensor) for value in kept.values()):
        raise SettingError(
            f"--prefix {prefix!r}: no tensor of {chosen} in {found.path} has this prefix. It has {listed(list(state))}."
        )
    if not prefix and hasattr(state, METADATA):
        setattr(kept, METADATA, getattr(state, METADATA))
    return Weights(kept, chosen, found.path, found.damage)


def in_dtype(weights: Weights, dtype: str | None) -> Weights:
    """Convert the floating-point tensors to `dtype`, such as "fp16". None: no change. Raises ExportError if a finite
    number would become infinite."""
    if dtype is None:
        return weights
    wanted = DTYPES[dtype]
    state = copy.copy(weights.state)  # keeps the _metadata attribute of a module's state_dict
    for name, value in weights.tensors.items():
        if _real(value):
            state[name] = value.to(wanted)
            if torch.isfinite(value).all() and not torch.isfinite(state[name]).all():
                raise ExportError(
                    f"--dtype {dtype}: {name} contains {value.abs().max().item():.3g}, and the largest number of "
                    f"{dtype} is {torch.finfo(wanted).max:.4g}. Export as bf16, which has the range of fp32, or leave "
                    "out --dtype."
                )
    return weights._replace(state=state)


def listed(names: list[str]) -> str:
    """Names for a message: "a, b, c and 12 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "nothing") + more


def _refuse_file(path: Path) -> None:
    if path.is_file():
        exported = path.suffix in (".safetensors", ".pt", ".pth", ".onnx", ".bin", ".ckpt")
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a directory. "
            + ("It looks like weights that were already exported. " if exported else "")
            + "Give the directory that was passed to run.save(), or one checkpoint in it (step-00000042)."
        )


def _part(path: Path, name: str) -> Any:
    return checkpoint.read(path, only={name})[1][name]


def _tracked(path: Path, name: str, models: list[str]) -> Any:
    """The state of a tracked object. Raises SettingError if no object has this name, or the state is not a model's."""
    tracked = _part(path, "tracked") if "tracked" in checkpoint.part_names(path) else {}
    if name not in tracked:
        raise SettingError(f"--name {name!r}: {path} contains no such model. {suggest(name, [*models, *tracked])}")
    state = tracked[name]
    if isinstance(state, Mapping) and state.keys() >= {"model", "weights"} and state["weights"]:  # an AveragedWeights
        model = _part(path, f"{_MODEL}{state['model']}")
        averages = {key: value.to(model[key].dtype) for key, value in state["weights"].items()}
        return OrderedDict((key, averages.get(key, value)) for key, value in model.items())
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise SettingError(
            f"--name {name!r}: the object that run.track({name}=...) saved in {path} is not a model's state_dict "
            f"(names and tensors). Models in the checkpoint: {', '.join(models)}."
        )
    return OrderedDict(state)


def _several(path: Path, models: list[str]) -> str:
    """Describe the models: "2 models, in ...: model_0 (12 tensors, 3,402 numbers, first 'encoder.weight'); ..."."""
    if not models:
        raise CheckpointError(f"{path} contains no model: its script prepared none.")
    parts = checkpoint.read(path, only=set(models))[1]
    described = []
    for name in models:
        tensors = {key: value for key, value in parts[name].items() if isinstance(value, Tensor)}
        numbers = sum(value.numel() for value in tensors.values())
        described.append(f"{name} ({len(tensors)} tensors, {numbers:,} numbers, first {next(iter(tensors), None)!r})")
    return f"{len(models)} models, in the order of run.prepare: {'; '.join(described)}."


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
