"""What users do beside the straight path, on several ranks: right, or named; never another model in silence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.strategies.checks import (
    Net,
    X,
    both_heads,
    data,
    difference,
    make,
    named,
    one_head,
    plainly,
    same,
    started,
    under_paceline,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm import same_bits
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, UsageError


def whole(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The trunk in a reentrant checkpoint, whose own backward autograd does not see beforehand."""
    x, tokens, y = batch
    inputs = x.requires_grad_()
    return checkpoint(lambda at: both_heads(model, [at, tokens, y]), inputs, use_reentrant=True)


class Twice(nn.Module):
    """A block that is checkpointed twice, at first reentrantly: each of its gradients comes in two parts. One layer is
    used nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        x = checkpoint(self.block, self.first(x), use_reentrant=reentrant)
        return checkpoint(self.block, x.tanh(), use_reentrant=False)


def twice(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], True), batch[2])


def twice_without(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], False), batch[2])


@pytest.mark.parametrize("strategy", ["ddp", "ddp:find_unused=true"])
@pytest.mark.ranks(2)
def test_reentrant_checkpoints_are_those_of_plain_pytorch(strategy: str) -> None:
    same(under_paceline(Net, whole, strategy=strategy, closure=False), plainly(Net, both_heads))


@pytest.mark.parametrize("options", ["", ":find_unused=true", ":gradient_as_bucket_view=true", ":static_graph=true"])
@pytest.mark.ranks(2)
def test_a_gradient_that_comes_in_parts_is_whole_when_it_is_reduced(options: str) -> None:
    """Before: DDP's "Expected to mark a variable ready only once"."""
    same(under_paceline(Twice, twice, strategy=f"ddp{options}", closure=False), plainly(Twice, twice_without))


@pytest.mark.ranks(2)
def test_a_gradient_that_comes_in_parts_later_is_named() -> None:
    calls = [0]

    def later(model: nn.Module, batch: list[Tensor]) -> Tensor:
        calls[0] += 1
        return (twice if calls[0] > 1 else twice_without)(model, batch)

    named(lambda: under_paceline(Twice, later, closure=False), ModelError, "in several parts", "use_reentrant=False")


