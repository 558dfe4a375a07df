"""Libraries, and torch's meshes, that take a number of devices: in a run of one process, the number is one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from paceline.launcher.import_hook import after_import
from paceline.observe.patching import Patches

_CLASSES = {
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
}
"""Module -> the class with the arguments `devices` and `num_nodes`."""


def use_one_device() -> None:
    """Make Lightning's Fabric and Trainer use one device, whatever number the script names. Call it before the script
    starts: the libraries import torch themselves."""
    patches = Patches()

    def patch(module: ModuleType) -> None:
        patches.wrap(getattr(module, _CLASSES[module.__name__]), "__init__", _with_one_device)

    for name in _CLASSES:
        after_import(name, patch)


def use_small_meshes() -> None:
    """Make a device mesh with fixed sizes one of one process. Call it after torch has been imported."""
    from torch.distributed import device_mesh

    Patches().wrap(device_mesh, "init_device_mesh", _with_one_process)
    torch_distributed = sys.modules["torch.distributed"]
    if hasattr(torch_distributed, "init_device_mesh"):
        torch_distributed.init_device_mesh = device_mesh.init_device_mesh  # type: ignore[attr-defined]


def _with_one_process(original: Any) -> Any:
    def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *args: Any, **options: Any) -> Any:
        return original(device_type, (1,) * len(mesh_shape), *args, **options)

    return init_device_mesh


def _with_one_device(original: Any) -> Any:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options)
        for name in ("devices", "num_nodes"):
            if given.arguments.get(name) not in (None, "auto"):
                given.arguments[name] = 1
        original(*given.args, **given.kwargs)

    return __init__
