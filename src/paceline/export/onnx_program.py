"""Make an ONNX program with a dynamic batch size from a model, or explain why that is impossible.

torch.onnx's exporter traces forward() with torch.export on an example batch, lowers the graph to torch's core
operators, and translates each operator. Its error messages are reduced to the part that the user can change: the
operator, or the line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ExportError
from paceline.export.user_model import Inputs, run_model
from paceline.torch_private.core import tree_flatten

TRACED_BATCH = 5
"""The number of examples in the traced batch. It is unlikely to match a number in the model's code by chance.
(torch.export treats sizes 0 and 1 as constants.)"""

_NOT_FOUND = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\w+)\n\s*(?P<code>[^\n]+)')
_STATIC = re.compile(r"inferred a static shape of (\d+)")
_PACKAGES = ("onnx", "onnxscript")


def require_packages() -> None:
    """Raises ExportError if the packages that write ONNX files are not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"--to onnx needs {' and '.join(missing)}: pip install 'paceline[onnx]'.")


def make_program(model: nn.Module, inputs: Inputs) -> torch.onnx.ONNXProgram:
    """Make the ONNX program. Its inputs are named like forward()'s arguments. Its outputs are named by the keys of the
    dict that forward() returns. Without a dict, a single output is named "output", and several are named "output_0" and
    so on. Raises ExportError."""
    example = inputs.of(TRACED_BATCH)
    names = {"input_names": input_names(model, inputs), "output_names": _output_names(run_model(model, example))}
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
    shapes = {name: _dynamic(value) for name, value in bound.items()}
    given: dict[str, Any] = {"dynamic_shapes": shapes, **names}
    try:
        with _quiet():
            program = torch.onnx.export(model, example.args, kwargs=example.kwargs, dynamo=True, verbose=False, **given)
    except Exception as error:
        raise ExportError(_why(model, example, shapes, error)) from error
    assert program is not None
    fixed = [one.name for one in program.model.graph.inputs if one.shape and isinstance(one.shape[0], int)]
    if fixed:
        raise ExportError(
            f"{type(model).__name__} only takes batches of {TRACED_BATCH} examples once it is traced: in {fixed[0]} "
            "the number of examples became a constant. Use x.shape[0] or -1 in forward(), without int()."
        )
    _name_batch(program)
    return program


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """The names of forward()'s arguments for the inputs, in the order of `Inputs.tensors`."""
    bound = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
    names: list[str] = []
    for name, value in bound.items():
        if isinstance(value, Tensor):
            names.append(name)
        elif isinstance(value, dict):  # **kwargs
            names += list(value)
        else:  # *args
            names += [f"{name}_{number}" for number in range(len(value))]
    return names


def _output_names(outputs: Any) -> list[str]:
    if isinstance(outputs, Tensor):
        return ["output"]
    if isinstance(outputs, Mapping) and all(isinstance(one, Tensor) for one in outputs.values()):
        return list(map(str, outputs))
    return [f"output_{number}" for number in range(len(tree_flatten(outputs)[0]))]


def _dynamic(value: Any) -> Any:
    """Describe an argument for torch.export: its first dimension may have any size."""
    if isinstance(value, Tensor):
        return {0: torch.export.Dim.DYNAMIC} if value.dim() else {}
    if isinstance(value, dict):
        return {name: _dynamic(one) for name, one in value.items()}
    return tuple(map(_dynamic, value))


def _name_batch(program: torch.onnx.ONNXProgram) -> None:
    """Name the first dimension of every input "batch" in the file. Dimensions that depend on it get the same name."""
    symbols = {str(one.shape[0]) for one in program.model.graph.inputs if one.shape}
    symbols = {name for name in symbols if name.isidentifier()}
    if symbols:
        program.rename_axes(dict.fromkeys(sorted(symbols), "batch"))


def _why(model: nn.Module, example: Inputs, shapes: dict[str, Any], error: BaseException) -> str:
    """Build the ExportError's message for an error of the exporter."""
    name = type(model).__name__
    text = "\n".join(str(one) for one in _chain(error))
    if found := _NOT_FOUND.search(text):
        operator = f"{found[1].replace('.', '::')}.{found[2]}".removesuffix(".default")
        at = _used_at(model, example, shapes, found[1])
        return (
            f"--to onnx: ONNX has no counterpart of the operator {operator}, which {name} uses{at}. "
            "Compute it with other operators, or leave it out of the export: let --model name a module without it. "
            "--to torch and --to safetensors work."
        )
    if "data-dependent" in text or "DataDependent" in text:
        line = next((hit for hit in _LINE.finditer(text)), None)
        at = f" at {line['file']}, line {line['line']}, in {line['name']}: {line['code'].strip()}" if line else ""
        return (
            f"--to onnx: the computation of {name} depends on the values of its input{at}\n"
            "An ONNX graph is the same for all inputs. Use torch.where or torch.cond instead of `if`, and tensors "
            "instead of .item(), or leave that part out of the export."
        )
    if found := _STATIC.search(text):
        return (
            f"--to onnx: {name} turns the number of examples into a constant ({found[1]} during tracing), so the "
            "file would only accept that batch size. Use x.shape[0] or -1 for the number of examples in forward()."
        )
    message = next((str(one).strip() for one in reversed(_chain(error)) if str(one).strip()), type(error).__name__)
    message = re.sub(r"\x1b\[\d*m", "", message)
    return f"--to onnx: torch's exporter cannot export {name}: {message[:1500]}\n--to torch and --to safetensors work."


def _used_at(model: nn.Module, example: Inputs, shapes: dict[str, Any], operator: str) -> str:
    """Name the model's line that uses an operator: " at net.py, line 12, in forward: ...". "" if it is not found."""
    base = operator.rpartition(".")[2]
    with contextlib.suppress(Exception), _quiet():
        traced = torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes)
        for node in traced.graph.nodes:
            lines = list(_LINE.finditer(node.stack_trace or ""))
            if node.op == "call_function" and base in str(node.target) and lines:
                line = lines[-1]
                return f" at {line['file']}, line {line['line']}, in {line['name']}: {line['code'].strip()}"
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, with the original cause last."""
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's output and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            with contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
    finally:
        logging.disable(before)
