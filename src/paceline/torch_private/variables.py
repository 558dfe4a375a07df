"""Check environment variables that torch's native code reads when a process group is made. Does not import torch.

With an invalid value torch aborts the process or hangs, and no message names the variable. So the launcher and
`paceline.start` check first.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from paceline.errors import SettingError

_WORDS = ("0", "1", "y", "n", "yes", "no", "t", "f", "true", "false")  # torch's getCvarBool, in any case
_MOST = 2**31 - 1
_MOST_CALLS = 10_000_000  # of a flight recorder, which allocates memory for all calls at its start

# Variable -> the smallest and the largest valid number.
_NUMBERS = {
    "TORCH_FR_BUFFER_SIZE": (0, _MOST_CALLS),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": (0, _MOST_CALLS),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (0, 3),
    "NCCL_ASYNC_ERROR_HANDLING": (0, 3),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": (0, _MOST),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": (0, _MOST),
    "TORCH_NCCL_COORD_CHECK_MILSEC": (0, _MOST),
    "TORCH_NCCL_RANKS_PER_ROOT": (0, _MOST),
}
_SWITCHES = (
    "TORCH_FR_CPP_STACK",
    "TORCH_GLOO_LAZY_INIT",
    "TORCH_NCCL_TRACE_CPP_STACK",
    "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN",
    "TORCH_NCCL_NAN_CHECK",
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
_CHOICES = {
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),  # in any case
    "GLOO_DEVICE_TRANSPORT": ("TCP", "TCP_TLS", "UV", "IBVERBS"),
}
_INTERFACES = "GLOO_SOCKET_IFNAME"  # names, separated by commas


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises SettingError for a variable with a value that torch cannot read."""
    for name, (least, most) in _NUMBERS.items():
        text = environ.get(name)
        if text is not None and not _is_number(text, least, most):
            raise SettingError(f"{name}={text!r} is not an integer from {least} to {most}. Correct it, or unset it.")
    for name in _SWITCHES:
        text = environ.get(name)
        if text is not None and text.lower() not in _WORDS:
            raise SettingError(f"{name}={text!r} is neither 0 nor 1. Correct it, or unset it.")
    for name, words in _CHOICES.items():
        text = environ.get(name)
        if text is not None and text.upper() not in words:
            raise SettingError(f"{name}={text!r} is not one of {', '.join(words)}. Correct it, or unset it.")


def check_interfaces(environ: Mapping[str, str]) -> None:
    """Raises SettingError if gloo is set to use a network interface that this machine does not have."""
    there = {name for _, name in socket.if_nameindex()}
    missing = [name for name in environ.get(_INTERFACES, "").split(",") if name and name not in there]
    if missing:
        raise SettingError(
            f"{_INTERFACES}={environ[_INTERFACES]!r}: this machine has no network interface {missing[0]!r}, only "
            f"{', '.join(sorted(there))}. Correct it, or unset it."
        )


def _is_number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20 and least <= int(text) <= most
