"""Settings of torch while a run has tensors that are cut over devices (strategy tensor); restored at its end.

- Whole tensors that meet a cut one count as replicated, which they are.
- Random numbers on a cut tensor differ over the devices, and the generators have equal states afterwards. On GPUs torch
  does this itself (OffsetBasedRNGTracker). But attention's fused kernels draw for themselves, the same on each device,
  so that dropout in them is refused.
- torch.cat leaves out empty tensors of one dimension where it joins cut tensors. The caches of Hugging Face's models
  begin with one; torch allows it among tensors of more dimensions, but its rule for cut tensors does not.
- Kernels that know no cut tensors are not chosen: CPUs' fused attention, nn.TransformerEncoderLayer's fast path.

The generators' tracker and the table of operations are private names of torch; tests/strategies/test_tensor.py and
test_parts.py say whether a new version still has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor.experimental import implicit_replication

from paceline.errors import ModelError

_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def refusing_dropout(op: Any, strategy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """torch's rule for cutting a fused attention, which refuses dropout."""
    position = [argument.name for argument in op._schema.arguments].index("dropout_p")

    def inner(schema: Any) -> Any:
        if len(schema.args_schema) > position and schema.args_schema[position] > 0:
            raise ModelError(
                "dropout in a fused attention kernel would draw alike for the heads of each device. Set its "
                "dropout_p to 0, or use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        return strategy(schema)

    return inner


class _CPURNGTracker:
    """In place of torch's tracker, which has none for CPUs."""

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
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
    tracker, fast, flash = _random._rng_tracker, torch.backends.mha.get_fastpath_enabled(), None
    if mesh.device_type != "cpu":  # torch's own would take rank 0's generator for all shards when it is made
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    else:
        _random._rng_tracker = _CPURNGTracker()  # type: ignore[assignment]
        flash = torch.backends.cuda.flash_sdp_enabled()  # also of CPUs, whose kernel knows no DTensor
        torch.backends.cuda.enable_flash_sdp(False)
    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    kept = {op: known[op] for name in _FUSED if (op := getattr(torch.ops.aten, name).default) in known}
    known.update({op: refusing_dropout(op, strategy) for op, strategy in kept.items()})
    cat = torch.cat
    torch.cat = _leaving_out_empty(cat)
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer's, which knows no DTensor
    try:
        with implicit_replication():
            yield
    finally:
        torch.cat = cat
        _random._rng_tracker = tracker
        known.update(kept)
        torch.backends.mha.set_fastpath_enabled(fast)
        if flash is not None:
            torch.backends.cuda.enable_flash_sdp(flash)
