"""The error for a private name that Paceline needs and this version of torch lacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import TorchVersionError

OLDEST, NEWEST = "2.13", "2.15"
"""The tested versions of torch (make compat)."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """A context around imports and reads of private names. Raises TorchVersionError if one is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise missing(purpose, str(error)) from error


def require(purpose: str, owner: type, *names: str) -> None:
    """Raises TorchVersionError unless a class has these attributes, or annotates them for its objects."""
    declared = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    for name in names:
        if name not in declared and not hasattr(owner, name):
            raise missing(purpose, f"{owner.__module__}.{owner.__qualname__} has no {name!r}")


def missing(purpose: str, what: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} lacks a private name that Paceline needs for {purpose}: {what}. Any version of "
        f"torch may change private names. Paceline was tested with torch {OLDEST} to {NEWEST}: "
        f'pip install "torch~={NEWEST}.0", or install a newer Paceline.'
    )
