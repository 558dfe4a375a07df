"""Every exception that Paceline raises on purpose, and how it warns.

    PacelineError
    ├── SettingError      a setting, argument or option has a value that cannot work   (also a ValueError)
    ├── UsageError        a call in the wrong place or order                           (also a RuntimeError)
    ├── WorldError        the environment describes no consistent world of processes
    ├── LaunchError       workers could not be started
    ├── TorchVersionError      this version of torch lacks something that Paceline needs
    ├── ModelError        the model does something that this run cannot keep exact
    │   ├── UnusedParameterError   parameters that some rank's loss did not reach
    │   └── EmptyShardError        the model or the loss cannot take a zero-length batch
    ├── NonFiniteError    a loss or a gradient is inf or NaN
    ├── CheckpointError   a checkpoint is missing, damaged, or of another program
    └── ExportError       a model cannot be exported as it was asked for

A message names the setting or call, what was received, and the remedy; of a misspelt name the nearest known one.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

_NOT_THE_USERS = (__name__.partition(".")[0], "torch", "contextlib")
"""Packages whose lines a warning does not name."""


class PacelineError(Exception):
    """The root: catch this to catch whatever Paceline raises on purpose."""


class SettingError(PacelineError, ValueError):
    """A setting, argument or option has a value that cannot work."""


class UsageError(PacelineError, RuntimeError):
    """A call in the wrong place or order."""


class WorldError(PacelineError):
    """The environment describes no consistent world of processes."""


class LaunchError(PacelineError):
    """Workers could not be started."""


class TorchVersionError(PacelineError, RuntimeError):
    """This version of torch lacks something that Paceline needs."""


class ModelError(PacelineError, RuntimeError):
    """The model does something that this run cannot keep exact."""


class UnusedParameterError(ModelError):
    """Parameters that some rank's loss did not reach."""


class EmptyShardError(ModelError):
    """The model or the loss cannot take a zero-length batch."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is inf or NaN."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, or of another program."""


class ExportError(PacelineError):
    """A model cannot be exported as it was asked for."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(names)}."


def warn(message: str) -> None:
    """A UserWarning at the innermost line outside Paceline and torch: the script's, or that of a library it calls."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
