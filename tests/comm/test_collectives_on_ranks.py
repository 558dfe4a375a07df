"""Collectives and sums over replicas, on 3 processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import gathering, group, same_bits
from paceline.comm.mesh import group_of, world_group
from paceline.comm.replicas import differentiable_sum
from paceline.errors import SettingError, UsageError


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.ranks(3)
def test_all_reduce_sums_multiplies_and_takes_extremes_in_place() -> None:
    rank, size = place()
    for op, expected in (("sum", 3 + 2 * sum(range(size))), ("min", 1), ("max", 2 * size - 1)):
        tensor = torch.tensor([[1.0 + 2 * rank]])
        assert world_group().all_reduce(tensor, op).item() == expected
        assert tensor.item() == expected, "in place"
    assert world_group().all_reduce(torch.tensor([rank + 1]), "product").item() == 6
    with pytest.raises(SettingError, match=r"'men'.*Did you mean 'min'"):
        world_group().all_reduce(torch.ones(1), "men")


@pytest.mark.ranks(3)
def test_all_reduce_sums_dtypes_that_gloo_refuses() -> None:
    rank, size = place()
    for dtype in (torch.int16, torch.float8_e5m2):
        tensor = torch.tensor([rank, 1]).to(dtype)
        world_group().all_reduce(tensor)
        assert tensor.dtype == dtype
        assert tensor.float().tolist() == [sum(range(size)), size]


@pytest.mark.ranks(3)
def test_all_reduce_of_a_strided_tensor_leaves_what_lies_between() -> None:
    rank, size = place()
    whole = torch.full((4, 4), float(rank))
    world_group().all_reduce(whole[:, 1:3])
    assert torch.equal(whole[:, 1:3], torch.full((4, 2), float(sum(range(size)))))
    assert torch.equal(whole[:, 0], torch.full((4,), float(rank)))


@pytest.mark.ranks(3)
def test_all_reduces_in_flight_at_once_may_each_be_awaited_twice() -> None:
    rank, size = place()
    tensors = [torch.full((5,), float(rank + n)) for n in range(3)]
    pending = [world_group().all_reduce(tensor, async_op=True) for tensor in tensors]
    for n, one in enumerate(pending):
        expected = torch.full((5,), float(sum(range(size)) + n * size))
        assert torch.equal(one.wait(), expected)
        assert torch.equal(one.wait(), expected), "waiting twice"
        assert torch.equal(tensors[n], expected)


@pytest.mark.ranks(3)
def test_all_reduce_in_a_group_leaves_the_other_ranks_out() -> None:
    rank, _ = place()
    native = dist.new_group([0, 2])
    tensor = torch.tensor([10.0**rank])
    if rank != 1:
        pair = group_of(native)
        assert pair.all_reduce(tensor).item() == 101
        assert (pair.size, pair.rank) == (2, rank // 2)
        assert pair.sum(torch.ones(1)).item() == 2


@pytest.mark.ranks(3)
def test_replicas_sum_into_a_new_tensor_without_gradient() -> None:
    rank, size = place()
    replicas = world_group()
    assert (replicas.size, replicas.rank) == (size, rank)
    own = torch.full((2, 2), 2.0**rank, requires_grad=True)
    total = replicas.sum(own)
    assert torch.equal(total, torch.full((2, 2), 7.0))
    assert not total.requires_grad
    assert torch.equal(own, torch.full((2, 2), 2.0**rank)), "a new tensor"


@pytest.mark.ranks(3)
def test_differentiable_sum_has_first_and_second_derivatives_of_the_whole() -> None:
    """f = Σ_r a_r (Σ_s x_s³)² over ranks: df/dx_s = 2 A S 3 x_s² with A = Σ a, S = Σ x³, and its derivative."""
    rank, size = place()
    xs = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)[:size]
    factors = torch.tensor([1.0, 3.0, -0.5], dtype=torch.float64)[:size]
    x = xs[rank].clone().requires_grad_()
    f = factors[rank] * differentiable_sum(x**3, world_group()) ** 2
    (gradient,) = torch.autograd.grad(f, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient * (rank + 1), x)

    whole = xs.clone().requires_grad_()
    (whole_gradient,) = torch.autograd.grad(factors.sum() * (whole**3).sum() ** 2, whole, create_graph=True)
    weights = torch.arange(1.0, size + 1, dtype=torch.float64)
    (whole_second,) = torch.autograd.grad((whole_gradient * weights).sum(), whole)
    torch.testing.assert_close(gradient, whole_gradient[rank], rtol=1e-13, atol=0)
    torch.testing.assert_close(second, whole_second[rank], rtol=1e-13, atol=0)


def part(whole: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return whole.split(lengths)[dist.get_rank()]


@pytest.mark.ranks(3)
def test_gather_uneven_joins_every_dtype_bit_for_bit_with_empty_parts() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
    dtypes += [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
    for dtype in dtypes:
        for lengths in ([2, 0, 3], [0, 0, 0], [0, 0, 1], [4, 4, 4]):
            whole = (torch.randn(sum(lengths), 2, 3, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
            joined = gathering.gather_uneven(part(whole, lengths), world_group())
            assert joined.dtype == dtype
            assert joined.shape == whole.shape
            assert torch.equal(joined.view(torch.uint8), whole.contiguous().view(torch.uint8)), (dtype, lengths)


@pytest.mark.ranks(3)
def test_gather_uneven_takes_strided_conjugated_and_zero_wide_tensors() -> None:
    whole = torch.arange(60.0).reshape(5, 3, 4)
    strided = part(whole, [1, 3, 1]).permute(0, 2, 1).contiguous().permute(0, 2, 1)
    assert torch.equal(gathering.gather_uneven(strided, world_group()), whole)
    assert gathering.gather_uneven(torch.zeros(dist.get_rank(), 0), world_group()).shape == (3, 0)
    assert torch.equal(gathering.gather_uneven(torch.full((1,), dist.get_rank()), world_group()), torch.arange(3))
    conjugated = part(torch.complex(whole, -whole), [5, 0, 0]).conj()
    assert torch.equal(gathering.gather_uneven(conjugated, world_group()), torch.complex(whole, whole))


@pytest.mark.ranks(3)
def test_gather_uneven_has_first_and_second_derivatives_of_the_whole() -> None:
    """Ranks weigh the joined tensor differently: a rank's gradient is its slice of the sum of all ranks' gradients."""
    rank, _ = place()
    lengths = [2, 0, 3]
    whole = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    own = part(whole.detach(), lengths).clone().requires_grad_()
    joined = gathering.gather_uneven(own, world_group())
    (gradient,) = torch.autograd.grad((rank + 1) * (joined**3).sum() + joined.prod(), own, create_graph=True)
    (second,) = torch.autograd.grad((gradient**2).sum(), own)
    (expected,) = torch.autograd.grad(6 * (whole**3).sum() + 3 * whole.prod(), whole, create_graph=True)
    (expected_second,) = torch.autograd.grad((expected**2).sum(), whole)
    torch.testing.assert_close(gradient, part(expected, lengths), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(second, part(expected_second, lengths), rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(3)
def test_gather_uneven_has_a_backward_on_all_ranks_if_one_needs_a_gradient() -> None:
    """All ranks must run the backward, or the others would wait for ever."""
    rank, _ = place()
    own = torch.full((1, 2), float(rank), requires_grad=rank == 1)
    joined = gathering.gather_uneven(own, world_group())
    assert joined.requires_grad
    joined.square().sum().backward()
    assert (own.grad is None) == (rank != 1)
    if rank == 1:
        assert torch.equal(own.grad, torch.full((1, 2), 6.0))
    assert not gathering.gather_uneven(own.detach(), world_group()).requires_grad
    with torch.no_grad():
        assert not gathering.gather_uneven(own, world_group()).requires_grad


@pytest.mark.ranks(3)
def test_gather_uneven_names_shapes_and_dtypes_that_differ_on_every_rank() -> None:
    rank, _ = place()
    with pytest.raises(UsageError, match=r"rank 0: \(2, 3\), rank 1: \(2, 4\), rank 2: \(2, 3\)"):
        gathering.gather_uneven(torch.zeros(2, 4 if rank == 1 else 3), world_group())
    with pytest.raises(UsageError, match=r"rank 0: \(2,\), rank 1: \(2,\), rank 2: \(2, 1\)"):
        gathering.gather_uneven(torch.zeros(2, 1) if rank == 2 else torch.zeros(2), world_group())
    with pytest.raises(UsageError, match=r"0-dim.*reshape\(1\)"):
        gathering.gather_uneven(torch.zeros(()) if rank == 1 else torch.zeros(1), world_group())
    with pytest.raises(UsageError, match=r"rank 1: torch.int32"):
        gathering.gather_uneven(torch.zeros(1, dtype=torch.int32 if rank == 1 else torch.int64), world_group())
    assert gathering.gather_uneven(torch.ones(1), world_group()).tolist() == [1, 1, 1], "and it works afterwards"


@pytest.mark.ranks(3)
def test_objects_are_gathered_in_rank_order_and_broadcast_from_any_rank() -> None:
    rank, size = place()
    mine: dict[str, Any] = {"rank": rank, "text": "x" * 1000 * rank}
    assert world_group().gather(mine) == [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    assert world_group().broadcast(mine) == {"rank": 0, "text": ""}
    assert world_group().broadcast(mine, src=2)["rank"] == 2


@pytest.mark.ranks(3)
def test_broadcast_tensors_writes_every_dtype_and_layout_in_place_over_several_buckets() -> None:
    rank, _ = place()
    assert group.BUCKET_BYTES == 25 * 2**20

    def tensors(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(3, 4, 5, 6, generator=generator).to(memory_format=torch.channels_last)]
        made += [torch.randn(n, generator=generator, dtype=torch.float64) for n in (0, 1, 7)]
        made += [torch.randint(-9, 9, (3,), generator=generator).to(torch.int16), torch.tensor(seed, dtype=torch.int64)]
        made += [torch.randn(4, 4, generator=generator)[:, 1:3], torch.rand(5, generator=generator) > 0.5]
        made += [torch.tensor([float("nan"), -0.0]) * seed, torch.randn(2, generator=generator).to(torch.bfloat16)]
        made += [torch.randn(n, 1000, generator=generator) for n in (5, 10, 50, 3, 20)]  # some fill a bucket alone
        return made

    for src in (0, 2):
        own = tensors(rank + 1)
        parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
        addresses = [tensor.data_ptr() for tensor in own]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "BUCKET_BYTES", 2**16)
            world_group().broadcast_tensors([*own, parameter], src=src)
        for tensor, expected in zip(own, tensors(src + 1)):
            assert torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
            )
        assert parameter.tolist() == [src, src]
        assert addresses == [tensor.data_ptr() for tensor in own], "in place"
    with pytest.raises(UsageError, match=r"at index 1: .*rank 1: .*\(3,\)"):
        world_group().broadcast_tensors([torch.zeros(2), torch.zeros(3 if rank == 1 else 2)])
    with pytest.raises(UsageError, match=r"rank 0: 1, rank 1: 1, rank 2: 2"):
        world_group().broadcast_tensors([torch.zeros(2)] * (2 if rank == 2 else 1))
    world_group().broadcast_tensors([])


@pytest.mark.ranks(3)
def test_digest_mismatch_names_tensors_that_differ_in_one_bit_or_in_order() -> None:
    rank, _ = place()

    def named(**changed: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        made = {"a": torch.randn(3, 300000, generator=generator), "b": torch.arange(5), "c": torch.tensor(True)}
        made |= {"d": torch.zeros(2, dtype=torch.bfloat16), "e": torch.zeros(0)}
        return list((made | (changed if rank == 1 else {})).items())

    assert same_bits.digest_mismatch(named(), world_group()) == []
    a = dict(named())["a"].clone()
    a[2, 299999] = torch.nextafter(a[2, 299999], torch.tensor(9.0))
    assert same_bits.digest_mismatch(named(a=a), world_group()) == ["a"], "one bit, in the last chunk"
    swapped = dict(named())["a"].flip(1)
    assert same_bits.digest_mismatch(named(a=swapped, c=torch.tensor(False)), world_group()) == ["a", "c"], (
        "the order counts"
    )
    assert same_bits.digest_mismatch(named(d=-torch.zeros(2, dtype=torch.bfloat16)), world_group()) == ["d"], (
        "minus zero"
    )
    with pytest.raises(UsageError, match="do not hold the same tensors"):
        same_bits.digest_mismatch(named(b=torch.arange(6)), world_group())
    with pytest.raises(UsageError, match="do not hold the same tensors"):
        same_bits.digest_mismatch(named(f=torch.arange(6)), world_group())


@pytest.mark.ranks(3)
def test_barrier_waits_for_the_last_rank(tmp_path: Path) -> None:
    import time

    rank, _ = place()
    if rank == 1:
        time.sleep(0.3)
        (tmp_path / "came").touch()
    world_group().barrier()
    assert (tmp_path / "came").exists()
