"""Numbers come to a device without a copy from the host, for which the host would wait. The device is "meta"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.comm.mesh import Mesh
from paceline.comm.scalars import scalar, wide_dtype
from paceline.comm.tree_sums import TreeSums
from paceline.step.accounts import Accounts, Counts
from paceline.step.loss import local_loss
from paceline.step.tree_accounts import TreeAccounts
from paceline.strategies.base import Piece, Term, Work
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.pipeline.pipeline_loss import Losses

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPE = wide_dtype(META)
"""The device of these tests is one that computes in float32, as are all but CPUs and CUDA's."""


class _Copies(TorchFunctionMode):
    """Notes each call that makes a tensor of a number on the host, or takes one there, and brings it to the device."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arrived = isinstance(result, Tensor) and result.device != CPU
        host = not isinstance(args[0], Tensor) or args[0].device == CPU if args else False
        if arrived and host and getattr(func, "__name__", "") in ("as_tensor", "tensor", "asarray", "to", "cuda"):
            self.found.append(func.__name__)
        return result


@contextmanager
def no_copies() -> Iterator[None]:
    with _Copies() as copies:
        yield
    assert copies.found == []


@pytest.mark.parametrize("value", [3, 2.5, torch.tensor(7), torch.tensor([4.0])])
def test_a_number_is_filled_in(value: Any) -> None:
    with no_copies():
        made = scalar(value, DTYPE, META)
    assert (made.shape, made.dtype, made.device) == ((), DTYPE, META)


def test_these_tests_see_a_copy() -> None:
    for copying in (
        lambda: torch.as_tensor(3, device=META),
        lambda: torch.tensor(3.0, device=META),
        lambda: torch.tensor(3).to(META),
    ):
        with pytest.raises(AssertionError), no_copies():
            copying()


def test_it_keeps_its_value() -> None:
    third = torch.tensor(1 / 3, dtype=torch.float64, requires_grad=True)
    assert [scalar(v, torch.float64, CPU).item() for v in (0.1, 2**40 + 1, third)] == [0.1, 2**40 + 1, 1 / 3]
    assert not scalar(third, torch.float64, CPU).requires_grad
    assert scalar(third, torch.float32, CPU).dtype == torch.float32


# --- the numbers of a step


def on_meta(count: Any) -> Term:
    return Term(torch.empty((), device=META), count)


@pytest.mark.parametrize("count", [5, 2.5, torch.tensor(5)])
def test_counts_of_losses(count: Any) -> None:
    counts = Counts(Mesh(META, 0), META, agreed=True)
    with no_copies():
        counts.add((0, 0), [count, 3])
        counts.power((0, 0))
        assert counts.inverse([(0, 0)])[0].device == META  # type: ignore[union-attr]


@pytest.mark.parametrize("terms", [[[on_meta(None)], [on_meta(None)]], [[on_meta(2)], [on_meta(torch.tensor(3))]]])
def test_the_loss_of_several_replicas(terms: list[list[Term]]) -> None:
    with no_copies():
        assert local_loss(terms, [4, 3]).device == META


def test_counts_of_shards_in_sequence() -> None:
    store = GradientStore()
    accounts = TreeAccounts(TreeSums.__new__(TreeSums), Accounts(store, Mesh(META, 0), META), store, META)
    with no_copies():
        accounts._count((0, 0), 0, 5)
        accounts._count((0, 0), 0, 3)


def test_counts_of_a_pipelines_last_stage() -> None:
    piece = Piece(0, 0, 4, None)
    work = Work(None, [piece], lambda *_: [], lambda _: iter(()), nullcontext, True, 0, None, 4)
    with no_copies():
        inverse = Losses(Mesh(META, 0), META).inverse_counts(work, [[(piece, 1.0, 1.0)]], lambda *_: [on_meta(5)])
    assert inverse[0].device == META
