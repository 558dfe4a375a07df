"""The devices that one process computes on: the option `devices` of data_parallel, mirrored and central_storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import SettingError


def check_devices(strategy: str, size: int | None, given: str | Sequence[str], shards: int | None = None) -> None:
    """Raises SettingError for several processes, for invalid device names, and for more devices than a reproducible run
    has shards. Does not check whether this machine has the devices."""
    if size not in (1, None):
        raise SettingError(
            f"strategy {strategy} runs in one process, but there are {size}. Start one process (--nproc 1), or use "
            "strategy='ddp'."
        )
    names = _names(strategy, given)
    text = ",".join(names)
    for name in names:
        _read(f"strategy {strategy}: devices={text!r}", name)
    check_shards(strategy, names, shards)


def check_shards(strategy: str, devices: Sequence[Any], shards: int | None) -> None:
    """Raises SettingError if a reproducible run has fewer shards than devices. shards: None if not reproducible."""
    if shards is not None and shards < len(devices):
        raise SettingError(
            f"reproducible={shards}: a global batch has {shards} shards, fewer than the {len(devices)} devices of "
            f"strategy {strategy}. Name at most {shards} devices, or set reproducible={len(devices)} or more (a "
            "different number gives different bits)."
        )


def devices_of(strategy: str, given: str | Sequence[str], first: torch.device) -> list[torch.device]:
    """The devices that `given` names ("cuda:0,cuda:1", "cpu+cpu", a list). If it is empty: all accelerators, or the
    run's device if that is not an accelerator.

    first: the run's device, which has the script's model and evaluates it. Raises SettingError.
    """
    names = _names(strategy, given)
    text = ",".join(names)
    where = f"strategy {strategy}: devices={text!r}"
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    if not names and kind is not None and first.type == kind.type:
        names = [f"{kind.type}:{(first.index or 0) + i}" for i in range(count - (first.index or 0))]
    devices = [_device(where, name, kind, count) for name in names or [str(first)]]
    if len({device.type for device in devices}) > 1:
        raise SettingError(f"{where} are of several types. Name devices of one type.")
    if devices[0] != (own := _with_index(first)):
        raise SettingError(
            f"{where}: the first device holds the script's model, so it must be the run's device, {own}. Set "
            f"device={str(devices[0])!r} too (paceline run --device {devices[0]}), or put {own} first."
        )
    return devices


def _names(strategy: str, given: str | Sequence[str]) -> list[str]:
    parts: Any = given.replace("+", ",").split(",") if isinstance(given, str) else given
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, (str, torch.device)) for part in parts):
        raise SettingError(f"strategy {strategy}: devices={given!r}: use device names, such as cuda:0,cuda:1.")
    return [str(part).strip() for part in parts if str(part).strip()]


def _device(where: str, name: str, kind: torch.device | None, count: int) -> torch.device:
    device = _read(where, name)
    if device.type == "cpu":
        return torch.device("cpu")
    if kind is None or device.type != kind.type:
        raise SettingError(f"{where}: {name} does not exist: this machine has {kind or 'no accelerator'}.")
    device = _with_index(device)
    if device.index >= count:
        raise SettingError(f"{where}: {name} does not exist: {count} {kind.type} devices are visible.")
    return device


def _read(where: str, name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise SettingError(f"{where}: {str(error).splitlines()[0]}") from None


def _with_index(device: torch.device) -> torch.device:
    """Add a missing index: `cuda` is the current device."""
    if device.type == "cpu":
        return torch.device("cpu")
    index: int | None = device.index
    return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)
