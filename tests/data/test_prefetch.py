"""Scripts that fetch their next batch early, on one process and on several: against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.strategies.checks import (
    BATCH,
    EPOCHS,
    TOKENS,
    N,
    Net,
    X,
    Y,
    data,
    difference,
    make,
    one_head,
    plainly,
    same,
    started,
)
from torch import Tensor, nn

import paceline
from paceline.errors import UsageError

Batches = Iterator[Any]
LOCAL = "local_sgd:every=1"


def epochs(loader: Any, endless: bool) -> Batches:
    """endless: as in a script that counts its steps, whose last prefetch begins an epoch that it does not train."""
    epoch = 0
    while endless or epoch < EPOCHS:
        yield from loader
        epoch += 1


def forward_next_backward(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, yields: int) -> None:
    """nanoGPT's order."""
    batch = next(batches)
    for _ in range(yields):
        loss = one_head(model, batch)
        batch = next(batches, None)
        run.backward(loss)
        run.step(optimizer)
        optimizer.zero_grad(set_to_none=True)


def backward_next_step(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, yields: int) -> None:
    batch = next(batches)
    for _ in range(yields):
        run.backward(one_head(model, batch))
        batch = next(batches, None)
        run.step(optimizer)


def closure_one_ahead(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, yields: int) -> None:
    """As a class that copies the next batch to the device meanwhile."""
    batch = next(batches)
    for _ in range(yields):
        following = next(batches, None)
        run.forward_backward(one_head, model, batch)
        run.step(optimizer)
        batch = following


def closure_next_step(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, yields: int) -> None:
    batch = next(batches)
    for _ in range(yields):
        run.forward_backward(one_head, model, batch)
        batch = next(batches, None)
        run.step(optimizer)


Order = Callable[[paceline.Run, nn.Module, Any, Batches, int], None]
ORDERS: list[Order] = [forward_next_backward, backward_next_step, closure_one_ahead, closure_next_step]


def trained(order: Order, micro: int | None, endless: bool, **settings: Any) -> nn.Module:
    with started(**settings) as run:
        model, optimizer = run.prepare(*make(Net, False))
        if settings.get("strategy") == LOCAL:
            optimizer.param_groups[0]["momentum"] = 0.0
        loader = run.loader(data(), global_batch=BATCH, micro_batch=micro)
        order(run, model, optimizer, epochs(loader, endless), EPOCHS * len(loader))
        assert run.steps == EPOCHS * loader.steps
        run._strategy.state_dict()  # replicas that train apart become one; a stage-2 model is put together
        return whole(model)


def whole(model: nn.Module) -> nn.Module:
    """With whole tensors in place of slices."""
    from paceline.comm import dtensor

    found = {k: v.full_tensor() if dtensor.is_sharded(v) else v for k, v in model.state_dict().items()}
    plain = Net().double()
    plain.load_state_dict(found)
    return plain


def without_momentum() -> nn.Module:
    built, optimizer = make(Net, False)
    optimizer.param_groups[0]["momentum"] = 0.0
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            optimizer.zero_grad()
            one_head(built, [t[start : start + BATCH] for t in (X, TOKENS, Y)]).backward()
            optimizer.step()
    return built


@pytest.mark.ranks(1, conformance=2, full=3)
def test_every_order_is_exact() -> None:
    reference = plainly(Net, one_head)
    for order in ORDERS:
        for micro in (None, 1):
            found = trained(order, micro, endless=micro is None)
            assert difference(found, reference) <= 1e-12, (order.__name__, micro)


@pytest.mark.ranks(conformance=2, full=3)
def test_every_order_is_exact_under_fsdp() -> None:
    reference = plainly(Net, one_head)
    for order in ORDERS:
        same(trained(order, 1, endless=True, strategy="fsdp"), reference, 1e-12)


@pytest.mark.ranks(1, conformance=2, full=3)
def test_every_order_is_exact_under_local_sgd() -> None:
    reference = without_momentum()
    for order in ORDERS:
        same(trained(order, None, endless=False, strategy=LOCAL), reference, 1e-12)


