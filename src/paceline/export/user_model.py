"""Get the model and the example inputs of its forward() from the user's code.

A target is MODULE:NAME or FILE.py:NAME, imported as `python -m MODULE` or `python FILE.py` would do. An input is
described as SHAPE[:DTYPE[:LIMIT]], such as 1x3x32x32 or 1x128:int64:50257. Its first dimension is the number of
examples.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import errors
from paceline.errors import ExportError, SettingError, suggest
from paceline.export.checkpoint_weights import Weights, listed
from paceline.world import EXPORT

_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+)(?::(?P<limit>\d+))?)?")
_INPUT_DTYPES = {  # a floating-point input gets the dtype of the model
    "float": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NOT_THE_USERS = (*(str(Path(str(module.__file__)).parent) for module in (torch, importlib, errors)), "<frozen")
_FEWEST = 2  # the default limit of integers: an embedding of any size accepts 0 and 1


class Inputs(NamedTuple):
    """Example inputs of a model's forward."""

    args: tuple[Tensor, ...]  # by position
    kwargs: dict[str, Tensor]  # by name
    option: str  # the option that the inputs come from, for messages

    @property
    def tensors(self) -> list[Tensor]:
        """All inputs: first by position, then by name."""
        return [*self.args, *self.kwargs.values()]

    def of(self, batch: int, dtype: torch.dtype | None = None) -> Inputs:
        """Return inputs with `batch` examples, made by repeating these examples. dtype: convert floating-point inputs
        to it."""

        def resize(tensor: Tensor) -> Tensor:
            rows = tensor[torch.arange(batch) % len(tensor)] if tensor.dim() else tensor
            return rows.to(dtype) if dtype is not None and rows.is_floating_point() else rows

        return Inputs(
            tuple(map(resize, self.args)), {name: resize(one) for name, one in self.kwargs.items()}, self.option
        )


def load_model(target: str, weights: Weights) -> nn.Module:
    """Make the user's model with the checkpoint's weights, in evaluation mode on the CPU. Raises ExportError."""
    made = _call("--model", target, lambda thing: isinstance(thing, nn.Module))
    if not isinstance(made, nn.Module):
        raise ExportError(
            f"--model {target}: a torch.nn.Module is needed, but it returned {type(made).__name__}. Name a class or a "
            "function without arguments that returns the model, or a model itself."
        )
    _check_names(target, made, weights)
    made.cpu().load_state_dict(weights.state)
    return made.eval()


def random_inputs(specs: Sequence[str], seed: int = 0) -> Inputs:
    """Make 8 random examples for descriptions such as "1x3x32x32" or "mask=1x128:bool". Raises SettingError."""
    generator = torch.Generator().manual_seed(seed)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for spec in specs:
        match = _INPUT.fullmatch(spec)
        if match is None:
            raise SettingError(
                f"--input {spec!r}: give SHAPE[:DTYPE[:LIMIT]], such as 1x3x32x32, or 1x128:int64:50257 for integers "
                "below 50257; NAME=SHAPE for an argument by name. The first dimension is the number of examples."
            )
        kind, limit = match["dtype"] or "float", match["limit"]
        if kind not in _INPUT_DTYPES:
            raise SettingError(f"--input {spec!r}: {kind!r} is not a dtype. {suggest(kind, _INPUT_DTYPES)}")
        dtype = _INPUT_DTYPES[kind]
        shape = (8, *map(int, match["shape"].split("x")[1:]))
        if dtype.is_floating_point:
            if limit is not None:
                raise SettingError(f"--input {spec!r}: a limit is only for integers. Leave out ':{limit}'.")
            tensor = torch.randn(shape, generator=generator)
        else:
            below = 2 if dtype == torch.bool else int(limit or _FEWEST)
            tensor = torch.randint(max(below, 1), shape, generator=generator).to(dtype)
        if match["name"]:
            kwargs[match["name"]] = tensor
        elif kwargs:
            raise SettingError(f"--input {spec!r}: put inputs without a name before inputs with a name.")
        else:
            args.append(tensor)
    return _checked(Inputs(tuple(args), kwargs, " ".join(f"--input {spec}" for spec in specs)))


def own_inputs(target: str) -> Inputs:
    """Get inputs from a function of the user. It returns a tensor, a tuple of tensors, or a dict of tensors by argument
    name. Raises ExportError."""
    option = f"--inputs {target}"
    given = _call("--inputs", target, lambda thing: isinstance(thing, (Tensor, tuple, list, Mapping)))
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    args = (args,) if isinstance(args, Tensor) else tuple(args) if isinstance(args, (tuple, list)) else (args,)
    wrong = next((one for one in [*args, *kwargs.values()] if not isinstance(one, Tensor)), None)
    if wrong is not None or not (args or kwargs):
        raise ExportError(
            f"{option}: it returned {'nothing' if wrong is None else type(wrong).__name__}. Return a tensor, a "
            "tuple of tensors, or a dict of tensors by the argument names of forward()."
        )
    return _checked(
        Inputs(tuple(one.detach().cpu() for one in args), {k: v.detach().cpu() for k, v in kwargs.items()}, option)
    )


