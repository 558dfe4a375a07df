"""hvd.elastic: a training function that resumes from its last commit after a restart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paceline.horovod.elastic import elastic_state
from paceline.horovod.elastic.elastic_sampler import ElasticSampler
from paceline.horovod.elastic.elastic_state import TorchState
from paceline.horovod.hvd_world import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "init", "run", "shutdown"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function. Its first argument is a TorchState.

    If the launcher has restarted the script, the state is first loaded from the last commit. Before each call of the
    function, the state is synchronized over all processes. An error ends the process. The launcher then restarts all
    processes (`--max-restarts`), and they resume from the last commit.
    """

    @functools.wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        if state.resume():
            state.on_reset()
        state.sync()
        result = func(state, *args, **kwargs)
        elastic_state.forget()
        return result

    return wrapper
