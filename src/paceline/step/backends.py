"""torch's global switches: set while a run is open, then put back.

A setting that is None leaves its switch alone. (Setting these switches starts no CUDA context.)
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
    """Set the switches that the settings ask for. Returns a function that puts all of them back. Call it before
    anything is computed on a GPU: cuBLAS reads the layout of its workspace once."""
    undo = ExitStack()  # puts back the latest first
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
        # Deterministic algorithms would also fill all new memory, with a kernel for each tensor that is made.
        _set(undo, deterministic, "fill_uninitialized_memory", False)
    if settings.tf32 is not None:
        undo.callback(_tf32(settings.tf32))
    return undo.close


def _set(undo: ExitStack, owner: Any, name: str, value: bool) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _deterministic_algorithms() -> Callable[[], None]:
    """Returns a function that puts everything back, as _tf32 does."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    # Without this variable cuBLAS uses whichever of several workspaces is free. torch accepts two values; this one is 8
    # buffers of 4 MiB (NVIDIA's cuBLAS documentation, "Results Reproducibility").
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)

    def put_back() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)

    return put_back


def _tf32(on: bool) -> Callable[[], None]:
    """TF32 in matrix products and in cuDNN's convolutions and recurrent networks, or not.

    Since 2.9 torch has two sets of switches. Writing the new set makes readers of the old one raise, some of torch's
    own among them (torch.compile up to 2.12). Writing the old set sets both, but warns up to 2.12. So the old set is
    written without the warning. At the end the new set's values are put back too, since they have a third one, "none".
    """
    backends: Any = torch.backends
    switches = [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32")]
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn] if hasattr(backends.cudnn, "rnn") else []
    precise = [place.fp32_precision for place in places]
    if places:  # a script that has written the new set cannot read the old one any more
        before = [precise[0] == "tf32", precise[1] == "tf32"]
    else:
        before = [getattr(place, name) for place, name in switches]

    def write(values: list[bool]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (place, name), value in zip(switches, values, strict=True):
                setattr(place, name, value)

    def put_back() -> None:
        write(before)
        for place, value in zip(places, precise, strict=True):
            place.fp32_precision = value

    write([on, on])
    return put_back


def allows_tf32(device: torch.device) -> bool:
    """Whether float32 products on this device may be computed in TF32, by what torch's switches say now: those of
    matrix products, of convolutions (which torch allows by default) or of recurrent layers. Only NVIDIA GPUs from
    Ampere (compute capability 8) on have it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backends: Any = torch.backends
    # The newer switches can be read whichever set was written; where they are inherited, as they are in force.
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return any(place.fp32_precision == "tf32" for place in places)


def channels_last(model: nn.Module) -> None:
    """Store 4-d weights (of 2-d convolutions) as channels_last and 5-d weights (3-d) as channels_last_3d, in place.
    Activations follow, since a convolution's output has the memory format of its weights."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() in (4, 5):
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            tensor.data = tensor.data.contiguous(memory_format=form)
