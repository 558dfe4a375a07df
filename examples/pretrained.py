"""Load weights from a file into a model with a different head: load the tensors that fit, and list the rest.

`load_state_dict(weights, strict=False)` alone ignores unknown names silently, and fails if a name exists with another
shape, such as a head for 1000 classes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class WeightsError(Exception):
    """The file is missing, or holds no weights for this model."""


def read(file: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors or torch.save. Tensors only: runs no code from the file."""
    if not file.is_file():
        raise WeightsError(f"--weights {file}: there is no such file. run.export, or torch.save(model.state_dict(), "
                           "FILE), writes one.")  # fmt: skip
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is not a pickle may raise anything
        said = (str(error).splitlines() or [""])[0]
        raise WeightsError(f"--weights {file} is neither safetensors nor a state dict of torch.save. run.export, or "
                           "torch.save(model.state_dict(), FILE), writes one. "
                           f"({type(error).__name__}: {said})") from None  # fmt: skip
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        kind = f"a {type(found).__name__}" + (f" of {', '.join(map(str, found))}" if isinstance(found, dict) else "")
        raise WeightsError(f"--weights {file} holds {kind[:200]}, and no state dict. Save model.state_dict() alone.")
    return found


def load_weights(model: nn.Module, file: Path) -> list[str]:
    """Load the tensors with the same name and shape as in the model. Returns a line for each skipped tensor, and for
    each tensor of the model that keeps its initial values. Raises WeightsError."""
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
