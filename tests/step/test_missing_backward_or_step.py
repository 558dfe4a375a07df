"""What a script forgets: a backward among several, an update, both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
DATA = TensorDataset(X, Y)
DIRECT = r"gradients that run\.backward did not make, for example from a direct loss\.backward\(\)"
NOT_REACHED = r"no run\.backward of this global batch has reached this optimizer's parameters"
UNSTEPPED = r"the gradients of the last global batch \(step 0 of epoch 0\) were neither used by run\.step nor cleared"


@pytest.fixture
def run() -> Iterator[paceline.Run]:
    made = paceline.start(device="cpu")
    yield made
    made.close()


def linear(seed: int, i: int = 6, o: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(i, o).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pair(run: paceline.Run) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A generator 6 -> 3 and a discriminator 3 -> 1, with their optimizers."""
    generator, discriminator = linear(0), linear(1, 3, 1)
    opt_g, opt_d = sgd(generator), sgd(discriminator)
    run.prepare(generator, discriminator, opt_g, opt_d)
    return generator, discriminator, opt_g, opt_d


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


# --- a backward among several


@pytest.mark.parametrize("order", ["direct first", "direct last"])
def test_a_direct_backward_beside_another_optimizers_run_backward(run: paceline.Run, order: str) -> None:
    generator, discriminator, opt_g, opt_d = pair(run)
    for x, _ in run.loader(DATA, global_batch=8):
        loss_d = discriminator(generator(x).detach()).square().mean()
        if order == "direct first":
            F.softplus(-discriminator(generator(x))).mean().backward(inputs=list(generator.parameters()))
            with pytest.raises(UsageError, match=DIRECT):
                run.backward(loss_d)
            return
        run.backward(loss_d)
        run.step(opt_d)
        F.softplus(-discriminator(generator(x))).mean().backward()
        with pytest.raises(UsageError, match=DIRECT):
            run.step(opt_g)
        return


def test_a_direct_backward_that_adds_to_gradients_of_run_backward(run: paceline.Run) -> None:
    model = linear(0)
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    for x, y in run.loader(DATA, global_batch=8):
        run.backward(F.mse_loss(model(x), y))
        model(x).square().mean().backward()
        with pytest.raises(UsageError, match=DIRECT):
            run.step(optimizer)
        return


def test_gradients_that_a_script_looks_at_and_clears_are_its_own_affair(run: paceline.Run) -> None:
    """As for an adversarial example. Other models are none of the run's business."""
    model, stranger = linear(0), linear(3)
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    for clear in (True, False):
        for x, y in run.loader(DATA, global_batch=8, name=f"clear {clear}"):
            image = x.clone().requires_grad_()
            F.mse_loss(model(image), y).backward()
            stranger(x).sum().backward()
            optimizer.zero_grad(set_to_none=clear)
            assert image.grad is not None
            run.backward(F.mse_loss(model(x + 0.01 * image.grad.sign()), y))
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.clamp(-1, 1)  # clipped by hand
            run.step(optimizer)
    assert run.steps == 6


def test_the_watch_ends_with_the_run() -> None:
    before = torch.autograd.backward
    first, second = paceline.start(device="cpu"), None
    model = linear(0)
    first.prepare(model, sgd(model))
    assert torch.autograd.backward is not before
    first.close()
    assert torch.autograd.backward is before
    assert second is None


@pytest.mark.parametrize("left", [False, True])
def test_a_step_without_any_gradient_of_this_batch(run: paceline.Run, left: bool) -> None:
    """left: the discriminator's backward of the batch before went through the generator, and left gradients there."""
    generator, discriminator, opt_g, opt_d = pair(run)
    for number, (x, _) in enumerate(run.loader(DATA, global_batch=8)):
        fake = generator(x) if left and number == 0 else generator(x).detach()
        run.backward(discriminator(fake).square().mean())
        run.step(opt_d)
        if number == 1:
            assert (generator.weight.grad is not None) == left
            with pytest.raises(UsageError, match=NOT_REACHED):
                run.step(opt_g)
            return


def test_a_loss_that_reaches_both_models_counts_for_both(run: paceline.Run) -> None:
    """run.backward(loss_d) goes through the generator, and its optimizer is stepped by what came: as plain PyTorch."""
    generator, discriminator, opt_g, opt_d = pair(run)
    plain_g, plain_d = linear(0), linear(1, 3, 1)
    by_hand = sgd(plain_g), sgd(plain_d)
    for x, _ in run.loader(DATA, global_batch=8):
        run.backward(discriminator(generator(x)).square().mean())
        run.step(opt_d)
        run.step(opt_g)
    for start in range(0, 20, 8):
        plain_d(plain_g(X[start : start + 8])).square().mean().backward()
        for optimizer in by_hand:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(generator, discriminator), weights(plain_g, plain_d), rtol=1e-12, atol=0)


