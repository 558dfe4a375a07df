"""Weighted sums that wait for no device: an accelerator's tensors are kept, and read later. Here the CPU's are."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

import paceline
from paceline.metrics.metrics import Average, reduce_averages
from paceline.metrics.weighted_sum import FOLD_AT, WeightedSum

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["at once", "later"])
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tensors are read later, as those of an accelerator."""
    if not request.param:
        monkeypatch.setattr("paceline.metrics.weighted_sum.readable", lambda tensor: False)
    return not request.param


def result(*processes: WeightedSum) -> list[float]:
    """[sum, weight] over all processes, added as an all-reduce does: the three sums of each."""
    whole = [0.0, 0.0, 0.0]
    for sums in processes:
        sums.fold()
        device: Tensor = sums.device if sums.device is not None else torch.zeros(3)
        whole = [a + host + kept for a, host, kept in zip(whole, sums.host, device.tolist())]
    top, weight, rest = whole
    return [top + rest, weight]


def test_a_tensor_that_changes_before_it_is_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.metrics.weighted_sum.readable", lambda tensor: False)
    sums, value = WeightedSum(CPU, "x was changed"), torch.ones(())
    sums.add(value, 1)
    value += 1
    with pytest.raises(paceline.errors.UsageError, match="x was changed"):
        sums.fold()


def test_or_left_out(later: bool) -> None:
    sums, kept, value = WeightedSum(CPU), torch.ones(()), torch.ones(())
    sums.add(kept, 2)
    version = value._version
    value += 1
    sums.add(value, 3, version=version)
    assert result(sums) == [2.0, 2.0]


def test_sums_of_many(later: bool) -> None:
    sums = WeightedSum(CPU)
    sums.add(float("nan"), 0)
    for number in range(2 * FOLD_AT + 3):
        weight = torch.tensor(number % 3) if number % 2 else number % 3  # of 0 things a mean is NaN, and is left out
        value = torch.tensor(float("nan") if number % 3 == 0 else number, dtype=torch.float32)
        sums.add(value, weight)
    expected = sum(n * (n % 3) for n in range(2 * FOLD_AT + 3)), sum(n % 3 for n in range(2 * FOLD_AT + 3))
    assert result(sums) == list(expected)
    assert (sums.host == [0.0, 0.0, 0.0]) == later


def test_numbers_and_tensors_of_host_and_device_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here float32 tensors are the device's."""
    monkeypatch.setattr("paceline.metrics.weighted_sum.readable", lambda tensor: tensor.dtype != torch.float32)
    sums = WeightedSum(CPU)
    sums.add(0.1, torch.tensor(2.0))
    sums.add(torch.tensor(0.5), torch.tensor(3))
    sums.add(torch.tensor(0.1, dtype=torch.float64), torch.tensor(4.0))
    sums.add(torch.tensor(2.0), 5)
    whole, weight = result(sums)
    assert weight == 14
    assert whole == pytest.approx(0.1 * 2 + 0.5 * 3 + 0.1 * 4 + 2.0 * 5, rel=1e-15)


def test_a_sum_over_nothing_counts_unless_it_is_no_number(later: bool) -> None:
    """Total(penalty, 0) on a shard without tokens is part of the loss; 0 / 0 is not."""
    sums = WeightedSum(CPU)
    for value, weight in ((6.0, 2.0), (0.5, 0.0), (float("nan"), 0.0)):
        sums.add(torch.tensor(value), weight, summed=True)
    sums.add(1.0, 1)
    assert result(sums) == [7.5, 3.0]


def test_the_order_changes_no_bit(later: bool) -> None:
    """Losses of 1e-6 to 1e3 with the counts of tokens: plain float64 sums of them differ."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp(torch.empty(300).uniform_(-14, 7, generator=generator))
    counts = torch.randint(1, 10**6, (300,), generator=generator).tolist()
    exact = sum(Fraction(float(value)) * count for value, count in zip(values, counts))
    found, plain = set(), set()
    for number in range(4):
        order = torch.randperm(300, generator=generator).tolist()
        processes = [WeightedSum(CPU) for _ in range(number + 1)]
        for place, i in enumerate(order):
            processes[place % len(processes)].add(values[i], counts[i])
        found.add(result(*processes)[0])
        total = 0.0
        for i in order:  # not sum(), which keeps what is rounded off from Python 3.12 on
            total += float(values[i]) * counts[i]
        plain.add(total)
    assert len(found) == 1 < len(plain)
    assert found.pop() == pytest.approx(float(exact), rel=1e-15)


def test_a_mean_that_is_reduced_in_between_has_the_same_bits() -> None:
    """A checkpoint in mid-epoch reduces the mean loss so far; the mean of the epoch must not tell of it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp(torch.empty(60).uniform_(-14, 7, generator=generator)).double()
    for seed in range(20):
        often = torch.rand(60, generator=generator.manual_seed(seed)) < 0.3
        once, several = Average(CPU), Average(CPU)
        for value, reduce in zip(values, often.tolist()):
            once.add_mean(value, 7)
            several.add_mean(value, 7)
            if reduce:
                kept = several.shared
                reduce_averages([several])
                restored = Average(CPU)
                restored.shared, several = several.shared, restored
                assert kept != restored.shared
        assert reduce_averages([several]) == reduce_averages([once])


def test_what_is_no_number_stays_so(later: bool) -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        sums = WeightedSum(CPU)
        sums.add(torch.tensor(value), 2)
        sums.add(torch.tensor(1.0), 2)
        assert str(result(sums)[0]) == str(value)
    tiny = WeightedSum(CPU)
    tiny.add(torch.tensor(1e-12), 3)
    assert result(tiny)[0] == pytest.approx(3e-12, rel=1e-5)
