"""horovod.run: call a function in several processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import SettingError
from paceline.launching import launch

_OF_THE_TRANSPORT = {"use_gloo", "use_mpi", "verbose", "disable_cache", "start_timeout", "network_interfaces"}
"""Options of Horovod's run that have no effect here, because torch.distributed is always the transport."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `np` processes of this machine, and return the results by rank.

    Raises:
        SettingError: `hosts` names other machines, or an option is not supported.
    """
    names = [part.split(":")[0] for part in (hosts or "").split(",") if part]
    if any(name not in ("localhost", "127.0.0.1") for name in names):
        raise SettingError(
            f"run(hosts={hosts!r}): functions run on this machine only. For several machines, start a script on each "
            "with paceline run --nnodes, torchrun, srun or mpirun."
        )
    wrong = sorted(name for name, value in options.items() if name not in _OF_THE_TRANSPORT and value is not None)
    if wrong:
        raise SettingError(
            f"run({wrong[0]}={options[wrong[0]]!r}): paceline.horovod.run does not support it. Leave it out."
        )
    return launch(functools.partial(func, *args, **(kwargs or {})), nproc=np)
