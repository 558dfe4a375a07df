"""Write predictions to files as they are computed, for results that do not fit in memory.

    predictions/
      0000000000-0000002730.safetensors   results of examples 0 to 2730, one row each; "index" has their numbers
      0000000000-0000002730.jsonl         results that are not tensors, for the same examples, one line each
      ...
      index.json                          names, shapes and dtypes, and the files in the order of the examples
      unfinished.json                     instead of index.json, until the pass is complete

Phase 1: rank 0 inspects the folder, and all processes agree on the examples that have no complete file there.
Phase 2: each global batch of the loader is a block, and each process writes one file per block. The loader's
micro-batches are the examples that a process computes at once. A process's part of a block is contiguous in the data
set, so sorting the files by name gives the order of the examples. If several processes see the same examples (pipeline
stages, tensor parallelism), only the first of them writes. A file is written under a temporary name, and renamed when
it is complete.
Phase 3: rank 0 writes index.json, and removes unfinished.json.

unfinished.json records a hash of the weights and the number of examples, so that results of different passes are not
mixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.comm.mesh import data_group, world_group
from paceline.data.fetch import is_stream
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, PacelineError, SettingError, UsageError
from paceline.metrics.predict import TENSOR, flatten
from paceline.state.atomic import contents, explained, make_directory, write_whole
from paceline.state.snapshot import save_tensors
from paceline.step.precision import to_fp32

INDEX, UNFINISHED = "index.json", "unfinished.json"
FORMAT = 1
NUMBERS = "index"  # name of the tensor with the examples' numbers
LENGTHS = ".lengths"  # suffix of the tensor with the number of entries per example, if it varies

_FILE = re.compile(r"(\d{10,})-(\d{10,})\.safetensors")
_MICRO_BATCHES = 64  # per file, by default
_CANNOT = "Predictions could not be written to"
_RAGGED, _JSON = "ragged", "json"

T = TypeVar("T")


class Target(NamedTuple):
    """The folder to write to."""

    folder: Path
    resume: bool  # whether the folder may hold files of an interrupted pass
    rows_per_file: int | None  # largest number of examples per file


class Cut(NamedTuple):
    """Batch sizes for `run.loader`."""

    global_batch: int  # examples per block; each process writes one file per block
    micro_batch: int  # examples that a process computes at once


def cut(target: Target, dataset: Any, global_batch: int, micro_batch: int | None) -> Cut:
    """Return the batch sizes for a loader of blocks. Raises SettingError."""
    rows = target.rows_per_file
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("rows_per_file", rows)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.predict({name}={value!r}): pass an integer number of examples, at least 1.")
    shards = data_group().size
    shard = -(-global_batch // shards)
    at_once = min(shard, micro_batch or shard)
    # Every process holds a whole block of a stream, so by default a block has the requested global batch size.
    rows = rows or (shard if is_stream(dataset) else _MICRO_BATCHES * at_once)
    return Cut(rows * shards, min(at_once, rows))


def start(target: Target, dataset: Any, weights: str) -> list[int] | None:
    """Phase 1: return the numbers of the examples that remain to be computed, or None for all. Collective.

    Raises SettingError if the folder holds something else, and UsageError if it belongs to another pass.

    Args:
        weights: a hash of the model's weights.
    """
    count = None if is_stream(dataset) else len(dataset)
    begun = {"format": FORMAT, "examples": count, "weights": weights}
    finished, fresh = _agreed(lambda: _look(target, begun))
    if finished:
        return []
    if fresh:
        return None
    if count is None:
        raise UsageError(
            f"run.predict(to={str(target.folder)!r}, resume=True): an iterable data set cannot be resumed where the "
            "pass stopped. Delete the folder and start again, or pass a data set with __getitem__ and __len__."
        )
    there = {span for some in world_group().gather(_spans(target.folder)) for span in some}
    done = {number for first, last in there for number in range(first, last + 1)}
    return [number for number in range(count) if number not in done]


def write(
    model: Any,
    fn: Callable[[Any, Any], Any],
    loader: Loader | None,
    autocast: Callable[[], AbstractContextManager[Any]],
    target: Target,
) -> Path:
    """Phases 2 and 3: write the predictions, and return the folder. Collective.

    Args:
        loader: over the examples from `start`, with the sizes from `cut`; None if no examples remain.
    """
    writer = _Writer(target.folder, _is_writer())
    for batch in loader if loader is not None else ():
        with autocast():
            result = fn(model, batch)
        result = to_fp32(result)
        if loader is not None and loader.examples:
            writer.add(result, loader.indices)
        if loader is not None and loader.current is not None and loader.current.final:
            writer.flush()
    written = world_group().gather((_spans(target.folder), writer.form))
    _agreed(lambda: _finish(target.folder, written))
    return target.folder


class _Writer:
    """Collects the results of one process and writes them."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self._writes = folder, writes
        self.form: dict[str, str] | None = None  # result name -> TENSOR, _RAGGED or _JSON
        self._numbers: list[int] = []
        self._columns: dict[str, list[Any]] = {}  # result name -> its leaves of the batches, in order

    def add(self, result: Any, numbers: Sequence[int]) -> None:
        """Add the result of one batch. Raises UsageError if a file cannot hold it."""
        leaves: list[Any] = []
        structure = flatten(result, len(numbers), leaves, "")
        named = dict(_named(structure, leaves, ""))
        form = {name: _kind(name, leaf) for name, leaf in named.items()}
        if self.form is None:
            self.form = form
        if form != self.form:
            raise UsageError(f"run.predict: the form of the results differs between batches ({self.form}; {form}).")
        for name, leaf in named.items() if self._writes else ():
            column = self._columns.setdefault(name, [])
            rows = leaf.shape[1:] if isinstance(leaf, Tensor) else None
            if column and isinstance(leaf, Tensor) and (rows, leaf.dtype) != (column[0].shape[1:], column[0].dtype):
                raise UsageError(
                    f"run.predict(to=...): a row of the result {name!r} is {tuple(rows or ())} {leaf.dtype}, but "
                    f"earlier rows were {tuple(column[0].shape[1:])} {column[0].dtype}. All rows in a file must "
                    "have the same shape: pad to a fixed length, or return a list with one tensor per example."
                )
            column.append(leaf)
        self._numbers += numbers if self._writes else ()

    def flush(self) -> None:
        """Write the collected results, one file per contiguous range of examples."""
        if self._numbers:
            columns = {
                name: torch.cat(column)
                if (self.form or {})[name] == TENSOR
                else [row for rows in column for row in rows]
                for name, column in self._columns.items()
            }
            for begin, end in _pieces(self._numbers):
                piece = {name: column[begin:end] for name, column in columns.items()}
                self._write(self._numbers[begin], self._numbers[end - 1], piece)
        self._numbers, self._columns = [], {}

    def _write(self, first: int, last: int, piece: dict[str, Any]) -> None:
        assert self.form is not None
        tensors = {NUMBERS: torch.arange(first, last + 1)}
        lines: list[dict[str, Any]] = [{} for _ in range(last + 1 - first)]
        for name, column in piece.items():
            if self.form[name] == TENSOR:
                tensors[name] = column
            elif self.form[name] == _RAGGED:
                tensors[name] = _joined(name, column)
                tensors[name + LENGTHS] = torch.tensor([len(row) for row in column])
            else:
                for line, value in zip(lines, column, strict=True):
                    line[name] = value
        file = self.folder / f"{first:010d}-{last:010d}.safetensors"

        def write(whole: Path) -> None:
            if _JSON in (self.form or {}).values():
                text = "".join(json.dumps(line, default=_no_json) + "\n" for line in lines)
                whole.with_suffix(".jsonl").write_text(text, "utf-8")
            save_tensors(whole, tensors, {"format": "pt"})

        write_whole(file, write, _CANNOT)


