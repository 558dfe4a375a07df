"""ddp with reducers and codecs, on several processes. On one, and what it refuses: test_ddp_reduction.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests.strategies import checks
from tests.strategies.checks import BATCH, Net, both_heads, by_data, data, make, plainly, started, under_paceline
from tests.strategies.codec_jobs import WIRES, Linear, alike, balanced, loss_of, rows, train_and_save
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.codec_sums import SHARED_MEMORY
from paceline.comm.mesh import world_group
from paceline.comm.reducers import REDUCERS
from paceline.errors import ModelError

pytestmark = pytest.mark.timeout(300)


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    checks.same(one, other, tolerance)
    alike(one)


def with_norm() -> nn.Module:
    return Net(norm=True)


def taking_turns(strategy: str | None) -> nn.Module:
    """Several sets of parameters: two optimizers, losses that reach one's or both's, a trunk that is frozen at every
    second step."""
    torch.manual_seed(0)
    model = Net().double()
    heads = [p for name, p in model.named_parameters() if not name.startswith("trunk")]
    optimizers = [torch.optim.SGD(model.trunk.parameters(), lr=0.1), torch.optim.AdamW(heads, lr=0.01)]

    def losses(batch: list[Tensor], number: int) -> list[Tensor]:
        model.trunk.requires_grad_(number % 2 == 0)
        x, tokens, y = batch
        features = model.features(x, tokens)
        return [F.cross_entropy(model.head(features), y), F.cross_entropy(model.spare(features.detach() * 2), y)]

    if strategy is None:
        for number, start in enumerate(range(0, checks.N, BATCH)):
            for loss in losses([t[start : start + BATCH] for t in data().tensors], number):
                loss.backward()
            for optimizer in optimizers[number % 2 :]:
                optimizer.step()
                optimizer.zero_grad()
        return model
    with started(strategy=strategy) as run:
        run.prepare(model, *optimizers)
        for number, batch in enumerate(run.loader(data(), global_batch=BATCH)):
            for loss in losses(batch, number):
                run.backward(loss)
            for optimizer in optimizers[number % 2 :]:
                run.step(optimizer)
    return model


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_every_reducer_trains_as_plain_pytorch() -> None:
    reference = {adam: plainly(Net, both_heads, adam=adam) for adam in (False, True)}
    turns, norm, paths = taking_turns(None), plainly(with_norm, both_heads), plainly(Net, by_data)
    for reducer in (*REDUCERS, SHARED_MEMORY):
        strategy = f"ddp:reducer={reducer}"
        same(under_paceline(Net, both_heads, strategy=strategy, micro=1, closure=False), reference[False])
        same(under_paceline(Net, both_heads, strategy=strategy, adam=True), reference[True], 1e-8)
        same(under_paceline(with_norm, both_heads, strategy=strategy), norm)
        same(under_paceline(Net, by_data, strategy=strategy + ",find_unused=true"), paths)
        same(taking_turns(strategy), turns, 1e-8)
        for options in (",bucket_mb=0.0001,gradient_as_bucket_view=true", ",static_graph=true,bucket_mb=0.001"):
            same(under_paceline(Net, both_heads, strategy=strategy + options), reference[False])


@contextmanager
def on_two_machines() -> Iterator[None]:
    """As a launcher would say it: the first rank on a machine of its own, all others on another one."""
    rank, size = world_group().rank, world_group().size
    local, count, node = (0, 1, 0) if rank == 0 else (rank - 1, size - 1, 1)
    said = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "GROUP_WORLD_SIZE": 2}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})
        for name in [name for name, value in before.items() if value is None]:
            del os.environ[name]


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_the_hierarchical_reducer_on_two_uneven_machines_trains_as_plain_pytorch() -> None:
    with on_two_machines():
        trained = under_paceline(Net, both_heads, strategy="ddp:reducer=hierarchical")
        run = paceline.start(device="cpu", strategy="ddp:reducer=hierarchical")
        machines = run._strategy._reduction._sums._endpoint.machines  # type: ignore[attr-defined]
        run.close()
    same(trained, plainly(Net, both_heads))
    assert [list(machine) for machine in machines] == [[0], list(range(1, world_group().size))]


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_sparse_gradients_are_refused() -> None:
    for options in ("reducer=ring", "codec=bf16"):
        try:
            under_paceline(lambda: Net(sparse=True), both_heads, strategy=f"ddp:{options}")
        except ModelError as error:
            assert "embed.weight has a sparse gradient" in str(error)
        else:
            raise AssertionError("not noticed")


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_a_reducer_that_fails_ends_the_backward() -> None:
    with started(strategy="ddp:reducer=ring") as run:
        model, optimizer = run.prepare(*make(Net, False))

        def fail(flat: Tensor) -> None:
            raise ConnectionError("the cable is out")

        for batch in run.loader(data(), global_batch=BATCH):
            if run.steps == 1:
                run._strategy._reduction._add = fail  # type: ignore[attr-defined]
                try:
                    run.forward_backward(both_heads, model, batch)
                except ConnectionError as error:
                    assert "the cable is out" in str(error)
                    return
            run.forward_backward(both_heads, model, batch)
            run.step(optimizer)
    raise AssertionError("not raised")


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_what_is_not_applied_is_in_the_residuals() -> None:
    for wire in WIRES:
        for micro in (None, 1):
            with started(strategy=f"ddp:{wire}", progress="off") as run:
                model = Linear()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                run.prepare(model, optimizer)
                loader = run.loader(rows(), global_batch=BATCH, micro_batch=micro)
                for _ in run.epochs(2):
                    for batch in loader:
                        run.backward(loss_of(model, batch))
                        run.step(optimizer)
                balanced(run, model, [1.0] * 8)


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_residuals_outlast_steps_that_overflow_in_fp16_and_scales_that_change() -> None:
    """One rank's gradient overflows at two of 12 steps: they are left out on all ranks, residuals and all. The loss
    scale is halved by them, and doubled by every two others."""
    for wire in WIRES:
        with started(strategy=f"ddp:{wire}", precision="fp16", progress="off") as run:
            model = Linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            run.prepare(model, optimizer)
            scaler = run._precision.scaler
            assert scaler is not None
            scaler.GROWTH_INTERVAL = 2  # type: ignore[misc]
            loader = run.loader(rows(), global_batch=BATCH)
            scales, number = [], 0
            for _ in run.epochs(3):
                for batch in loader:
                    bad = number in (2, 7) and run.world.rank == run.world.size - 1
                    run.backward(loss_of(model, batch) * (1e38 if bad else 1.0))
                    run.step(optimizer)
                    scales.append(scaler.scale)
                    number += 1
            assert run.skipped == 2
            assert {later / now for now, later in pairwise(scales)} == {0.5, 1.0, 2.0}
            balanced(run, model, [0.0 if n in (2, 7) else 1.0 for n in range(12)])


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_codecs_learn_the_digits_as_well() -> None:
    """From a loss of 2.3 to at most 1.2 times what is reached without one, in 90 steps."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    found = {}
    for wire in ("reducer=native", *WIRES[:4]):
        with started(strategy=f"ddp:{wire}", progress="off", seed=1) as run:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run.prepare(model, optimizer)
            loader = run.loader(TensorDataset(images, labels), global_batch=128, shuffle=True)
            for _ in run.epochs(6):
                for batch in loader:
                    run.backward(F.cross_entropy(model(batch[0]), batch[1]))
                    run.step(optimizer)
            found[wire] = float(F.cross_entropy(model(images), labels).detach())
            alike(model)
    plain = found["reducer=native"]
    assert plain < 0.2
    assert all(loss < 1.2 * plain for loss in found.values()), found


@pytest.mark.ranks(conformance=2, campaign=(3, 4))
def test_a_resumed_run_with_a_codec_loses_nothing() -> None:
    """PowerSGD is linear in what all replicas hold: the run that was stopped is the run that was not, up to rounding.
    Of all codecs: nothing is lost."""
    base = Path(world_group().broadcast(tempfile.mkdtemp()))
    for number, wire in enumerate(WIRES):
        models: list[Linear] = []
        for stops in ((8,), (3, 8)):
            for part, stop in enumerate(stops):
                with started(strategy=f"ddp:{wire}", progress="off") as run:
                    model = Linear()
                    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                    run.prepare(model, optimizer)
                    loader = run.loader(rows(), global_batch=BATCH)
                    where = base / f"{number} {len(stops)}"
                    assert run.restore(where, missing_ok=True) == (part > 0)
                    train_and_save(run, model, loader, optimizer, stop, where)
                    balanced(run, model, [1.0] * stop)
            models.append(model)
        if "powersgd" in wire:
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert (one - other).norm() < 1e-4 * other.norm(), "float32"
