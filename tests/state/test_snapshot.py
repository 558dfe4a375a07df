"""Snapshots: exact copies in memory that is allocated once, and the fewest copies for a save that nothing disturbs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from paceline.state.snapshot import SnapshotBuffers, on_host


def tensors() -> dict[str, torch.Tensor]:
    weight = torch.randn(4, 6)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[1],
        "columns": weight.t(),
        "gaps": weight[:, ::2],
        "wide": torch.randn(1, 3).expand(5, 3),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "inside": weight[2:2],
        "half": torch.randn(3).to(torch.bfloat16),
        "eighth": torch.randn(3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def held(buffers: SnapshotBuffers) -> int:
    """Bytes of all buffers."""
    return sum(buffer.nbytes for buffer, _ in buffers._buffers.values())


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name].float(), tensor.detach().float()), name


@pytest.mark.parametrize("copy", [on_host, lambda named: SnapshotBuffers().copy(named)], ids=["on_host", "copy"])
def test_what_comes_out_is_equal_whole_and_ready_for_safetensors(copy) -> None:  # type: ignore[no-untyped-def]
    named = tensors()
    with pytest.raises((RuntimeError, ValueError)):
        save(named)  # or the test tests nothing
    ready = copy(named)
    assert_equal(ready, named)
    loaded = load(save(ready))  # in an order of its own
    assert_equal({name: loaded[name] for name in named}, named)
    assert not any(tensor.requires_grad for tensor in ready.values())


def test_a_snapshot_does_not_change_with_the_original() -> None:
    named = {name: tensor.detach().clone() for name, tensor in tensors().items()}
    kept = {name: tensor.clone() for name, tensor in named.items()}
    taken = SnapshotBuffers().copy(named)
    for tensor in named.values():
        tensor.zero_()
    assert_equal(taken, kept)


def test_the_memory_is_taken_once() -> None:
    buffers, named = SnapshotBuffers(), tensors()
    places = {name: tensor.data_ptr() for name, tensor in buffers.copy(named).items()}
    again = buffers.copy({name: tensor.detach().clone() for name, tensor in tensors().items()})
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert held(buffers) == sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def test_only_what_changed_shape_or_dtype_is_allocated_anew() -> None:
    buffers = SnapshotBuffers()
    # Held, so that the allocator cannot hand a freed block out again under the same address.
    first = buffers.copy({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3), "gone": torch.ones(100)})
    second = buffers.copy({"c": torch.ones(3).double(), "b": torch.full((3,), 2.0), "a": torch.ones(4)})
    assert list(second) == ["c", "b", "a"]
    assert second["b"].data_ptr() == first["b"].data_ptr()
    assert second["a"].data_ptr() != first["a"].data_ptr()
    assert second["c"].data_ptr() != first["c"].data_ptr()
    assert_equal(second, {"c": torch.ones(3).double(), "b": torch.full((3,), 2.0), "a": torch.ones(4)})
    assert held(buffers) == 4 * 4 + 3 * 4 + 3 * 8


def test_on_host_copies_only_what_it_must() -> None:
    flat = torch.randn(10)
    named = {"left": flat[:4], "right": flat[4:], "other": torch.randn(3), "again": flat[2:6]}
    ready = on_host(named)
    copied = {name for name, tensor in ready.items() if tensor.data_ptr() != named[name].data_ptr()}
    # Of three that overlap in a chain, left and right can stay where they are once the one between them has moved.
    assert copied == {"again"}
    assert_equal(ready, named)
    save(ready)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_cuda_are_pinned_and_complete() -> None:
    buffers = SnapshotBuffers()
    named = {
        "a": torch.randn(1000, 1000, device="cuda"),
        "b": torch.randn(5),
        "c": torch.randn(4, 4, device="cuda").t(),
    }
    for _ in range(3):
        named["a"].normal_()
        taken = buffers.copy(named)
        assert_equal(taken, {name: tensor.cpu() for name, tensor in named.items()})
    assert taken["a"].is_pinned()
    assert not taken["b"].is_pinned()
