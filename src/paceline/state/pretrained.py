"""Reads weights in the layout of Hugging Face's models into the slices of a prepared model.

    DIRECTORY/
      config.json                             written by the model's own configuration, if it has one
      model-00001-of-00002.safetensors        tensors by name, a shard
      model-00002-of-00002.safetensors
      model.safetensors.index.json            {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}

Weights that fit into one shard are in `model.safetensors`, without an index. The layout is that of
transformers' `save_pretrained` and `from_pretrained` (huggingface_hub, "Serialization").

Reading: rank 0 reads the names, shapes and dtypes, and sends them. Then each process reads its own parts of the
tensors. If a process does not see the files, rank 0 reads one tensor at a time and sends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from paceline.comm import dtensor
from paceline.comm.mesh import world_group
from paceline.comm.slices import boxes_of, whole_box, write_part
from paceline.errors import CheckpointError, warn
from paceline.state.atomic import contents, damaged, explained
from paceline.state.plain_files import open_plain
from paceline.state.sharded_save import on_rank_0
from paceline.state.slice_files import Index, SliceReader
from paceline.strategies.base import Strategy
from paceline.strategies.kit.named_parameters import listed
from paceline.torch_private.core import unsaved_buffers

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CANNOT_READ = "Pretrained weights could not be read from"

_MOST_BYTES = 2**28  # the largest index
_PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_PART = "weights"  # SliceReader's name for the tensors of the directory

Names = Callable[[str], str | None] | Mapping[str, str]
"""From names in the files to names in the model: a function (None: leave the tensor out), or beginnings of names and
their replacements. The longest beginning counts: {"module.": ""}."""


class LoadedNames(NamedTuple):
    """Names in the model that `run.load_pretrained` did not find, or could not place.

    Attributes:
        missing: parameters and buffers that are not in the files.
        unexpected: tensors in the files that the model does not have.
    """

    missing: list[str]
    unexpected: list[str]


class _Matched(NamedTuple):
    pairs: list[tuple[str, str]]  # (name in the files, name in the model)
    missing: list[str]
    unexpected: list[str]


def load(
    path: str | Path, model: nn.Module, number: int, strategy: Strategy, names: Names | None, missing_ok: bool
) -> LoadedNames:
    """Read weights into a prepared model, in place. Collective.

    number: the model's number among the prepared models. The rest: as in `run.load_pretrained`.
    """
    index, sizes = on_rank_0(lambda: read_index(Path(path)))
    together = all(world_group().gather(_sees(sizes)))
    reader = SliceReader(Path(path), index)
    result: list[_Matched] = []

    def write() -> None:
        own = tensors_of(model)  # here, since a stage of a pipeline has no other tensors before
        found = _match(model, own, [key.partition("/")[2] for key in index], names)
        _check(Path(path), model, own, index, found, missing_ok)
        read = _read_own if together else _read_on_rank_0
        read(Path(path), reader, [(f"{_PART}/{name}", own[mine]) for name, mine in found.pairs])
        result.append(found)

    strategy.write_weights(number, write)
    (found,) = result
    if found.unexpected and world_group().rank == 0:
        warn(
            f"run.load_pretrained: {path} has {len(found.unexpected)} tensor(s) that {_class(model)} does not have: "
            f"{listed(found.unexpected)}. They were not loaded."
        )
    return LoadedNames(found.missing, found.unexpected)


def _sees(sizes: Mapping[str, int]) -> bool:
    """Whether this process sees the same files as rank 0."""
    try:
        return all(Path(file).stat().st_size == size for file, size in sizes.items())
    except OSError:
        return False


@torch.no_grad()
def _read_own(path: Path, reader: SliceReader, pairs: list[tuple[str, Tensor]]) -> None:
    """Each process reads its parts. Raises CheckpointError on every process if one cannot read."""
    failure = ""
    try:
        with explained(CANNOT_READ, path):
            for key, target in pairs:
                reader.read(key, dtensor.local(target), boxes_of(target))
    except CheckpointError as error:
        failure = str(error)
    failed = [(rank, text) for rank, text in enumerate(world_group().gather(failure)) if text]
    if failed:
        raise CheckpointError(failed[0][1] if failed[0][0] == 0 else f"rank {failed[0][0]}: {failed[0][1]}")


@torch.no_grad()
def _read_on_rank_0(path: Path, reader: SliceReader, pairs: list[tuple[str, Tensor]]) -> None:
    """Rank 0 reads one whole tensor at a time and sends it."""

    def whole(key: str) -> Tensor:
        with explained(CANNOT_READ, path):
            shape, dtype = reader.form(key)
            made = torch.empty(shape, dtype=dtype)
            reader.read(key, made, whole_box(shape))
        return made

    for key, target in pairs:
        write_part(target, on_rank_0(partial(whole, key)))


# --- names


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name. Tied tensors are listed under each name."""
    return {name: t for name, t in _entries(model) if isinstance(t, Tensor)}


