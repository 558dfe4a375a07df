"""Gradients that are not finite where the flag is read late, as on an accelerator: here a CPU that is not readable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import NonFiniteError
from paceline.step import finite
from paceline.strategies import gradient_store

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :3].clone())

Log = list[tuple[str, int]]
"""("enqueued" or "read", the number of the copy), in order."""


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0].to(next(model.parameters()).dtype)), batch[1].to(next(model.parameters()).dtype))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Gradients are on a device that the host must wait for; when does it?"""
    log: Log = []

    class Copy:
        def __init__(self, count: int, device: torch.device) -> None:
            self._sent = torch.zeros(count)

        def send(self, numbers: Tensor) -> None:
            self._sent, self._of = numbers.clone(), sum(what == "enqueued" for what, _ in log)
            log.append(("enqueued", self._of))

        def read(self) -> list[float]:
            log.append(("read", self._of))
            return self._sent.tolist()

    monkeypatch.setattr(finite, "HostCopy", Copy)
    monkeypatch.setattr(finite, "readable", lambda tensor: False)
    return log


@contextlib.contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", progress="off", **settings)
    try:
        yield run
    finally:
        run.close()


def made(run: paceline.Run) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(6, 3)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, run.loader(DATA, global_batch=8)


def train(run: paceline.Run, bad: int, last: int | None = 2, **step: Any) -> None:
    """Make steps 0 to `last` of 3, and leave the loop there (None: read the pass to its end). bad: the step whose loss
    is NaN."""
    model, optimizer, loader = made(run)
    for batch in loader:
        run.backward(loss_fn(model, batch) * (math.nan if loader.step == bad else 1.0))
        run.step(optimizer, **step)
        if loader.step == last:
            break


def the_end_of_a_pass(run: paceline.Run, where: Path) -> None:
    train(run, bad=2, last=None)


def the_end_of_epochs(run: paceline.Run, where: Path) -> None:
    for _ in run.epochs(1):
        train(run, bad=2)


def an_evaluation(run: paceline.Run, where: Path) -> None:
    train(run, bad=2)
    next(iter(run.loader(DATA, global_batch=8, train=False)))


def save(run: paceline.Run, where: Path) -> None:
    train(run, bad=2)
    run.save(where)


def export(run: paceline.Run, where: Path) -> None:
    train(run, bad=2)
    run.export(where / "model.safetensors")


def close(run: paceline.Run, where: Path) -> None:
    train(run, bad=2)
    run.close()


ENDS = [the_end_of_a_pass, the_end_of_epochs, an_evaluation, save, export, close]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_what_is_not_finite_in_the_last_step_is_reported(log: Log, tmp_path: Path, end: Any) -> None:
    with started() as run:
        with pytest.raises(NonFiniteError, match=r"(?s)^step 2: the loss is.*\[16, 17, 18, .*from an earlier checkp"):
            end(run, tmp_path)
        assert not list(tmp_path.iterdir()), "weights that are not finite were written"
    assert run.closed  # and close has not raised it again


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("step", [{}, {"max_grad_norm": 1.0}], ids=["checked", "clipped"])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_flags_travel_together_and_are_read_one_block_late(
    log: Log, step: dict[str, Any], every: int, bad: int
) -> None:
    """The step is named although the host reads its flag later."""
    with started(nonfinite_every=every) as run:
        model, optimizer, _ = made(run)
        batches = iter(run.batches(lambda rows: [X[:8], X[:8, :3]], global_batch=8, name="endless"))

        def script() -> None:
            while run.steps < 50:
                batch = next(batches)
                run.backward(loss_fn(model, batch) * (math.nan if run.steps == bad else 1.0))
                run.step(optimizer, **step)

        with pytest.raises(NonFiniteError) as caught:
            script()
        told = caught.value
        block = bad // every
        assert run.steps == (block + 2) * every  # the first update after the next block was complete
        assert str(told).startswith(f"step {bad}:")
        assert f"{run.steps - bad} updates were made after this gradient" in str(told)
    # a copy for each block, each read when the next one has been sent
    assert log == [("enqueued", 0)] + [it for n in range(block + 1) for it in (("enqueued", n + 1), ("read", n))]


def test_no_step_waits_for_one_of_the_blocks_that_are_under_way(log: Log) -> None:
    with started() as run:  # nonfinite_every=10
        model, optimizer, _ = made(run)
        batches = iter(run.batches(lambda rows: [X[:8], X[:8, :3]], global_batch=8, name="endless"))
        for _ in range(20):
            run.backward(loss_fn(model, next(batches)))
            run.step(optimizer)
        assert log == [("enqueued", 0)]


def test_parameters_in_bf16_train_where_the_fused_check_knows_no_bfloat16(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's has no such kernel."""

    def as_on_cuda(*args: Any) -> None:
        raise NotImplementedError("not implemented for 'BFloat16'")

    monkeypatch.setattr(gradient_store, "unscale_and_flag_", as_on_cuda)
    monkeypatch.setitem(gradient_store._FUSED, "cpu", gradient_store._FUSED["cuda"])
    with started(precision="bf16-params") as run:
        train(run, bad=-1, last=None)
        assert run.steps == 3
    with started(precision="bf16-params") as run, pytest.raises(NonFiniteError, match=r"^step 1:"):
        train(run, bad=1, last=None)
