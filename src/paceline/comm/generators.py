"""Save and restore the random generators that the threads of a process share: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of all generators, in a form that checkpoints can hold."""
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device is not None and device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore a state from `get_state`."""
    torch.default_generator.set_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if "device" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
