"""Libraries that take a number of devices: in a run of one process, the number is one."""

from __future__ import annotations

import inspect
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


def _with_one_device(original: Any) -> Any:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options)
        for name in ("devices", "num_nodes"):
            if given.arguments.get(name) not in (None, "auto"):
                given.arguments[name] = 1
        original(*given.args, **given.kwargs)

    return __init__
