"""Weights from a file into a model whose head is another: what fits is loaded, and the rest is listed.

`load_state_dict(weights, strict=False)` alone passes over names in silence, and fails where a name is there and its
shape is another, as that of a head for 1000 classes is.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class WeightsError(Exception):
    """The file is not there, or holds nothing for this model."""


def read(file: Path) -> dict[str, Tensor]:
    """A state dict, from safetensors or from torch.save: tensors only, nothing in the file is run."""
    if not file.is_file():
        raise WeightsError(f"--weights {file}: there is no such file. run.export, or torch.save(model.state_dict(), "
                           "FILE), writes one.")  # fmt: skip
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no pickle makes its reader fail in any way
        said = (str(error).splitlines() or [""])[0]
        raise WeightsError(f"--weights {file} is neither safetensors nor a state dict of torch.save. run.export, or "
                           "torch.save(model.state_dict(), FILE), writes one. "
                           f"({type(error).__name__}: {said})") from None  # fmt: skip
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        kind = f"a {type(found).__name__}" + (f" of {', '.join(map(str, found))}" if isinstance(found, dict) else "")
        raise WeightsError(f"--weights {file} holds {kind[:200]}, and no state dict. Save model.state_dict() alone.")
    return found


def load_weights(model: nn.Module, file: Path) -> list[str]:
    """Loads the tensors that the model has under the same name with the same shape. Returns a line for each that was
    skipped, and for each of the model's own that keeps its first values. Raises WeightsError."""
    given, own = read(file), model.state_dict()
    fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise WeightsError(f"--weights {file}: no name and shape is one of the model's. The file has {names(given)}; "
                           f"the model has {names(own)}.")  # fmt: skip
    model.load_state_dict(fitting, strict=False)
    lines = []
    for name in given.keys() - fitting.keys():
        shape = f"{tuple(given[name].shape)} in the file"
        lines.append(f"{name}: {shape}, " + (f"{tuple(own[name].shape)} here" if name in own else "not in the model"))
    return sorted([*lines, *(f"{name}: not in the file" for name in own.keys() - given.keys())])


def names(state: dict[str, Tensor]) -> str:
    shown = [f"{name} {tuple(value.shape)}" for name, value in list(state.items())[:3]]
    return ", ".join(shown) + (f" and {len(state) - 3} more" if len(state) > 3 else "")
