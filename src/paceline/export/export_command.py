"""paceline export: read a model from a checkpoint, write it in another format, and describe the file.

1. Check everything that can be checked first: options, the checkpoint's hashes, packages, the output.
2. Read the weights, and round them if --dtype is given.
3. For ONNX: make, run, trace and translate the user's model.
4. Write the file under a temporary name, run it with onnxruntime, and rename it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from paceline.errors import ExportError, SettingError, printable
from paceline.export import onnx_check, onnx_program, user_model
from paceline.export.checkpoint_weights import DTYPES, Weights, in_dtype, listed, read_weights
from paceline.state import checkpoint
from paceline.state.atomic import explained, write_whole
from paceline.state.checkpoint import CANNOT_EXPORT
from paceline.torch_private.core import save

ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".onnx": "onnx"}
"""Ending of the file's name -> format (--to)."""

_NAMES = {"safetensors": "model.safetensors", "torch": "model.pt", "onnx": "model.onnx"}
_IN_ONE_FILE = 1_800_000_000  # bytes; larger weights go into a separate file, because protobuf's limit is 2 GiB


@dataclass(frozen=True)
class ExportOptions:
    """The options of the command line, under the same names."""

    checkpoint: str
    to: str | None = None  # None: by the ending of `output`; without one, onnx if `model` is given, else safetensors
    output: str | None = None  # None: model.safetensors, model.pt or model.onnx in the current directory
    name: str | None = None  # of the model in the checkpoint
    prefix: str = ""  # export only tensors with this prefix, and remove it from their names
    dtype: str | None = None  # None: as in the checkpoint
    force: bool = False  # replace an existing file
    model: str | None = None  # MODULE:NAME of the function or class that makes the model; for onnx
    input: Sequence[str] = ()  # descriptions of random inputs
    inputs: str | None = None  # MODULE:NAME of a function that returns inputs
    check: bool | None = None  # run the file with onnxruntime; None: if that is installed


def export(options: ExportOptions, say: Callable[[str], None] = click.echo) -> Path:
    """Write the file, and return its path. Writes nothing if it raises SettingError, CheckpointError or ExportError."""
    kind = _kind(options)
    file = Path(options.output or _NAMES[kind])
    _check_options(options, kind)
    _check_output(file, options.force)
    weights = read_weights(Path(options.checkpoint), options.name, options.prefix)
    for line in weights.damage:
        click.echo(f"Warning: a newer checkpoint is damaged and was skipped: {printable(line)}", err=True)
    rounded = in_dtype(weights, options.dtype)
    lines: list[str] = []
    if kind == "onnx":
        lines = _write_onnx(file, weights, options)
    elif kind == "torch":
        write_whole(file, lambda whole: save(rounded.state, whole), CANNOT_EXPORT, checksum=True)
    else:
        checkpoint.export(file, rounded.tensors)
        if rounded.others:
            lines.append(
                f"  left out, because safetensors stores only tensors: {listed(rounded.others)} (--to torch keeps it)"
            )
    data = file.with_name(f"{file.name}.data")
    size = file.stat().st_size + (data.stat().st_size if kind == "onnx" and data.exists() else 0)
    numbers = sum(value.numel() for value in rounded.tensors.values())
    say(
        f"{file}: {_size(size)}, {weights.model} of {weights.path} "
        f"({len(rounded.tensors)} tensors, {numbers:,} numbers, {rounded.dtypes})"
    )
    for line in lines:
        say(line)
    return file


def _kind(options: ExportOptions) -> str:
    ending = Path(options.output or "").suffix
    by_name = ENDINGS.get(ending)
    if options.to is not None and by_name not in (None, options.to):
        raise SettingError(
            f"--to {options.to} and -o {options.output}: {ending} is the extension of --to {by_name}. Change "
            "one of them."
        )
    if ending and options.to is None and by_name is None:
        raise SettingError(
            f"-o {options.output}: no format has the extension {ending}. Add --to safetensors, torch or onnx, or "
            f"use one of the extensions {', '.join(ENDINGS)}."
        )
    return options.to or by_name or ("onnx" if options.model else "safetensors")