def _entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """As `state_dict`, without its hooks, which refuse a process that has only a part of the model."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + own, p
        for own, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if own not in non_persistent(module):
                yield prefix + own, buffer


def _match(model: nn.Module, own: Mapping[str, Tensor], in_files: list[str], names: Names | None) -> _Matched:
    rename = _renaming(model, own, in_files, names)
    pairs, unexpected, loaded = [], [], set()
    skipped = _skipped(model)
    for name in in_files:
        mine = rename(name)
        if mine is None:
            continue
        if mine in own:
            pairs.append((name, mine))
            loaded.add(own[mine])
        elif not skipped(mine):
            unexpected.append(mine)
    return _Matched(pairs, [name for name, tensor in own.items() if tensor not in loaded], unexpected)


def _renaming(
    model: nn.Module, own: Mapping[str, Tensor], in_files: list[str], names: Names | None
) -> Callable[[str], str | None]:
    if callable(names):
        return names
    if names is not None:
        beginnings = sorted(names, key=len, reverse=True)

        def replaced(name: str) -> str:
            for one in beginnings:
                if name.startswith(one):
                    return names[one] + name[len(one) :]
            return name

        return replaced
    # transformers: a base model's weights are loaded into a model with a head, and the reverse.
    prefix = getattr(model, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return lambda name: name
    prefix += "."

    def based(name: str) -> str:
        if name in own:
            return name
        if prefix + name in own:
            return prefix + name
        return name[len(prefix) :] if name.startswith(prefix) and name[len(prefix) :] in own else name

    return based


def _skipped(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name in the files that the model does not have is expected: buffers that it computes, and, for a model
    of transformers, names that its class lists."""
    computed = {
        f"{name}.{one}" if name else one for name, module in model.named_modules() for one in non_persistent(module)
    }
    patterns = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return lambda name: name in computed or any(pattern.search(name) for pattern in patterns)


def _check(
    path: Path, model: nn.Module, own: Mapping[str, Tensor], index: Index, found: _Matched, missing_ok: bool
) -> None:
    """Raises CheckpointError if the files do not fit the model."""
    faults = []
    for name, mine in found.pairs:
        one, target = index[f"{_PART}/{name}"], own[mine]
        if list(target.shape) != one["shape"]:
            faults.append(f"{mine}: {tuple(target.shape)} in the model, {tuple(one['shape'])} in the files")
        elif target.is_floating_point() and not one["stored"].startswith(("F", "BF")):
            faults.append(f"{mine}: {target.dtype} in the model, {one['stored']} (quantised?) in the files")
    if faults:
        shown = "\n  ".join(faults[:5]) + (f"\n  and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise CheckpointError(
            f"run.load_pretrained: the tensors in {path} do not fit {_class(model)}:\n  {shown}\n"
            "Build the model with the configuration of these files (config.json), or leave tensors out with "
            "names=lambda name: None if ... else name."
        )
    if found.missing and not missing_ok:
        other = f" The files have other names: {listed(found.unexpected)}." if found.unexpected else ""
        raise CheckpointError(
            f"run.load_pretrained: {path} lacks {len(found.missing)} tensor(s) of {_class(model)}: "
            f"{listed(found.missing)}.{other} Map names with names={{'beginning in the files': 'beginning in the "
            "model'}, or pass missing_ok=True to keep the values that these tensors have."
        )


def non_persistent(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not in its state_dict."""
    return {name for name, _ in module.named_buffers(recurse=False)} & unsaved_buffers(module)


def _class(model: nn.Module) -> str:
    return class_of(model).__name__


def class_of(model: nn.Module) -> type[nn.Module]:
    """The script's class of a model. (fully_shard gives a model a class of its own, derived from the script's.)"""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed."))


# --- reading files


def read_index(path: Path) -> tuple[Index, dict[str, int]]:
    """Read the names, shapes and dtypes of the tensors in a directory, or in one file. Reads no tensors.

    Returns (an index for SliceReader, the absolute path of each file -> its size in bytes). Raises CheckpointError.
    """
    index: Index = {}
    sizes: dict[str, int] = {}
    for name, wanted in _files(path).items():
        # Hugging Face's cache has links to files. A link's target must be a plain file.
        file = (path if path.is_file() else path / name).resolve()
        with explained(CANNOT_READ, file), open_plain(file) as opened:
            sizes[str(file)] = opened.seek(0, 2)
        with damaged(file), safe_open(file, framework="pt") as tensors:
            there = set(tensors.keys())
            lacking = sorted((wanted or there) - there)
            if lacking:
                raise CheckpointError(
                    f"{file} lacks {len(lacking)} tensor(s) that {INDEX} places in it: {listed(lacking)}. Download or "
                    "export the files again."
                )
            for one in sorted(there if wanted is None else wanted):
                described = tensors.get_slice(one)
                shape = list(described.get_shape())
                block = [str(file), one, [0] * len(shape), shape]
                index[f"{_PART}/{one}"] = {
                    "dtype": None,
                    "stored": described.get_dtype(),
                    "shape": shape,
                    "blocks": [block],
                }
    return index, sizes


def _files(path: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors to read from it (None: all)."""
    if path.is_file():
        return {path.name: None}
    if not path.is_dir():
        raise CheckpointError(
            f"run.load_pretrained: there is no directory or file {path}. To load a model of the Hugging Face hub, "
            "download it first: path = huggingface_hub.snapshot_download(name)."
        )
    if (path / WHOLE).exists():  # before an index, as in from_pretrained
        return {WHOLE: None}
    if not (path / INDEX).exists():
        raise CheckpointError(
            f"run.load_pretrained: {path} has neither {INDEX} nor {WHOLE}. It has {contents(path)}. Convert other "
            "formats with transformers: AutoModel.from_pretrained(...).save_pretrained(directory)."
        )
    source = (path / INDEX).resolve()
    with explained(CANNOT_READ, source), open_plain(source) as file:
        text = file.read(_MOST_BYTES)
    with damaged(source):
        placed = json.loads(text)["weight_map"]
        files: dict[str, set[str] | None] = {}
        for name, one in placed.items():
            if not isinstance(one, str) or not _PLAIN_NAME.fullmatch(one):
                raise ValueError(f"{name} is in {one!r}, which is no name of a safetensors file in this directory")
            wanted = files.setdefault(one, set())
            assert wanted is not None
            wanted.add(name)
    return files
