"""Uneven ends on two processes: who has the examples that are left over, and what is said where there are too few
for the model."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from typing import Any

import pytest
import torch
from tests.strategies.checks import named
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group


def data(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * count).reshape(count, 4) ** 2, torch.ones(count, 1))


def losses(count: int, global_batch: int) -> list[float]:
    """Of each global batch, on this rank."""
    run = paceline.start(device="cpu", progress="off", strategy="ddp")
    try:
        model = nn.Linear(4, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        found = []
        for x, y in run.loader(data(count), global_batch=global_batch):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.step(optimizer)
            found.append(float(loss))
        return found
    finally:
        run.close()


@pytest.mark.ranks(2)
def test_rank_0_has_a_loss_in_every_global_batch() -> None:
    """17 examples in global batches of 4: the last has one."""
    mine = losses(17, 4)
    assert len(mine) == 5
    assert not any(map(math.isnan, mine[:4]))
    assert math.isnan(mine[4]) == (world_group().rank > 0)


def explained(job: Any) -> str:
    """What would be shown of what the job raises, with what the hook of `start` adds: a note of the error, or with
    Python 3.10, where errors have none, a line on stderr."""
    try:
        job()
    except Exception as error:
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            sys.excepthook(type(error), error, error.__traceback__)
        lines = [line for line in shown.getvalue().splitlines() if line.startswith("paceline: ")]
        return "".join([str(error), *getattr(error, "__notes__", lines)])
    raise AssertionError("nothing was raised")


def looped(model: nn.Module, loss_fn: Any, count: int, **settings: Any) -> Any:
    def job() -> None:
        run = paceline.start(device="cpu", progress="off", strategy="ddp", **settings)
        own, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in run.loader(data(count), global_batch=4):
            run.backward(loss_fn(own, batch))
            run.step(optimizer)

    return job


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def mse(model: Any, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.ranks(2)
def test_a_global_batch_of_one_example_is_named_where_batch_norm_fails_over_it() -> None:
    said = explained(looped(normed(), mse, 5))
    assert "Expected more than 1 value per channel" in said
    assert "this global batch has only one" in said, said
    assert "drop_last=True" in said


@pytest.mark.ranks(2)
def test_in_a_closure_an_empty_shard_is_not_blamed_for_a_global_batch_of_one() -> None:
    run = paceline.start(device="cpu", progress="off", strategy="ddp")
    model = normed()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def job() -> None:
        for batch in run.loader(data(1), global_batch=4):
            run.forward_backward(mse, model, batch)

    named(job, ValueError, "this global batch has only one", "drop_last=True")
    run.close()


@pytest.mark.ranks(2)
def test_batch_norm_by_shard_says_how_many_examples_this_process_computes() -> None:
    """Of three examples two are rank 0's, and one is left for the other."""
    run = paceline.start(device="cpu", progress="off", strategy="ddp", batch_norm="shard")
    model = normed()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def job() -> None:
        for batch in run.loader(data(3), global_batch=4):
            mse(model, batch)

    if world_group().rank:
        said = explained(job)
        assert "this process computes 1 of the 3 examples of this global batch" in said, said
        assert "batch_norm='global'" in said
    else:
        job()
    run.close()


@pytest.mark.ranks(2)
def test_what_fails_over_an_empty_shard_in_the_loop_says_that_it_is_empty() -> None:
    def mean(model: Any, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum() / len(batch[0]) + 1 // len(batch[0])

    run = paceline.start(device="cpu", progress="off", strategy="ddp")
    model = nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def job() -> None:
        for batch in run.loader(data(1), global_batch=4):
            mean(model, batch)

    if world_group().rank:
        said = explained(job)
        assert "this rank's shard of the global batch is empty" in said, said
        assert "ZeroDivisionError" in said
        assert "drop_last=True" in said
    else:
        job()
    leave_and_fail(run)
    run.close()


def leave_and_fail(run: paceline.Run) -> None:
    """What fails after such a loop has nothing to do with it."""
    loader = run.loader(data(1), global_batch=4, name="left")

    def job() -> None:
        for _ in loader:
            break
        raise ValueError("something else")

    assert explained(job) == "something else"