def _check_options(options: ExportOptions, kind: str) -> None:
    """Raises SettingError if options do not fit together, and ExportError if packages are missing."""
    if kind != "onnx":
        given: dict[str, Any] = {"--model": options.model, "--input": options.input, "--inputs": options.inputs}
        given["--check"] = options.check
        wrong = next((name for name, value in given.items() if value), None)
        if wrong:
            raise SettingError(f"{wrong} is only for --to onnx. --to {kind} needs only the checkpoint: leave it out.")
        return
    if options.model is None:
        raise SettingError(
            "--to onnx needs the model's code, which a checkpoint does not contain: give --model MODULE:NAME or "
            "FILE.py:NAME, a class or function without arguments that makes it, such as --model train.py:make_model."
        )
    if bool(options.input) == (options.inputs is not None):
        raise SettingError(
            "--to onnx needs example inputs of the model: give either --input SHAPE for each input, such as --input "
            "1x3x32x32 or --input 1x128:int64:50257, or --inputs FILE.py:NAME, a function that returns them."
        )
    onnx_program.require_packages()
    if options.check and not onnx_check.available():
        raise ExportError("--check needs onnxruntime: pip install 'paceline[onnx]'.")


def _check_output(file: Path, force: bool) -> None:
    with explained(CANNOT_EXPORT, file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory; give the name of a file")
        if file.exists() and not force:
            raise SettingError(f"{file} exists. Give another name (-o FILE), or replace it with --force.")


def _write_onnx(file: Path, weights: Weights, options: ExportOptions) -> list[str]:
    """Write the ONNX file, and return the lines that describe it."""
    assert options.model is not None
    inputs = user_model.own_inputs(options.inputs) if options.inputs else user_model.random_inputs(options.input)
    model = user_model.load_model(options.model, weights)
    dtype = DTYPES[options.dtype] if options.dtype else None
    _tried(model, inputs, "")
    check = onnx_check.available() if options.check is None else options.check
    reference = onnx_check.expected(model, inputs, dtype) if check else []
    if dtype is not None:
        in_dtype(weights, options.dtype)
        model = model.to(dtype)
    program = onnx_program.make_program(model, _tried(model, inputs, f" in {options.dtype}" if options.dtype else ""))
    found: list[onnx_check.Difference] = []
    weigh = sum(value.nbytes for value in model.state_dict().values() if isinstance(value, torch.Tensor))

    def write(whole: Path) -> None:
        program.save(whole, external_data=weigh > _IN_ONE_FILE)
        if check:
            found.extend(onnx_check.compare(whole, model, inputs, reference))

    write_whole(file, write, CANNOT_EXPORT, checksum=True)
    graph = program.model.graph
    lines = [
        f"  {kind:<7}{_value(one)}"
        for kind, some in (("input", graph.inputs), ("output", graph.outputs))
        for one in some
    ]
    return [*lines, _checked(found)]


def _tried(model: nn.Module, inputs: user_model.Inputs, what: str) -> user_model.Inputs:
    """Run the model on the inputs in its dtype, and return these inputs. Raises ExportError if the model fails. The
    error names the shapes as the user gave them: the batch size is not changed yet."""
    own = next((one.dtype for one in model.parameters() if one.is_floating_point()), None)
    given = inputs.of(len(inputs.tensors[0]), own) if own is not None else inputs
    user_model.run_model(model, given, what)
    return given


def _value(value: Any) -> str:
    shape = ", ".join(map(str, value.shape)) if value.shape is not None else "?"
    return f"{value.name}  {str(value.dtype).lower()} ({shape})"


def _checked(found: list[onnx_check.Difference]) -> str:
    if not found:
        return "  not checked" + ("" if onnx_check.available() else ": pip install onnxruntime and add --check")
    import onnxruntime

    most = ", ".join(f"{one.most:.2g} at batch {one.batch}" for one in found)
    largest = max(one.largest for one in found)
    whole = sum(one.of for one in found)
    unequal = f"; {sum(one.unequal for one in found)} of {whole} integers differ" if whole else ""
    return (
        f"  onnxruntime {onnxruntime.__version__} compared with the model as trained: largest difference {most} "
        f"(outputs up to {largest:.2g}){unequal}"
    )


def _size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
