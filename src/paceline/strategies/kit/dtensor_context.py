"""Settings of torch while a run has tensors sharded over devices (strategy tensor); restored when the run ends.

- Whole tensors that are combined with sharded tensors count as replicated.
- Random numbers on a sharded tensor differ between devices, and the generators have equal states afterwards. On GPUs
  torch does this itself (OffsetBasedRNGTracker). But attention's fused kernels draw their own numbers, the same on each
  device, so dropout in them is refused.
- torch.cat skips empty 1-d tensors when it joins sharded tensors. The caches of Hugging Face's models begin with an
  empty 1-d tensor. torch.cat accepts it among plain tensors of more dimensions, but DTensor's rule does not.
- Kernels that do not support DTensors are disabled: fused attention on CPUs, nn.TransformerEncoderLayer's fast path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from paceline.errors import ModelError
from paceline.torch_private.core import schema_of
from paceline.torch_private.distributed_tensor import ATTENTION, Draws, checking, drawing_by


def refuse_dropout(op: Any, args: Sequence[Any]) -> None:
    """Raises ModelError if a fused attention on sharded tensors has dropout."""
    position = [argument.name for argument in schema_of(op).arguments].index("dropout_p")
    if len(args) > position and args[position] > 0:
        raise ModelError(
            "dropout in a fused attention kernel would draw the same numbers on every device, though each device has "
            "different heads. Set its dropout_p to 0, or use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


class _CPUDraws(Draws):
    """Random numbers on a sharded tensor on CPUs: different on each device, with equal generator states afterwards.

    On GPUs torch does this itself.
    """

    @contextmanager
    def around(self, spec: Any, generator: torch.Generator | None) -> Iterator[None]:
        chosen = generator or torch.default_generator
        number = int(torch.empty((), dtype=torch.int64).random_(2**32, generator=chosen))
        state = chosen.get_state()
        for coordinate, placement in zip(spec.mesh.get_coordinate(), spec.placements, strict=True):
            if not placement.is_replicate():
                number = (number ^ (coordinate + 1) * 0x9E3779B1) % 2**32
        chosen.manual_seed(number)
        try:
            yield
        finally:
            chosen.set_state(state)


def _leaving_out_empty(cat: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(cat)
    def inner(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            tensors = [t for t in tensors if isinstance(t, DTensor) or t.dim() != 1 or t.numel()]
        return cat(tensors, *args, **kwargs)

    return inner


@contextmanager
def dtensor_context(mesh: Any) -> Iterator[None]:
    """Apply the settings of this module within the block."""
    fast, flash = torch.backends.mha.get_fastpath_enabled(), None
    if mesh.device_type == "cpu":
        flash = torch.backends.cuda.flash_sdp_enabled()  # also controls the CPU kernel, which does not support DTensors
        torch.backends.cuda.enable_flash_sdp(False)
    cat = torch.cat
    torch.cat = _leaving_out_empty(cat)
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer's fast path
    try:
        draws = _CPUDraws() if mesh.device_type == "cpu" else None
        with implicit_replication(), drawing_by(draws, mesh), checking(ATTENTION, refuse_dropout):
            yield
    finally:
        torch.cat = cat
        torch.backends.mha.set_fastpath_enabled(fast)
        if flash is not None:
            torch.backends.cuda.enable_flash_sdp(flash)