def first_row_only(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Only the first example of the data reaches the spare head: one rank, in its first micro-batch."""
    x, _, y = batch
    loss = F.cross_entropy(model.head(model.trunk(x).tanh()), y)
    first = (x == X[0]).all(1)
    return loss + model.spare(model.trunk(x[first])).square().sum() / len(x) if first.any() else loss


@pytest.mark.ranks(2)
def test_a_parameter_that_only_an_earlier_micro_batch_reaches() -> None:
    """Its gradient was reduced with no other rank's, in silence."""
    mine = under_paceline(Net, first_row_only, strategy="ddp:find_unused=true", micro=1)
    same(mine, plainly(Net, first_row_only))


@pytest.mark.ranks(2)
def test_hooks_on_parameters_act_once_in_every_step() -> None:
    calls = [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * 0.1

    def hooked() -> nn.Module:
        model = Net().double()
        model.head.weight.register_hook(hook)
        return model

    mine = under_paceline(hooked, both_heads)
    counted, calls[0] = calls[0], 0
    same(mine, plainly(hooked, both_heads))
    assert counted == calls[0]


@pytest.mark.ranks(2)
def test_a_layer_added_later_is_named_until_it_is_prepared_and_then_alike_on_all_ranks() -> None:
    """Named where it was not prepared again; right where it was, on every rank alike."""
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        loader = run.loader(data(), global_batch=6)
        for batch in loader:
            run.backward(both_heads(model, batch))
            run.step(optimizer)
        model.more = nn.Linear(8, 3).double()  # drawn after a batch
        optimizer.add_param_group({"params": model.more.parameters()})
        next(iter(loader))

        def step() -> None:
            for batch in loader:
                x, tokens, y = batch
                extra = F.cross_entropy(model.more(model.features(x, tokens)), y)
                run.backward(both_heads(model, batch) + extra)
                run.step(optimizer)

        named(step, UsageError, "2 parameter(s)", "run.prepare(model)")
        model.zero_grad()
        run.prepare(model)
        assert not same_bits.digest_mismatch(list(model.named_parameters()), world_group())
        step()
        assert not same_bits.digest_mismatch(list(model.named_parameters()), world_group())


@pytest.mark.ranks(2)
def test_a_batch_norm_added_later_takes_its_statistics_over_all_ranks() -> None:
    """It takes its statistics over all ranks, like those of the first `prepare`, which are left as they are: the
    running mean of one step is a tenth of the mean over the whole batch, from its own definition."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if hasattr(self, "second") else self.first(x)

    examples = torch.arange(24, dtype=torch.float64).reshape(6, 4) ** 2
    with started() as run:
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.prepare(model, optimizer)
        model.second = nn.BatchNorm1d(4, affine=False).double()
        run.prepare(model)
        run.prepare(model)  # once more changes nothing
        plain = [nn.BatchNorm1d(4).double() for _ in range(2)]
        for (x,) in run.loader(torch.utils.data.TensorDataset(examples), global_batch=6):
            run.backward(model(x).square().mean())
            run.step(optimizer)
        plain[1](plain[0](examples))
        for ours, theirs in zip((model.first, model.second), plain):
            torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_an_update_that_draws_is_alike_on_all_ranks() -> None:
    class Langevin(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3)

    with started() as run:
        model, _ = make(Net, False)
        optimizer = Langevin(model.parameters(), lr=0.01)
        run.prepare(model, optimizer)
        for batch in run.loader(data(), global_batch=6):
            run.backward(both_heads(model, batch))
            run.step(optimizer)
        model.head.reset_parameters()
        assert not same_bits.digest_mismatch(list(model.named_parameters()), world_group())


@pytest.mark.ranks(2)
def test_a_direct_backward_beside_ours_is_named() -> None:
    def mixed(model: nn.Module, batch: list[Tensor]) -> Tensor:
        one_head(model, batch).backward()
        return both_heads(model, batch)

    named(
        lambda: under_paceline(Net, mixed, closure=False), UsageError, "run.backward did not make", "several calls add"
    )


@pytest.mark.ranks(2)
def test_replicas_that_drifted_apart_are_named_at_a_checkpoint() -> None:
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        for batch in run.loader(data(), global_batch=6):
            run.backward(both_heads(model, batch))
            if run.world.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.01
            run.step(optimizer)
        named(lambda: run.save("never written"), ModelError, "differ between ranks at a checkpoint", "embed.weight")


@pytest.mark.ranks(2)
def test_optimizer_states_that_differ_at_the_start_are_named() -> None:
    with started() as run:
        model, optimizer = make(Net, False)
        if run.world.rank == 0:
            optimizer.state[model.head.weight]["momentum_buffer"] = torch.ones_like(model.head.weight)
        run.prepare(model, optimizer)

        def train() -> None:
            for batch in run.loader(data(), global_batch=6):
                run.backward(both_heads(model, batch))
                run.step(optimizer)

        named(train, Exception, "Build model and optimizer in the same way on every rank")


@pytest.mark.ranks(2)
def test_run_sum_adds_integers_floats_and_dictionaries_and_names_what_differs() -> None:
    with started() as run:
        rank, size = run.world.rank, run.world.size
        assert run.sum(0 if rank else 2.5) == 2.5  # whole on some ranks only
        assert run.sum(2**60 + rank) == sum(2**60 + r for r in range(size))  # more than a float64 holds
        assert run.sum(-3 - rank) == sum(-3 - r for r in range(size))
        own = {"loss": 1, "right": 100}
        turned = dict(reversed(own.items())) if rank else own
        assert run.sum(turned) == {"loss": size, "right": 100 * size}
        named(lambda: run.sum(own if rank else {"loss": 1}), UsageError, "rank 0: loss;", "loss, right")
        named(lambda: run.sum(torch.zeros(2 + rank)), UsageError, "shape (2,)", "run.gather")


@pytest.mark.ranks(2)
def test_run_mean_is_of_the_loop_that_it_stands_in_around_an_evaluation() -> None:
    with started() as run:
        train, test = run.loader(data(), global_batch=6), run.loader(data(), global_batch=4, train=False)
        for _ in train:
            for _ in test:
                pass
            shard = torch.tensor([float(run.world.rank)])
            assert run.mean(2.0) == 2.0
            assert run.mean(shard) == (run.world.size - 1) / 2
        named(lambda: run.mean(2.0), UsageError, "no loader is being iterated", "run.ratio")


@pytest.mark.ranks(2)
def test_doubles_by_default_train_as_in_plain_pytorch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert difference(under_paceline(Net, both_heads), plainly(Net, both_heads)) < 1e-10
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.ranks(2)
def test_losses_without_a_gradient_are_named() -> None:
    def detached(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return both_heads(model, batch).detach()

    named(lambda: under_paceline(Net, detached), UsageError, "does not depend on any trained parameter", "run.log")
    with started() as run:
        model, _ = run.prepare(*make(Net, False))
        batches = iter(run.loader(data(), global_batch=6))
        batch = next(batches)

        def with_accuracy(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
            return both_heads(model, batch), torch.tensor(0.5)

        named(lambda: run.forward_backward(with_accuracy, model, batch), UsageError, "sum of losses")
