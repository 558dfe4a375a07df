"""Calls that torch.compile must not trace, such as the collectives of a batch norm.

Import this module only at the first such call: torch.compiler.disable imports torch._dynamo, which doubles the time of
importing torch. A script that creates an optimizer imports torch._dynamo anyway. A script that only predicts does not.
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
