"""Writes a model's weights as Hugging Face's `save_pretrained` does: shards, an index, and the model's configuration.

pretrained.py shows the layout. Sharded tensors are gathered one shard of the export at a time, so no host holds more
than the largest of a shard and a tensor besides its own part. Rank 0 writes.

Until the export is complete, its files are in a scratch directory. Then they are moved beside the weights of an older
export, under unused names. Renaming the only shard, or the index, switches to the new weights. The older weights are
removed last. A reader takes the only shard if there is one, otherwise the index, as `from_pretrained` does. So after a
crash it finds the older weights or the new ones, complete. The configuration is replaced before the switch.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import dtensor
from paceline.comm.mesh import world_group
from paceline.comm.slices import HeldTensor
from paceline.errors import SettingError
from paceline.state.atomic import explained, make_directory, remove_debris, scratch, sync
from paceline.state.checkpoint import CANNOT_EXPORT
from paceline.state.plain_files import checksums_of, write_checksums
from paceline.state.pretrained import INDEX, WHOLE, class_of, tensors_of
from paceline.state.sharded_save import on_rank_0
from paceline.state.snapshot import save_tensors
from paceline.strategies.base import Strategy

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_WEIGHTS = re.compile(r"model((-[0-9a-f]{8})?-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.sha256)?")


def bytes_of(shards: str | int) -> int:
    """The size of a shard: a number of bytes, or "5GB" (10**9 bytes each), "500MB", "5GiB". Raises SettingError."""
    found = _SIZE.fullmatch(shards) if isinstance(shards, str) else None
    if found is not None:
        unit = found[2].upper()
        size = float(found[1]) * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit.removesuffix("I")]
    else:
        size = shards if isinstance(shards, int) and not isinstance(shards, bool) else 0
    if size < 1:
        raise SettingError(
            f'run.export(shards={shards!r}): give the largest size of a shard, such as "5GB" or "500MB".'
        )
    return int(size)


def export(directory: str | Path, model: nn.Module, number: int, strategy: Strategy, most: int) -> None:
    """Write a prepared model into a directory. Collective. Raises CheckpointError on every process.

    number: the model's number among the prepared models. most: the largest size of a shard, in bytes.
    """
    state = strategy.held_state() or strategy.state_dict()
    tensors = {
        name: value for name, value in state["models"][number].items() if isinstance(value, (Tensor, HeldTensor))
    }
    for name in _tied(model):
        tensors.pop(name, None)
    shards = list(_split(tensors, most))
    target = Path(directory).absolute()
    with ExitStack() as stack:
        folder: list[Path] = []  # on rank 0

        def begin() -> None:
            with explained(CANNOT_EXPORT, target):
                if target.exists() and not target.is_dir():
                    raise NotADirectoryError(20, "it is a file, and with shards= the path is a directory")
                make_directory(target.parent)
                remove_debris(target.parent)
                folder.append(stack.enter_context(scratch(target.parent, target.name)))
                _write_config(model, folder[0])

        on_rank_0(begin)
        for place, names in enumerate(shards):
            whole = {name: _whole(tensors[name]) for name in names}

            def write(file: str = _file(place, len(shards)), whole: Mapping[str, Tensor] = whole) -> None:
                with explained(CANNOT_EXPORT, target):
                    save_tensors(folder[0] / file, whole, {"format": "pt"})

            on_rank_0(write)
        on_rank_0(lambda: _commit(folder[0], target, tensors, shards))


def _file(place: int, count: int, mark: str = "") -> str:
    return WHOLE if count == 1 else f"model{mark}-{place + 1:05d}-of-{count:05d}.safetensors"


def _split(tensors: Mapping[str, Any], most: int) -> Iterator[list[str]]:
    """The names of each shard's tensors, in order. A tensor that is larger than a shard is a shard by itself."""
    names: list[str] = []
    size = 0
    for name, value in tensors.items():
        own = _bytes(value)
        if names and size + own > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def _bytes(value: Tensor | HeldTensor) -> int:
    """The size of the whole tensor."""
    form = value.meta if isinstance(value, HeldTensor) else value
    return form.numel() * form.element_size()


