"""Predictions written to files as they are made: for results that do not fit in memory.

    predictions/
      0000000000-0000002730.safetensors   results of the examples 0 to 2730, a row for each; "index" has their numbers
      0000000000-0000002730.jsonl         of the same examples, a line each, what is no tensor (where fn returns such)
      ...
      index.json                          names, shapes and dtypes, and the files in the order of the examples
      unfinished.json                     in place of index.json, while the pass goes on

Phase 1: rank 0 looks at the folder, and all processes agree on the examples that have no whole file there.
Phase 2: the loader's global batches are blocks of so many examples that each process has one file of each; what it
computes at once are the micro-batches. A process's part of a block is in one piece in the data set, so that files in
the order of their names are in the order of the examples. Of processes that see the same examples (stages, parts of
layers) the first writes. A file is written whole, beside its place, and renamed.
Phase 3: rank 0 writes index.json, and removes unfinished.json.

Which weights and how many examples an unfinished folder is of stands in unfinished.json, so that nothing is mixed.
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

from paceline.comm import collectives
from paceline.comm.collectives import data_group
from paceline.data.fetch import is_stream
from paceline.data.loader import Loader
from paceline.errors import CheckpointError, PacelineError, SettingError, UsageError
from paceline.metrics.predict import TENSOR, flatten
from paceline.state.atomic import contents, explained, make_directory, write_whole
from paceline.state.checkpoint import save_tensors
from paceline.step.precision import to_fp32

INDEX, UNFINISHED = "index.json", "unfinished.json"
FORMAT = 1
NUMBERS = "index"  # the tensor with the examples' numbers
LENGTHS = ".lengths"  # what follows the name of a tensor with another number of entries for each example

_FILE = re.compile(r"(\d{10,})-(\d{10,})\.safetensors")
_MICRO_BATCHES = 64  # that a file has, if rows_per_file does not say how many examples
_CANNOT = "Predictions could not be written to"
_RAGGED, _JSON = "ragged", "json"

T = TypeVar("T")


class Target(NamedTuple):
    """Where a pass writes."""

    folder: Path
    resume: bool  # whether the folder may hold files of a pass that did not end
    rows_per_file: int | None  # the most examples of a file


class Cut(NamedTuple):
    """How the examples are cut: arguments of `run.loader`."""

    global_batch: int  # a block: a file for each process
    micro_batch: int  # what a process computes at once


def cut(target: Target, dataset: Any, global_batch: int, micro_batch: int | None) -> Cut:
    """The arguments for a loader whose global batches are blocks. Raises SettingError."""
    rows = target.rows_per_file
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("rows_per_file", rows)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.predict({name}={value!r}): a whole number of examples, at least 1, is needed.")
    shards = collectives.size_of(data_group())
    own = -(-global_batch // shards)
    at_once = min(own, micro_batch or own)
    # Every process holds a whole block of a stream, so that it is no larger than the script has said.
    rows = rows or (own if is_stream(dataset) else _MICRO_BATCHES * at_once)
    return Cut(rows * shards, min(at_once, rows))


def start(target: Target, dataset: Any, weights: str) -> list[int] | None:
    """Phase 1. weights: a hash of the model's. Returns the numbers of the examples that are to be computed, None for
    all. Collective. Raises SettingError for a folder that holds something else, UsageError for one that does not
    fit."""
    count = None if is_stream(dataset) else len(dataset)
    begun = {"format": FORMAT, "examples": count, "weights": weights}
    finished, fresh = _agreed(lambda: _look(target, begun))
    if finished:
        return []
    if fresh:
        return None
    if count is None:
        raise UsageError(
            f"run.predict(to={str(target.folder)!r}, resume=True): a stream cannot be read from where the pass "
            "stopped. Delete the folder and start anew, or give a data set with __getitem__ and __len__."
        )
    there = {span for some in collectives.gather_objects(_spans(target.folder)) for span in some}
    done = {number for first, last in there for number in range(first, last + 1)}
    return [number for number in range(count) if number not in done]


def write(
    model: Any,
    fn: Callable[[Any, Any], Any],
    loader: Loader | None,
    autocast: Callable[[], AbstractContextManager[Any]],
    target: Target,
) -> Path:
    """Phases 2 and 3. loader: of `cut`, over the examples that `start` gave; None where none are left. Collective."""
    writer = _Writer(target.folder, _is_writer())
    for batch in loader if loader is not None else ():
        with autocast():
            result = fn(model, batch)
        result = to_fp32(result)
        if loader is not None and loader.examples:
            writer.add(result, loader.indices)
        if loader is not None and loader.current is not None and loader.current.final:
            writer.flush()
    written = collectives.gather_objects((_spans(target.folder), writer.form))
    _agreed(lambda: _finish(target.folder, written))
    return target.folder


class _Writer:
    """The results of one process that wait to be written."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self._writes = folder, writes
        self.form: dict[str, str] | None = None  # TENSOR, _RAGGED or _JSON, for the name of each result
        self._numbers: list[int] = []
        self._columns: dict[str, list[Any]] = {}  # for each name the results of the batches, one after the other

    def add(self, result: Any, numbers: Sequence[int]) -> None:
        """Take the result of one batch. Raises UsageError for one that has no place in a file."""
        leaves: list[Any] = []
        structure = flatten(result, len(numbers), leaves, "")
        named = dict(_named(structure, leaves, ""))
        form = {name: _kind(name, leaf) for name, leaf in named.items()}
        if self.form is None:
            self.form = form
        if form != self.form:
            raise UsageError(f"run.predict: results have another form from batch to batch ({self.form}; {form}).")
        for name, leaf in named.items() if self._writes else ():
            column = self._columns.setdefault(name, [])
            rows = leaf.shape[1:] if isinstance(leaf, Tensor) else None
            if column and isinstance(leaf, Tensor) and (rows, leaf.dtype) != (column[0].shape[1:], column[0].dtype):
                raise UsageError(
                    f"run.predict(to=...): a row of the result {name!r} is {tuple(rows or ())} {leaf.dtype}, and was "
                    f"{tuple(column[0].shape[1:])} {column[0].dtype} before. A file holds rows of one shape: pad to a "
                    "fixed length, or return a list with a tensor for each example."
                )
            column.append(leaf)
        self._numbers += numbers if self._writes else ()

    def flush(self) -> None:
        """Write what waits, a file for each piece that is one in the data set."""
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
        raise UsageError(
            f"run.predict(to=...): the name {name!r} is taken in these files. Give the result another one."
        )
    if isinstance(leaf, Tensor):
        return TENSOR
    return _RAGGED if all(isinstance(row, Tensor) and row.dim() for row in leaf) else _JSON


