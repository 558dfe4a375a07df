"""A separate run on copies of the script's objects, which stay unchanged. For lr_find and find_micro_batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline import session
from paceline.comm import generators
from paceline.errors import UsageError
from paceline.run import Run


@contextmanager
def trial_run(
    call: str, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Iterator[tuple[Run, nn.Module, torch.optim.Optimizer]]:
    """Start a run, and yield it with copies of the model and the optimizer. After the block, close the run and restore
    the random generators.

    Args:
        call: name of the calling function, for the error.
        settings: arguments of paceline.start.

    Raises UsageError if a run is open.
    """
    if session.current() is not None:
        raise UsageError(
            f"{call}: a run is open, but {call} starts a separate one. Call it before paceline.start(), or close the "
            "run first: run.close()."
        )
    before = generators.get_state(torch.device("cpu"))
    copies = copy.deepcopy((model, optimizer))
    run = session.start(**{"progress": "off", **settings})
    try:
        yield run, *copies
    finally:
        run.close()
        generators.set_state(before, torch.device("cpu"))
