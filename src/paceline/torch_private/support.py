"""What is said where this version of torch lacks a private name that Paceline needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import TorchVersionError

OLDEST, NEWEST = "2.13", "2.15"
"""The versions of torch that the tests have run with (make compat)."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Around imports and reads of private names: raises TorchVersionError where one is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise missing(purpose, str(error)) from error


def require(purpose: str, owner: type, *names: str) -> None:
    """Raises TorchVersionError unless a class has these attributes, or declares that its objects have them."""
    declared = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    for name in names:
        if name not in declared and not hasattr(owner, name):
            raise missing(purpose, f"{owner.__module__}.{owner.__qualname__} has no {name!r}")


def missing(purpose: str, what: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} lacks something that Paceline needs for {purpose}: {what}. It is a private part of "
        f"torch, which any version may change. Paceline was tested with torch {OLDEST} to {NEWEST}: "
        f'pip install "torch~={NEWEST}.0", or install a newer Paceline.'
    )