def _joined(name: str, rows: list[Tensor]) -> Tensor:
    try:
        return torch.cat(rows)
    except RuntimeError as error:
        raise UsageError(
            f"run.predict(to=...): the tensors of the result {name!r} differ in more than their first dimension "
            f"({error}). Pad them."
        ) from error


def _no_json(value: Any) -> Any:
    raise UsageError(
        f"run.predict(to=...): a result is a {type(value).__name__}, which has no plain form. Return tensors, or lists "
        "of strings, numbers, lists and dicts."
    )


def _named(structure: Any, leaves: list[Any], path: str) -> Iterator[tuple[str, Any]]:
    """(name, leaf) for each leaf: keys and positions joined by dots; "output" where there is nothing else."""
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
    """(begin, end) of each stretch of consecutive numbers."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield begin, end
            begin = end


def _is_writer() -> bool:
    """Whether this process is the first of those that see the same examples. Collective."""
    shards = collectives.gather_objects(collectives.rank_of(data_group()))
    return shards.index(shards[collectives.rank_of()]) == collectives.rank_of()


# --- the folder


_ERRORS = {kind.__name__: kind for kind in (CheckpointError, SettingError, UsageError)}


def _agreed(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; its error is raised on all. Collective."""
    failure: tuple[str, str] | None = None  # the error's class and text
    result: Any = None
    if collectives.rank_of() == 0:
        try:
            result = action()
        except PacelineError as error:
            failure = type(error).__name__, str(error)
    failure, result = collectives.broadcast_object((failure, result))
    if failure is not None:
        raise _ERRORS.get(failure[0], UsageError)(failure[1])
    answer: T = result
    return answer


