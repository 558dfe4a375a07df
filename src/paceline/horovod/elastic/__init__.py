"""hvd.elastic: a training function that goes on from its last commit when the launcher has started it again."""

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
    """Decorates a function whose first argument is a TorchState.

    Before it is called the state is that of the last commit, if the launcher has started the script again, and the same
    on all processes. An error ends the process: the launcher then starts all of them again (`--max-restarts`), and they
    go on from the last commit.
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
