"""An optimizer that evaluates the loss itself, LBFGS, on one process and on several: against plain PyTorch on the whole
batch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import same_bits
from paceline.comm.mesh import world_group
from paceline.errors import NonFiniteError, UsageError

N, STEPS = 11, 4
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.randn(N, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
COUNTS = torch.randint(1, 5, (N,), generator=torch.Generator().manual_seed(5)).double()
DATA = TensorDataset(X, Y, COUNTS)
SEARCHES = (None, "strong_wolfe")


def build(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(5, 6, bias=not norm), middle, nn.Tanh(), nn.Linear(6, 2)).double()


def lbfgs(model: nn.Module, search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=6, line_search_fn=search)


def weighted(model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over things, of which an example has several."""
    return ((model(x) - y).square().mean(1) * counts).sum(), counts.sum()


def plainly(search: str | None, kind: str) -> tuple[nn.Module, list[float]]:
    model = build(kind == "norm")
    optimizer, losses = lbfgs(model, search), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        if kind == "counted":
            total, count = weighted(model, X, Y, COUNTS)
            loss = total / count
        else:
            loss = F.mse_loss(model(X), Y)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return model, losses


def steps(run: paceline.Run, model: nn.Module, optimizer: Any, kind: str, count: int) -> None:
    loader = run.loader(DATA, global_batch=N)
    for _ in run.epochs(count):
        for batch in loader:
            x, y, counts = batch

            def closure() -> Tensor:
                optimizer.zero_grad()
                if kind == "closure":
                    return run.forward_backward(lambda model, b: F.mse_loss(model(b[0]), b[1]), model, batch)  # noqa: B023
                if kind == "counted":
                    total, count = weighted(model, x, y, counts)  # noqa: B023
                    run.backward(total=total, count=count)
                    return total / count
                loss = F.mse_loss(model(x), y)  # noqa: B023
                run.backward(loss)
                return loss

            assert run.step(optimizer, closure)


def distance(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.ranks(1, conformance=2, full=3)
def test_every_search_and_loop_takes_the_steps_of_plain_pytorch() -> None:
    takes_the_steps_of_plain_pytorch(SEARCHES, ("loop", "closure", "counted", "norm"))


def takes_the_steps_of_plain_pytorch(searches: Sequence[str | None], kinds: Sequence[str]) -> None:
    for search in searches:
        for kind in kinds:
            expected, losses = plainly(search, kind)
            with started() as run:
                model = build(kind == "norm")
                optimizer = lbfgs(model, search)
                run.prepare(model, optimizer)
                steps(run, model, optimizer, kind, STEPS)
                assert run.steps == STEPS
                found = optimizer.state[next(model.parameters())]["func_evals"]
            assert found == len(losses), "the line search decided otherwise"
            assert distance(model, expected) <= 1e-8, (search, kind, distance(model, expected))


@pytest.mark.ranks(1, conformance=2, full=3)
def test_all_ranks_hold_the_same_bits() -> None:
    with started() as run:
        model = build()
        optimizer = lbfgs(model, "strong_wolfe")
        run.prepare(model, optimizer)
        steps(run, model, optimizer, "loop", 2)
        named = [(name, p.detach()) for name, p in model.named_parameters()]
        assert not same_bits.digest_mismatch(named, world_group())


@pytest.mark.ranks(1, conformance=2, full=3)
def test_a_run_that_was_stopped_goes_on_to_the_same_weights() -> None:
    expected, _ = plainly("strong_wolfe", "loop")
    folder = Path(world_group().broadcast(tempfile.mkdtemp()))
    for count in (2, STEPS):
        with started() as run:
            model = build()
            optimizer = lbfgs(model, "strong_wolfe")
            run.prepare(model, optimizer)
            assert run.restore(folder, missing_ok=True) == (count == STEPS)
            steps(run, model, optimizer, "loop", count)
            run.save(folder)
    assert run.steps == STEPS
    assert distance(model, expected) <= 1e-8


@pytest.mark.ranks(1, conformance=2, full=3)
def test_loops_that_cannot_evaluate_the_loss_again_are_refused() -> None:
    def prepared(**settings: Any) -> tuple[Any, ...]:
        run = paceline.start(device="cpu", **settings)
        model = build()
        optimizer = lbfgs(model, None)
        run.prepare(model, optimizer)
        return run, model, optimizer

    def closure_of(run: paceline.Run, model: nn.Module, batch: Any, wrong: float = 1.0) -> Any:
        def closure() -> Tensor:
            loss = F.mse_loss(model(batch[0]), batch[1]) * wrong
            run.backward(loss)
            return loss

        return closure

    run, model, optimizer = prepared()
    for batch in run.loader(DATA, global_batch=N, micro_batch=2):
        with pytest.raises(UsageError, match="micro_batch=2, which splits a global batch of"):
            run.step(optimizer, closure_of(run, model, batch))
        break
    for batch in run.loader(DATA, global_batch=N, name="again"):
        run.backward(F.mse_loss(model(batch[0]), batch[1]))
        with pytest.raises(UsageError, match=r"LBFGS computes the loss several times per step\. Give it a closure"):
            run.step(optimizer)
        with pytest.raises(UsageError, match=r"clip in the closure, after run\.backward"):
            run.step(optimizer, closure_of(run, model, batch), max_grad_norm=1.0)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"run\.step without backward"):
            run.step(optimizer, lambda: F.mse_loss(model(batch[0]), batch[1]))  # noqa: B023
        with pytest.raises(NonFiniteError, match="the loss is not finite"):
            run.step(optimizer, closure_of(run, model, batch, wrong=float("inf")))
        break
    with pytest.raises(UsageError, match=r"run\.step was called outside a loop"):
        run.step(optimizer, lambda: None)
    run.close()
    several = [{"strategy": "fsdp:stage=1"}] if world_group().size > 1 else [{"strategy": "single:shards=2"}]
    for settings in ({"nonfinite": "skip"}, {"reproducible": 4}, {"strategy": "local_sgd"}, *several):
        run, model, optimizer = prepared(**settings)
        for batch in run.loader(DATA, global_batch=N):
            with pytest.raises(UsageError, match=r"run\.step\(LBFGS, closure\): "):
                run.step(optimizer, closure_of(run, model, batch))
            break
        run.close()


@pytest.mark.ranks(1, 2, full=3)
def test_a_line_search_in_a_loop_takes_the_steps_of_plain_pytorch() -> None:
    takes_the_steps_of_plain_pytorch(("strong_wolfe",), ("loop",))