def run_model(model: nn.Module, inputs: Inputs, what: str = "") -> Any:
    """Return the model's outputs, without gradients. Raises ExportError if the model fails. what: text to add to the
    model's name in the error."""
    try:
        with torch.no_grad():
            return model(*inputs.args, **inputs.kwargs)
    except Exception as error:
        shapes = ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in inputs.tensors)
        raise ExportError(
            f"{inputs.option}: {type(model).__name__}{what} fails on inputs of {shapes}: {_described(error)}\n"
            "Give the shapes and dtypes that its forward() takes, with the examples in the first dimension."
        ) from error


def _checked(inputs: Inputs) -> Inputs:
    lengths = {len(one) for one in inputs.tensors if one.dim()}
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(one.shape)) for one in inputs.tensors)
        raise ExportError(
            f"{inputs.option}: the first dimension of every input must be the number of examples, but the shapes "
            f"are {shapes}. If the model's forward() expects it elsewhere, let --model name a wrapper module that "
            "moves the dimension."
        )
    return inputs


def _check_names(target: str, model: nn.Module, weights: Weights) -> None:
    """Raises ExportError if the model's names and shapes differ from the checkpoint's."""
    own, given = model.state_dict(), weights.state
    missing, more = [name for name in own if name not in given], [name for name in given if name not in own]
    shapes = [
        f"{name} is {tuple(given[name].shape)}, in the model {tuple(value.shape)}"
        for name, value in own.items()
        if name in given and isinstance(value, Tensor) and given[name].shape != value.shape
    ]
    if not (missing or more or shapes):
        return
    problems = [
        f"the model has {len(missing)} that the checkpoint lacks: {listed(missing)}" if missing else "",
        f"the checkpoint has {len(more)} that the model lacks: {listed(more)}" if more else "",
        f"{len(shapes)} differ in shape: {listed(shapes)}" if shapes else "",
    ]
    raise ExportError(
        f"--model {target}: {type(model).__name__} does not match {weights.model} in {weights.path}.\n  "
        + "\n  ".join(line for line in problems if line)
        + f"\n{_remedy(missing, more)}"
    )


def _remedy(missing: list[str], more: list[str]) -> str:
    if missing and more:
        for longer, shorter, remedy in (
            (more, missing, "Add --prefix {0!r}, which removes it from the checkpoint's names."),
            (missing, more, "Name the inner module, without {0!r} before its names."),
        ):
            ends = (name for name in longer if name.endswith(shorter[0]))
            before = next(ends, shorter[0]).removesuffix(shorter[0])
            if before and {before + name for name in shorter} <= set(longer):
                return remedy.format(before)
    return "Make the model as the training script does, with the same arguments."


# --- the user's code


def _call(option: str, target: str, ready: Any) -> Any:
    """Return the object that a target names. If it is a function or a class, call it and return the result."""
    thing = _find(option, target)
    if ready(thing) or not callable(thing):
        return thing
    needed = _needed(thing)
    if needed:
        raise ExportError(
            f"{option} {target}: the export calls it without arguments, but it needs {', '.join(needed)}. Write a "
            "function that calls it with them, and name that function."
        )
    try:
        return thing()
    except Exception as error:
        raise ExportError(f"{option} {target}: calling it failed at {_described(error)}") from error


def _find(option: str, target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise SettingError(f"{option} {target!r}: give MODULE:NAME or FILE.py:NAME, such as train.py:make_model.")
    module = _import(option, place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [one for one in vars(found) if not one.startswith("_") and callable(getattr(found, one))]
            raise SettingError(f"{option} {target}: {place} has no {name!r}. {suggest(name, public)}")
        found = getattr(found, part)
    return found


def _import(option: str, place: str) -> ModuleType:
    file = Path(place)
    if place.endswith(".py") and not file.is_file():
        raise SettingError(f"{option}: there is no file {place}. Give the file that defines the model.")
    here = str(file.resolve().parent if place.endswith(".py") else Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python FILE` and `python -m MODULE` do
    try:
        with _imported(place):
            if not place.endswith(".py"):
                return importlib.import_module(place)
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[file.stem] = module  # dataclasses and pickle look the module up there
            spec.loader.exec_module(module)
            return module
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise SettingError(
                f"{option}: there is no module {error.name!r}, seen from {here}. Run the command in the folder that "
                "contains it, install it, or name the file: FILE.py:NAME."
            ) from error
        raise ExportError(
            f"{option}: importing {place} failed at {_described(error)}. Install {error.name}."
        ) from error
    except (Exception, SystemExit) as error:
        remedy = '\nPut code that runs as a script under `if __name__ == "__main__":`.'
        ended = isinstance(error, SystemExit)
        raise ExportError(
            f"{option}: importing {place} failed at {_described(error)}{remedy if ended else ''}"
        ) from error


@contextlib.contextmanager
def _imported(place: str) -> Iterator[None]:
    """Hide this command's arguments from the module, and prevent the module from starting a run."""
    argv = sys.argv
    sys.argv, os.environ[EXPORT] = [place], place
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ[EXPORT]


def _needed(thing: Any) -> list[str]:
    """The required arguments of a function or class."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def _described(error: BaseException) -> str:
    """Describe an error, with the innermost line outside torch and Paceline: "net.py, line 12, in forward: ..."."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}"
