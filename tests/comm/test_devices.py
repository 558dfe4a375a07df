"""Many tensors between devices: in buckets, each with its own shape and dtype where it arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.comm import devices


def tensors(offset: float) -> list[Tensor]:
    shapes = [(3, 4), (0, 2), (), (5,), (2, 3, 1, 2)]
    made = [torch.arange(offset, offset + torch.Size(shape).numel()).reshape(shape) for shape in shapes]
    made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
    return [*made, made[0].double(), made[3].to(torch.bfloat16)]


@pytest.mark.parametrize("most_bytes", [1, 50, 10**6])
@pytest.mark.parametrize(
    ("act", "expected"),
    [(devices.copy_tensors, lambda source, target: source), (devices.add_tensors, lambda s, t: s + t)],
    ids=["copy", "add"],
)
def test_through_buckets_and_without(
    act: Callable[..., None],
    expected: Callable[[Tensor, Tensor], Tensor],
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one device here: what is laid side by side for two is made to be for one too."""
    buckets = devices.buckets
    sizes: list[int] = []

    def counted(chosen: list[Tensor]) -> list[list[int]]:
        found = list(buckets(chosen, most_bytes))
        sizes.extend(sum(chosen[i].nbytes for i in positions) for positions in found)
        return found

    monkeypatch.setattr(devices, "buckets", counted)
    for apart in (False, True):
        monkeypatch.setattr(devices, "_on_one_device", lambda a, b, apart=apart: not apart)
        sources, targets = tensors(1.0), tensors(100.0)
        kept = [s.clone() for s in sources], [t.clone() for t in targets]
        act(sources, targets)
        for source, target, s, t in zip(sources, targets, *kept, strict=True):
            assert torch.equal(source, s)
            assert torch.equal(target, expected(s, t))
            assert target.stride() == t.stride()
    largest = max(t.nbytes for t in tensors(1.0))
    assert len(sizes) >= 3, "one for each dtype at least"
    assert max(sizes) <= max(most_bytes, largest)
    act([], [])


def test_a_sum_on_every_device() -> None:
    flats = [torch.arange(7, dtype=torch.float64) * k for k in (1, 2, 3)]
    devices.sum_on_first(flats)
    for flat in flats:
        assert torch.equal(flat, torch.arange(7, dtype=torch.float64) * 6)