# --- an update


def test_a_global_batch_that_is_never_stepped(run: paceline.Run) -> None:
    model = linear(0)
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    for i, (x, y) in enumerate(run.loader(DATA, global_batch=4)):
        if i == 1:
            with pytest.raises(UsageError, match=UNSTEPPED):
                run.backward(F.mse_loss(model(x), y))
            optimizer.zero_grad()
            return
        run.backward(F.mse_loss(model(x), y))
        if (i + 1) % 4 == 0:
            run.step(optimizer)


@pytest.mark.parametrize("how", ["continue", "top", "zeros", "model"])
def test_a_batch_that_is_left_out_is_cleared(run: paceline.Run, how: str) -> None:
    model, plain = linear(0), linear(0)
    optimizer, by_hand = sgd(model), sgd(plain)
    run.prepare(model, optimizer)
    loader = run.loader(DATA, global_batch=4)
    for i, (x, y) in enumerate(loader):
        if how == "top":
            optimizer.zero_grad()
        run.backward(F.mse_loss(model(x), y))
        if i == 2:
            if how == "model":
                model.zero_grad()
            elif how != "top":
                optimizer.zero_grad(set_to_none=how != "zeros")
            continue
        run.step(optimizer)
        assert loader.state_dict()["step"] == i + 1
    for i in (0, 1, 3, 4):
        by_hand.zero_grad()
        F.mse_loss(plain(X[4 * i : 4 * i + 4]), Y[4 * i : 4 * i + 4]).backward()
        by_hand.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=0)


@pytest.mark.parametrize("named", [True, False])
def test_a_critic_has_several_updates_for_one_of_its_generator(run: paceline.Run, named: bool) -> None:
    """As in Wasserstein GANs. named: run.backward(..., optimizer=); else the critic's loss reaches the generator too,
    whose gradients the script clears, as it must in plain PyTorch."""
    generator, critic, opt_g, opt_c = pair(run)
    plain_g, plain_c = linear(0), linear(1, 3, 1)
    by_g, by_c = sgd(plain_g), sgd(plain_c)
    for i, (x, y) in enumerate(run.loader(DATA, global_batch=4)):
        opt_c.zero_grad()
        run.backward(critic(generator(x)).mean() - critic(y).mean(), **({"optimizer": opt_c} if named else {}))
        run.step(opt_c)
        if i % 2 == 1:
            opt_g.zero_grad()
            run.backward(-critic(generator(x)).mean(), **({"optimizer": opt_g} if named else {}))
            run.step(opt_g)
    for i in range(5):
        x, y = X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]
        by_c.zero_grad()
        (plain_c(plain_g(x)).mean() - plain_c(y).mean()).backward()
        by_c.step()
        if i % 2 == 1:
            by_g.zero_grad()
            (-plain_c(plain_g(x)).mean()).backward()
            by_g.step()
    torch.testing.assert_close(weights(generator, critic), weights(plain_g, plain_c), rtol=1e-12, atol=0)


def test_two_loaders_of_which_one_update_is_made(run: paceline.Run) -> None:
    """The second one's batch comes when the first one's is complete."""
    model, plain = linear(0), linear(0)
    optimizer, by_hand = sgd(model), sgd(plain)
    run.prepare(model, optimizer)
    first, second = run.loader(DATA, global_batch=8, name="a"), run.loader(DATA, global_batch=4, name="b")
    others = iter(second)
    for x, y in first:
        run.backward(F.mse_loss(model(x), y), of=first)
        x, y = next(others)
        run.backward(F.mse_loss(model(x), y), of=second)
        run.step(optimizer)
        assert first.state_dict()["step"] == second.state_dict()["step"] == run.steps
    for i in range(3):
        for rows in (slice(8 * i, 8 * i + 8), slice(4 * i, 4 * i + 4)):
            F.mse_loss(plain(X[rows]), Y[rows]).backward()
        by_hand.step()
        by_hand.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=0)


def test_a_loop_without_any_update_is_told_at_its_end() -> None:
    run = paceline.start(device="cpu")
    model = linear(0)
    run.prepare(model, sgd(model))
    epochs = run.epochs(1)
    next(epochs)
    for x, y in run.loader(DATA, global_batch=20):
        run.backward(F.mse_loss(model(x), y))
    with pytest.warns(
        UserWarning, match=r"global batch of loader 'train' were neither used by run\.step nor cleared"
    ) as told:
        next(epochs, None)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.close()


def test_a_step_after_the_loop_is_that_of_its_last_batch(run: paceline.Run) -> None:
    """Descent by the gradient of all examples."""
    model, plain = linear(0), linear(0)
    optimizer, by_hand = sgd(model), sgd(plain)
    run.prepare(model, optimizer)
    loader = run.loader(DATA, global_batch=20, micro_batch=6)
    for _ in run.epochs(2):
        for x, y in loader:
            run.backward(F.mse_loss(model(x), y))
        assert run.step(optimizer)
        by_hand.zero_grad()
        F.mse_loss(plain(X), Y).backward()
        by_hand.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=0)