def _whole(value: Tensor | HeldTensor) -> Tensor:
    """The whole tensor on rank 0; other ranks' results have no values. Collective for tensors in parts."""
    if not isinstance(value, HeldTensor):
        return dtensor.whole_on_main(value) if dtensor.is_sharded(value) else value
    # A stage of a pipeline has the whole tensor.
    sources = [rank for rank, has in enumerate(world_group().gather(bool(value.boxes))) if has]
    form = value.meta
    whole = value.local if value.boxes else torch.empty(form.shape, dtype=form.dtype, device=value.local.device)
    if sources and sources != [0]:
        world_group().broadcast_tensors([whole], sources[0])
    return whole if world_group().rank == 0 else form


def _tied(model: nn.Module) -> set[str]:
    """The names that transformers leaves out, since `from_pretrained` ties them: `_tied_weights_keys` of its models.

    Of each tied parameter one name stays. Other models' tied weights are written under each of their names.
    """
    own = tensors_of(model)
    patterns = [
        re.compile(f"{re.escape(prefix)}({one})")
        for name, module in model.named_modules()
        for prefix in [f"{name}." if name else ""]
        for one in getattr(module, "_tied_weights_keys", None) or ()
    ]
    users: dict[Tensor, list[str]] = {}
    for name, tensor in own.items():
        users.setdefault(tensor, []).append(name)
    left_out: set[str] = set()
    for names in users.values():
        declared = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
        left_out.update(declared if len(declared) < len(names) else declared[1:])
    return left_out


def _write_config(model: nn.Module, folder: Path) -> None:
    """Write the model's configurations by their own `save_pretrained`, if they have it."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            config = copy.deepcopy(config)
            if name == "config" and hasattr(config, "architectures"):
                config.architectures = [class_of(model).__name__]
            config.save_pretrained(folder)


def _commit(folder: Path, target: Path, tensors: Mapping[str, Any], shards: Sequence[Sequence[str]]) -> None:
    """Write the index, move all files to the directory, and remove the weights of an older export."""
    with explained(CANNOT_EXPORT, target):
        last = folder / WHOLE
        files = [last.name]
        if len(shards) > 1:
            files = _rename_unlike_the_older(folder, target, len(shards))
            placed = {name: file for names, file in zip(shards, files, strict=True) for name in names}
            total = {"total_size": sum(map(_bytes, tensors.values()))}
            last = folder / INDEX
            last.write_text(json.dumps({"metadata": total, "weight_map": placed}, indent=2) + "\n", "utf-8")
        made = [one for one in folder.iterdir() if one != last]
        checksums = write_checksums(last, [folder / file for file in files] + [last] * (len(shards) > 1))
        for one in [*made, last, checksums]:
            sync(one)
        make_directory(target)
        checksums_of(target / last.name).unlink(missing_ok=True)
        for one in made:
            os.replace(one, target / one.name)
        sync(target)  # before the rename of the file that names them
        for one in (last, checksums):
            os.replace(one, target / one.name)
        sync(target)
        new = {last.name, checksums.name, *files}
        for old in [one for one in os.listdir(target) if _WEIGHTS.fullmatch(one) and one not in new]:
            (target / old).unlink()
        sync(target)


def _rename_unlike_the_older(folder: Path, target: Path, count: int) -> list[str]:
    """Rename the shards if the directory has shards of these names. Returns the names."""
    files = [_file(place, count) for place in range(count)]
    if not any((target / file).exists() for file in files):
        return files
    mark = f"-{secrets.token_hex(4)}"
    marked = [_file(place, count, mark) for place in range(count)]
    for file, name in zip(files, marked, strict=True):
        (folder / file).rename(folder / name)
    return marked
