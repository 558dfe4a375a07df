"""Settings of torch while a run has tensors that are cut over devices (strategy tensor); restored at its end.

- Whole tensors that meet a cut one count as replicated, which they are.
- Random numbers on a cut tensor differ over the devices, and the generators have equal states afterwards. On GPUs torch
  does this itself (OffsetBasedRNGTracker). But attention's fused kernels draw for themselves, the same on each device,
  so that dropout in them is refused.
- torch.cat leaves out empty tensors of one dimension where it joins cut tensors. The caches of Hugging Face's models
  begin with one; torch allows it among tensors of more dimensions, but its rule for cut tensors does not.
- Kernels that know no cut tensors are not chosen: CPUs' fused attention, nn.TransformerEncoderLayer's fast path.
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
    """Raises ModelError where a fused attention on cut tensors has dropout."""
    position = [argument.name for argument in schema_of(op).arguments].index("dropout_p")
    if len(args) > position and args[position] > 0:
        raise ModelError(
            "dropout in a fused attention kernel would draw alike for the heads of each device. Set its "
            "dropout_p to 0, or use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


class _CPUDraws(Draws):
    """Random numbers on a cut tensor on CPUs: other ones on each device, and the generators alike afterwards. (On GPUs
    torch does this itself.)"""

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
    """Within the block torch has these settings."""
    fast, flash = torch.backends.mha.get_fastpath_enabled(), None
    if mesh.device_type == "cpu":
        flash = torch.backends.cuda.flash_sdp_enabled()  # also of CPUs, whose kernel knows no DTensor
        torch.backends.cuda.enable_flash_sdp(False)
    cat = torch.cat
    torch.cat = _leaving_out_empty(cat)
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer's, which knows no DTensor
    try:
        draws = _CPUDraws() if mesh.device_type == "cpu" else None
        with implicit_replication(), drawing_by(draws, mesh), checking(ATTENTION, refuse_dropout):
            yield
    finally:
        torch.cat = cat
        torch.backends.mha.set_fastpath_enabled(fast)
        if flash is not None:
            torch.backends.cuda.enable_flash_sdp(flash)