@pytest.mark.ranks(1, 2, full=3)
def test_run_mean_weighs_a_loss_by_its_own_batch() -> None:
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        batches = iter(run.loader(data(), global_batch=BATCH))
        batch, start = next(batches), 0
        while batch is not None:
            loss = one_head(model, batch)
            batch = next(batches, None)
            run.backward(loss)
            expected = one_head(model, [t[start : start + BATCH] for t in (X, TOKENS, Y)])
            assert abs(run.mean(loss) - expected.item()) < 1e-12
            run.step(optimizer)
            start += BATCH


@pytest.mark.ranks(1, 2, full=3)
def test_the_position_of_a_checkpoint_is_after_the_last_update() -> None:
    """When the update has been made with the next batch in hand, that batch is still to come."""
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        loader = run.loader(data(), global_batch=BATCH)
        batches = iter(loader)
        next(batches)
        loss = one_head(model, next(batches))  # the first was looked at, and left out
        next(batches)
        run.backward(loss)
        run.step(optimizer)
        assert loader.state_dict()["step"] == 2
        assert not run._stepper.ownership.incomplete
        loss = one_head(model, next(batches))
        next(batches)
        assert run._stepper.ownership.incomplete, "step 3 was computed, and its gradients are in no checkpoint"


@pytest.mark.ranks(1, 2, full=3)
def test_a_backward_whose_batch_cannot_be_known_is_refused() -> None:
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        batches = epochs(run.loader(data(), global_batch=BATCH), endless=True)
        x, tokens, y = next(batches)
        out = model(x, tokens)
        next(batches)
        with pytest.raises(UsageError, match="before the loader's latest yield and part after it"):
            run.backward(torch.nn.functional.cross_entropy(out, y))
        del x, tokens, y, out
        batch = next(batches)
        early, other = one_head(model, batch), one_head(model, batch)
        late = one_head(model, next(batches))
        run.backward(early)
        optimizer.zero_grad()  # its global batch is left out
        run.backward(late)
        with pytest.raises(UsageError, match="an earlier batch that is already finished"):
            run.backward(other)
        run.step(optimizer)
        held = next(batches), next(batches)
        with pytest.raises(UsageError, match="an earlier batch that it still holds"):
            run.backward(one_head(model, held[0]))
        with pytest.raises(UsageError, match="an earlier batch that it still holds"):
            run.forward_backward(one_head, model, [t.clone() for t in held[0]])
        run.forward_backward(one_head, model, list(held[0]))  # its own tensors
        run.step(optimizer)


@pytest.mark.ranks(1, conformance=2, full=3)
def test_dropout_draws_what_it_draws_in_the_usual_order() -> None:
    """Dropout after an update that came late draws what it draws otherwise."""

    class Noisy(Net):
        def features(self, x: Tensor, tokens: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().features(x, tokens), 0.3)

    def job(order: Order) -> nn.Module:
        with started() as run:
            model, optimizer = run.prepare(*make(Noisy, False))
            loader = run.loader(data(), global_batch=BATCH, micro_batch=2)
            order(run, model, optimizer, epochs(loader, endless=False), EPOCHS * len(loader))
        return model

    def usual(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, _: int) -> None:
        for batch in batches:
            run.backward(one_head(model, batch))
            run.step(optimizer)

    def closure(run: paceline.Run, model: nn.Module, optimizer: Any, batches: Batches, _: int) -> None:
        for batch in batches:
            run.forward_backward(one_head, model, batch)
            run.step(optimizer)

    assert difference(job(forward_next_backward), job(usual)) == 0
    assert difference(job(backward_next_step), job(usual)) == 0
    assert difference(job(closure_one_ahead), job(closure)) == 0


@pytest.mark.ranks(1, 2, full=3)
def test_one_batch_ahead_is_exact_in_a_loop_and_with_a_closure() -> None:
    """A part of test_every_order_is_exact."""
    reference = plainly(Net, one_head)
    same(trained(forward_next_backward, 1, endless=True), reference, 1e-12)
    same(trained(closure_one_ahead, None, endless=False), reference, 1e-12)
