"""Set torch's global switches while a run is open, and restore them afterwards.

A setting of None leaves its switch unchanged. Setting these switches does not create a CUDA context.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import deterministic

from paceline.config import Settings
from paceline.step.environment_fingerprint import threads
from paceline.world import THREAD_BUDGET

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def apply(settings: Settings) -> Callable[[], None]:
    """Set the switches that the settings ask for. Returns a function that restores all of them.

    Call it before the first computation on a GPU: cuBLAS reads its workspace configuration once.
    """
    undo = ExitStack()  # restores in reverse order
    cudnn = torch.backends.cudnn
    if settings.cudnn_benchmark is not None:
        _set(undo, cudnn, "benchmark", settings.cudnn_benchmark)
    if settings.reproducible is not None:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads(mark=THREAD_BUDGET))
    if settings.deterministic_by:
        _set(undo, cudnn, "benchmark", False)
        _set(undo, cudnn, "deterministic", True)
        undo.callback(_deterministic_algorithms())
        # Deterministic algorithms would also fill all new memory, with one more kernel for each new tensor.
        _set(undo, deterministic, "fill_uninitialized_memory", False)
    if settings.tf32 is not None:
        undo.callback(_tf32(settings.tf32))
    return undo.close


def _set(undo: ExitStack, owner: Any, name: str, value: bool) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _deterministic_algorithms() -> Callable[[], None]:
    """Turn on deterministic algorithms. Returns a function that restores the previous state."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    # Without this variable cuBLAS uses any of several workspaces that is free. torch accepts two values. The value here
    # means 8 buffers of 4 MiB (NVIDIA's cuBLAS documentation, "Results Reproducibility").
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)

    def put_back() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)

    return put_back


def _tf32(on: bool) -> Callable[[], None]:
    """Turn TF32 on or off for matrix products and for cuDNN's convolutions and recurrent networks.

    Returns a function that restores the previous state. Since version 2.9 torch has two sets of switches. Writing the
    new set makes reads of the old set raise, including reads within torch (torch.compile up to 2.12). Writing the old
    set changes both, but warns up to 2.12. So this function writes the old set and suppresses the warning. The new
    set's values are restored as well, since they can also be "none".
    """
    backends: Any = torch.backends
    switches = [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32")]
    modules = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn] if hasattr(backends.cudnn, "rnn") else []
    precise = [module.fp32_precision for module in modules]
    if modules:  # if the script has written the new set, the old set cannot be read any more
        before = [precise[0] == "tf32", precise[1] == "tf32"]
    else:
        before = [getattr(module, name) for module, name in switches]

    def write(values: list[bool]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (module, name), value in zip(switches, values, strict=True):
                setattr(module, name, value)

    def put_back() -> None:
        write(before)
        for module, value in zip(modules, precise, strict=True):
            module.fp32_precision = value

    write([on, on])
    return put_back


def allows_tf32(device: torch.device) -> bool:
    """Whether torch's switches now allow TF32 for float32 computations on this device.

    True if any of three switches allows it: matrix products, convolutions (on by default in torch) or recurrent layers.
    Only NVIDIA GPUs from Ampere (compute capability 8) on have TF32.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backends: Any = torch.backends
    # The newer switches can be read after a write to either set. They return the value in effect, even if inherited.
    modules = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return any(module.fp32_precision == "tf32" for module in modules)


def channels_last(model: nn.Module) -> None:
    """Store 4-d weights (2-d convolutions) as channels_last and 5-d weights (3-d) as channels_last_3d, in place.

    Activations follow, since a convolution's output has the memory format of its weights.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() in (4, 5):
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            tensor.data = tensor.data.contiguous(memory_format=form)
