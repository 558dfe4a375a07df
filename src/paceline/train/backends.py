"""Settings of torch's own backends: for as long as a run is open, and then as they were.

What is None is left as torch, or the script, has it. (Setting these switches starts no CUDA context.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.config import Settings
from paceline.train.environment_fingerprint import threads
from paceline.world import THREAD_BUDGET

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def apply(settings: Settings) -> Callable[[], None]:
    """Sets what the settings ask for, and returns what puts everything back. Call it before anything is computed on a
    GPU: cuBLAS reads its workspace's layout once."""
    undo: list[Callable[[], None]] = []
    cudnn: Any = torch.backends.cudnn
    if settings.cudnn_benchmark is not None:
        undo.append(_set(cudnn, "benchmark", settings.cudnn_benchmark))
    if settings.reproducible is not None:
        undo.append(_threads(threads(mark=THREAD_BUDGET)))
    if settings.deterministic or settings.reproducible is not None:
        undo.append(_set(cudnn, "benchmark", False))
        undo.append(_set(cudnn, "deterministic", True))
        undo.append(_deterministic_algorithms())
    if settings.tf32 is not None:
        undo.append(_tf32(settings.tf32))

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


def _set(place: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(place, name)
    setattr(place, name, value)
    return lambda: setattr(place, name, before)


def _threads(count: int) -> Callable[[], None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return lambda: torch.set_num_threads(before)


def _deterministic_algorithms() -> Callable[[], None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    # Without it cuBLAS chooses among several workspaces as they come free; this is one of the two values that torch
    # accepts, 8 buffers of 4 MiB (NVIDIA's cuBLAS documentation, "Results Reproducibility").
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)

    def put_back() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)

    return put_back


def _tf32(on: bool) -> Callable[[], None]:
    """Matrix products and cuDNN's convolutions and recurrent networks in TF32, or not.

    Torch has two sets of switches since 2.9. To write the new one makes readers of the old one raise, some of torch's
    own among them (torch.compile up to 2.12); to write the old one keeps both in step, but up to 2.12 warns. So the old
    one is written, quietly; and at the end the new one's values come back as well, since it has a third one, "none".
    """
    backends: Any = torch.backends
    switches = [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32")]
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn] if hasattr(backends.cudnn, "rnn") else []
    precise = [place.fp32_precision for place in places]
    if places:  # a script that has written the new ones may not read the old ones any more
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


def channels_last(model: nn.Module) -> None:
    """Lays 4-d weights (of 2-d convolutions) out as channels_last and 5-d ones (3-d) as channels_last_3d, in place: the
    parameters stay the same objects. Activations follow, since a convolution takes the format of its weights."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() in (4, 5):
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            tensor.data = tensor.data.contiguous(memory_format=form)