# --- updates of the script's own


@pytest.mark.parametrize("clear", ["top", "bottom", "zeros"])
@pytest.mark.parametrize("micro", [None, 3])
def test_updates_by_hand(run: paceline.Run, clear: str, micro: int | None, tmp_path: Path) -> None:
    """`p.data.add_(p.grad, alpha=-lr)`, without an optimizer: exact, counted, and with a position in the data."""
    model, plain = linear(0), linear(0)
    run.prepare(model)
    loader = run.loader(DATA, global_batch=8, micro_batch=micro)
    for x, y in loader:
        request: Any = loader.current
        if clear == "top" and request.micro == 0:
            model.zero_grad()
        run.backward(F.mse_loss(model(x), y))
        if not request.final:
            continue
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
        if clear != "top":
            model.zero_grad(set_to_none=clear == "bottom")
            assert run.steps == request.step + 1
            saved = run.save(tmp_path)
            assert loader.state_dict()["step"] == request.step + 1
            assert saved.name.endswith(str(run.steps))
        else:
            with pytest.raises(UsageError, match="after clearing the gradients"):
                run.save(tmp_path)
    for start in range(0, 20, 8):
        plain.zero_grad()
        F.mse_loss(plain(X[start : start + 8]), Y[start : start + 8]).backward()
        for p in plain.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=0)
    model.zero_grad()
    assert run.steps == 3


# --- what the loss of one optimizer leaves on the parameters of another


CLEAR = {
    "by its optimizer": lambda discriminator, opt_d: opt_d.zero_grad(),
    "to zeros": lambda discriminator, opt_d: opt_d.zero_grad(set_to_none=False),
    "by its model": lambda discriminator, opt_d: discriminator.zero_grad(),
    "not at all": lambda discriminator, opt_d: None,
}


@pytest.mark.parametrize("clear", list(CLEAR))
def test_gradients_that_the_generators_loss_leaves_are_told_where_nothing_clears_them(
    run: paceline.Run, clear: str
) -> None:
    """In any case the model is plain PyTorch's, which adds to them too."""

    def losses(generator: nn.Module, discriminator: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(x)
        first = F.softplus(-discriminator(y)).mean() + F.softplus(discriminator(fake.detach())).mean()
        return first, F.softplus(-discriminator(fake)).mean()

    theirs = linear(0), linear(1, 3, 1)
    opt_g, opt_d = map(sgd, theirs)
    for i in range(5):
        CLEAR[clear](theirs[1], opt_d)
        for number, optimizer in enumerate((opt_d, opt_g)):
            losses(*theirs, X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4])[number].backward()
            optimizer.step()
            optimizer.zero_grad()
    *ours, opt_g, opt_d = pair(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in run.loader(DATA, global_batch=4, shuffle=False):
            CLEAR[clear](ours[1], opt_d)
            for number, optimizer in enumerate((opt_d, opt_g)):
                run.backward(losses(*ours, x, y)[number])
                run.step(optimizer)
    assert torch.allclose(weights(*ours), weights(*theirs), rtol=1e-14, atol=1e-15)
    found = [str(one.message) for one in caught if "another optimizer's loss left in the last" in str(one.message)]
    assert len(found) == (clear == "not at all")
    assert all("run.step(SGD): the gradients of 1/weight and 1 more include" in text for text in found)


def test_a_loss_that_names_its_optimizer_leaves_nothing(run: paceline.Run) -> None:
    generator, discriminator, opt_g, opt_d = pair(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in run.loader(DATA, global_batch=4, micro_batch=2):
            fake = generator(x)
            run.backward(F.softplus(-discriminator(y)).mean(), optimizer=opt_d)
            run.backward(F.softplus(discriminator(fake.detach())).mean(), optimizer=opt_d)
            run.step(opt_d)
            run.backward(F.softplus(-discriminator(fake)).mean(), optimizer=opt_g)
            run.step(opt_g)


def test_an_optimizer_that_rests_and_is_cleared_before_its_turn_leaves_nothing(run: paceline.Run) -> None:
    """The discriminator's loss reaches the generator, whose turn comes every third batch."""
    generator, discriminator, opt_g, opt_d = pair(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, (x, y) in enumerate(run.loader(DATA, global_batch=4)):
            opt_d.zero_grad()
            run.backward(F.softplus(-discriminator(y)).mean() + F.softplus(discriminator(generator(x))).mean())
            run.step(opt_d)
            if number % 3 == 2:
                generator.zero_grad()
                run.backward(F.softplus(-discriminator(generator(x))).mean())
                run.step(opt_g)
