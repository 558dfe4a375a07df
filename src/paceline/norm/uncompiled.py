"""Calls that torch.compile must not trace, such as the collectives of a batch norm.

This module is imported at the first such call, since torch.compiler.disable imports torch._dynamo, which takes as long
as torch itself. A script that makes an optimizer imports that anyway; one that only predicts does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@torch.compiler.disable
def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)