def _look(target: Target, begun: dict[str, Any]) -> tuple[bool, bool]:
    """(whether the folder has all results, whether it has none). A new pass is noted there."""
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
                f"{named}: the folder is not empty, and what is in it ({contents(folder)}) was not written by "
                "run.predict. Give a new folder."
            )
        found = _get(folder / state)
    if not target.resume:
        if state == INDEX:
            raise SettingError(
                f"{named}: the folder holds the results of a whole pass. Give another one, or delete it."
            )
        raise SettingError(
            f"{named}: the folder holds results of a pass that did not end. Go on where it stopped by resume=True, "
            "give another folder, or delete this one."
        )
    for key, what in (("format", "the format"), ("examples", "the number of examples"), ("weights", "the weights")):
        if found.get(key) != begun[key] and not (begun[key] is None and state == INDEX):
            shown = f" ({found.get(key)}, and now {begun[key]})" if key != "weights" else ""
            raise UsageError(
                f"{named[:-1]}, resume=True): {what} of the results in the folder are other than now{shown}, so that "
                "they would be mixed. Give another folder, or delete it."
            )
    return state == INDEX, False


def _finish(folder: Path, written: list[tuple[list[tuple[int, int]], dict[str, str] | None]]) -> None:
    """Phase 3. written: the files that each process sees, and the form of its results."""
    if (folder / INDEX).exists():
        return
    spans = sorted({span for some, _ in written for span in some})
    count = sum(last + 1 - first for first, last in spans)
    begun = _get(folder / UNFINISHED)
    if not count:
        raise UsageError(
            "run.predict: the data set has no examples, and what the results would look like is not known without one. "
            "Leave the call out where len(dataset) is 0."
        )
    ends = [0, *(last + 1 for _, last in spans)]
    here = _spans(folder)
    if [first for first, _ in spans] != ends[:-1] or begun["examples"] not in (None, count) or spans != here:
        seen = sum(last + 1 - first for first, last in here)
        raise CheckpointError(
            f"{folder} does not hold each of {begun['examples'] or 'all'} examples once: rank 0 sees {seen} in its "
            "files. On several machines the folder must be on a disk that they share. Delete it, and start anew."
        )
    forms = [form for _, form in written if form is not None]
    if any(form != forms[0] for form in forms):
        raise UsageError(f"run.predict: results have another form from process to process ({forms}). Make them alike.")
    files = [
        {"file": f"{first:010d}-{last:010d}.safetensors", "first": first, "count": last + 1 - first}
        for first, last in spans
    ]
    outputs: dict[str, Any] = {}
    for name in [one["file"] for one in files]:
        own = _described(folder / str(name))
        outputs = outputs or own
        if own != outputs:
            raise UsageError(
                f"run.predict(to={str(folder)!r}): {name} holds {own}, and the files before it {outputs}. Rows of one "
                "shape and dtype are needed: pad to a fixed length, or return a list with a tensor for each example."
            )
    lines = (folder / str(files[0]["file"])).with_suffix(".jsonl").exists()
    index = {**begun, "examples": count, "outputs": outputs, "jsonl": lines, "files": files}
    write_whole(folder / INDEX, lambda path: _put(path, index), _CANNOT)
    (folder / UNFINISHED).unlink(missing_ok=True)


def _described(file: Path) -> dict[str, Any]:
    """{"logits": {"dtype": "F32", "shape": [10]}, ...}: the shape of a row; without it where rows have lengths."""
    with explained("Predictions could not be read from", file), safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: {"dtype": one.get_dtype()}
            | ({} if name + LENGTHS in slices else {"shape": list(one.get_shape())[1:]})
            for name, one in sorted(slices.items())
        }


def _spans(folder: Path) -> list[tuple[int, int]]:
    """(first, last) of the examples of each whole file."""
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
        raise SettingError(f"{path} was not written by run.predict. Give a new folder.")
    return document