def _kind(name: str, leaf: Any) -> str:
    if name == NUMBERS or name.endswith(LENGTHS):
        raise UsageError(f"run.predict(to=...): the name {name!r} is reserved in these files. Rename the result.")
    if isinstance(leaf, Tensor):
        return TENSOR
    return _RAGGED if all(isinstance(row, Tensor) and row.dim() for row in leaf) else _JSON


def _joined(name: str, rows: list[Tensor]) -> Tensor:
    try:
        return torch.cat(rows)
    except RuntimeError as error:
        raise UsageError(
            f"run.predict(to=...): the tensors of the result {name!r} differ in more than their first dimension "
            f"({error}). Pad them to the same shape."
        ) from error


def _no_json(value: Any) -> Any:
    raise UsageError(
        f"run.predict(to=...): a result is a {type(value).__name__}, which cannot be written as JSON. Return tensors, "
        "or lists of strings, numbers, lists and dicts."
    )


def _named(structure: Any, leaves: list[Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) for each leaf. A name joins keys and positions by dots. A single leaf is named "output"."""
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _named(value, leaves, f"{path}.{key}" if path else str(key))
    elif isinstance(structure, tuple):
        fields = getattr(structure, "_fields", range(len(structure)))
        for key, value in zip(fields, structure, strict=True):
            yield from _named(value, leaves, f"{path}.{key}" if path else str(key))
    elif structure is not None:
        yield path or "output", leaves[structure]


def _pieces(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the positions (begin, end) of each range of consecutive numbers."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield begin, end
            begin = end


def _is_writer() -> bool:
    """Return whether this process is the first of the processes that see the same examples. Collective."""
    shards = world_group().gather(data_group().rank)
    return shards.index(shards[world_group().rank]) == world_group().rank


# --- the folder


_ERRORS = {kind.__name__: kind for kind in (CheckpointError, SettingError, UsageError)}


def _agreed(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank. If it raises, all ranks raise. Collective."""
    failure: tuple[str, str] | None = None  # the error's class and text
    result: Any = None
    if world_group().rank == 0:
        try:
            result = action()
        except PacelineError as error:
            failure = type(error).__name__, str(error)
    failure, result = world_group().broadcast((failure, result))
    if failure is not None:
        raise _ERRORS.get(failure[0], UsageError)(failure[1])
    answer: T = result
    return answer


def _look(target: Target, begun: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the folder has all results, and whether it is empty. Record a new pass in an empty folder."""
    folder = target.folder
    named = f"run.predict(to={str(folder)!r})"
    with explained(_CANNOT, folder):
        make_directory(folder)
        there = [path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")]
        if not there:
            write_whole(folder / UNFINISHED, lambda path: _put(path, begun), _CANNOT)
            return False, True
        state = next((name for name in (INDEX, UNFINISHED) if name in there), None)
        if state is None:
            raise SettingError(
                f"{named}: the folder is not empty, and run.predict did not write its content ({contents(folder)}). "
                "Pass a new folder."
            )
        found = _get(folder / state)
    if not target.resume:
        if state == INDEX:
            raise SettingError(
                f"{named}: the folder holds the results of a complete pass. Pass another folder, or delete this one."
            )
        raise SettingError(
            f"{named}: the folder holds results of an interrupted pass. Continue it with resume=True, pass another "
            "folder, or delete this one."
        )
    for key, what in (("format", "the format"), ("examples", "the number of examples"), ("weights", "the weights")):
        if found.get(key) != begun[key] and not (begun[key] is None and state == INDEX):
            shown = f" ({found.get(key)}, now {begun[key]})" if key != "weights" else ""
            raise UsageError(
                f"{named[:-1]}, resume=True): {what} of the results in the folder differ from this pass{shown}, so the "
                "results would be mixed. Pass another folder, or delete this one."
            )
    return state == INDEX, False


def _finish(folder: Path, written: list[tuple[list[tuple[int, int]], dict[str, str] | None]]) -> None:
    """Phase 3: check the files, and write index.json.

    Args:
        written: per process, the files that it sees and the form of its results.
    """
    if (folder / INDEX).exists():
        return
    spans = sorted({span for some, _ in written for span in some})
    count = sum(last + 1 - first for first, last in spans)
    begun = _get(folder / UNFINISHED)
    if not count:
        raise UsageError(
            "run.predict: the data set has no examples, so the form of the results is unknown. Skip the call if "
            "len(dataset) is 0."
        )
    ends = [0, *(last + 1 for _, last in spans)]
    here = _spans(folder)
    if [first for first, _ in spans] != ends[:-1] or begun["examples"] not in (None, count) or spans != here:
        seen = sum(last + 1 - first for first, last in here)
        raise CheckpointError(
            f"{folder} does not hold each of {begun['examples'] or 'all'} examples once: rank 0 sees {seen} in its "
            "files. With several machines, the folder must be on a shared disk. Delete it, and start again."
        )
    forms = [form for _, form in written if form is not None]
    if any(form != forms[0] for form in forms):
        raise UsageError(f"run.predict: the form of the results differs between processes ({forms}). Make it the same.")
    files = [
        {"file": f"{first:010d}-{last:010d}.safetensors", "first": first, "count": last + 1 - first}
        for first, last in spans
    ]
    outputs: dict[str, Any] = {}
    for name in [one["file"] for one in files]:
        described = _described(folder / str(name))
        outputs = outputs or described
        if described != outputs:
            raise UsageError(
                f"run.predict(to={str(folder)!r}): {name} holds {described}, but the files before it hold "
                f"{outputs}. All rows must have the same shape and dtype: pad to a fixed length, or return a list "
                "with a tensor per example."
            )
    lines = (folder / str(files[0]["file"])).with_suffix(".jsonl").exists()
    index = {**begun, "examples": count, "outputs": outputs, "jsonl": lines, "files": files}
    write_whole(folder / INDEX, lambda path: _put(path, index), _CANNOT)
    (folder / UNFINISHED).unlink(missing_ok=True)


def _described(file: Path) -> dict[str, Any]:
    """Return the dtype and row shape of each tensor: {"logits": {"dtype": "F32", "shape": [10]}, ...}.

    The shape is left out if rows differ in length.
    """
    with explained("Predictions could not be read from", file), safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: {"dtype": one.get_dtype()}
            | ({} if name + LENGTHS in slices else {"shape": list(one.get_shape())[1:]})
            for name, one in sorted(slices.items())
        }


def _spans(folder: Path) -> list[tuple[int, int]]:
    """Return the (first, last) example of each complete file, sorted."""
    if not folder.is_dir():
        return []
    matches = (_FILE.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def _put(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _get(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise SettingError(f"{path} was not written by run.predict. Pass a new folder.")
    return document
