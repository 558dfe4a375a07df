"""hvd.DistributedOptimizer against plain PyTorch with the whole global batch in one process, in float64."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline.horovod as hvd
from paceline.comm import group as groups
from paceline.errors import SettingError, UsageError
from paceline.horovod.distributed_optimizer import Distributed
from paceline.horovod.gradient_reducer import reducers

BATCH = 12  # divides by 1, 2, 3 and 4
Update = Callable[[nn.Module, Any, Tensor, Tensor], None]


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    yield
    for reducer in list(reducers):
        reducer.close()


def data(steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 6, generator=generator).double(), torch.randn(BATCH, 3, generator=generator).double())
        for _ in range(steps)
    ]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def usual(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def plain(update: Update = usual, make: Callable[[], nn.Module] = network) -> nn.Module:
    """Trained with the whole batch, by torch's own optimizer."""
    model = make()
    optimizer = sgd(model)
    for x, y in data():
        update(model, optimizer, x, y)
    return model


def shard(tensor: Tensor) -> Tensor:
    return tensor.chunk(hvd.size())[hvd.rank()]


def same(model: nn.Module, expected: nn.Module, within: float = 1e-12) -> None:
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (own - other).norm() <= within * other.norm(), name


def distributed(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer or sgd(model), named_parameters=model.named_parameters(), **options)


def ours(update: Update = usual, make: Callable[[], nn.Module] = network, **options: Any) -> nn.Module:
    """Trained with this process's part of each batch, by a DistributedOptimizer."""
    model = make()
    optimizer = distributed(model, **options)
    for x, y in data():
        update(model, optimizer, shard(x), shard(y))
    return model


@contextlib.contextmanager
def bucket_bytes(most: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "BUCKET_BYTES", most)
        yield


@pytest.mark.ranks(1, 2, full=3)
@pytest.mark.parametrize("most", [64, 2**20])
def test_equal_shards_give_the_weights_of_the_whole_batch(most: int) -> None:
    hvd.init()
    with bucket_bytes(most):
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(hvd.rank())  # what broadcast_parameters mends
        optimizer = distributed(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        sent = []
        for x, y in data():
            optimizer.zero_grad()
            F.mse_loss(model(shard(x)), shard(y)).backward()
            sent.append(len(optimizer.reducer._sent))
            optimizer.step()
    assert isinstance(optimizer, torch.optim.SGD)
    same(model, plain())
    buckets = 0 if hvd.size() == 1 else 6 if most == 64 else 1
    assert sent == [0, *[buckets] * 3], "during the backward; the first step lays the buckets out"


@pytest.mark.ranks(2)
def test_unequal_shards_give_the_mean_of_the_processes_means() -> None:
    hvd.init()
    parts = [slice(0, 3), slice(3, BATCH)]

    def means(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (sum(F.mse_loss(model(x[part]), y[part]) for part in parts) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()

    model = network()
    optimizer = distributed(model)
    for x, y in data():
        usual(model, optimizer, x[parts[hvd.rank()]], y[parts[hvd.rank()]])
    same(model, plain(means))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}])
def test_sums_and_predivided_averages(options: dict[str, Any]) -> None:
    hvd.init()
    scale = hvd.size() if options.get("op") == hvd.Sum else 1

    def scaled(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) / scale).backward()
        optimizer.step()

    same(ours(scaled, **options), plain())


@pytest.mark.ranks(2)
def test_several_backward_passes_a_step_and_a_short_last_step() -> None:
    hvd.init()
    model = network()
    optimizer = distributed(model, backward_passes_per_step=3)
    for number, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        passes = 2 if number == 3 else 3  # fewer than were announced: the step sends what there is
        for piece_x, piece_y in zip(shard(x).chunk(3)[:passes], shard(y).chunk(3)):
            (F.mse_loss(model(piece_x), piece_y) / 3).backward()
        optimizer.step()

    def pieces(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        short = torch.equal(x, data()[3][0])
        kept = [0, 1, 2, 3, 6, 7, 8, 9] if short else list(range(BATCH))
        ((model(x[kept]) - y[kept]).square().mean() * len(kept) / BATCH).backward()
        optimizer.step()

    same(model, plain(pieces))


@pytest.mark.ranks(2)
def test_clipping_between_synchronize_and_step() -> None:
    hvd.init()

    def clipped(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        hvds = isinstance(optimizer, Distributed)
        if hvds:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize() if hvds else contextlib.nullcontext():
            optimizer.step()

    same(ours(clipped), plain(clipped))


@pytest.mark.ranks(1, 2)
def test_clipping_while_gradients_travel_is_refused_on_any_number_of_processes() -> None:
    hvd.init()
    model = network()
    optimizer = distributed(model)
    x, y = data()[0]
    F.mse_loss(model(shard(x)), shard(y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with pytest.raises(UsageError, match=r"'4\.bias' was changed after the backward.*optimizer\.synchronize"):
        optimizer.step()
    model.zero_grad()
    F.mse_loss(model(shard(x)), shard(y)).backward()
    model.zero_grad()
    with pytest.raises(UsageError, match="was cleared"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_the_order_of_gradients_may_differ_over_processes() -> None:
    hvd.init()

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, turned: bool = False) -> Tensor:
            if turned:
                return self.two(x) + self.one(x)
            return self.one(x) + self.two(x)

    def make() -> nn.Module:
        torch.manual_seed(2)
        return Branches().double()

    steps = itertools.count()

    def turned(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x, turned=(hvd.rank() + next(steps)) % 2 == 0), y).backward()
        hvd.allreduce(torch.ones(3), name="between backward and step")
        optimizer.step()

    with bucket_bytes(8):  # each parameter alone
        same(ours(turned, make), plain(make=make))


class Experts(nn.Module):
    """Of three layers one is used by the first half of the batch, one by the second, and one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.nobody = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, start: int) -> Tensor:
        at = torch.arange(start, start + len(x))
        return torch.cat([(self.first if n < BATCH // 2 else self.second)(row) for n, row in zip(at, x)]).view(-1, 3)


@pytest.mark.ranks(2)
def test_a_parameter_that_one_process_or_none_reaches() -> None:
    """Momentum and weight decay act on what any process reaches, and on nothing else, as on one process."""
    hvd.init()

    def make() -> nn.Module:
        torch.manual_seed(3)
        return Experts().double()

    def update(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x, 0 if len(x) == BATCH else hvd.rank() * BATCH // 2), y).backward()
        optimizer.step()
        assert model.get_parameter("nobody.weight").grad is None
        assert model.get_parameter("second.weight").grad is not None

    model = ours(update, make)
    same(model, plain(update, make))
    assert torch.equal(model.get_parameter("nobody.weight"), make().get_parameter("nobody.weight"))


@pytest.mark.ranks(2)
def test_two_optimizers_with_a_discriminator_that_is_frozen_for_the_generator() -> None:
    hvd.init()

    def train(parts: int, rank: int, wrap: Callable[[Any, nn.Module], Any]) -> list[nn.Module]:
        torch.manual_seed(4)
        models = [nn.Linear(6, 6).double(), nn.Linear(6, 1).double()]
        generator, discriminator = models
        first, second = (wrap(sgd(model), model) for model in models)
        for x, _ in data():
            x = x.chunk(parts)[rank]
            second.zero_grad()
            (discriminator(x).mean() - discriminator(generator(x).detach()).mean()).square().backward()
            second.step()
            first.zero_grad()
            discriminator.requires_grad_(False)
            discriminator(generator(x)).mean().backward()
            discriminator.requires_grad_(True)
            first.step()
        return models

    found = train(hvd.size(), hvd.rank(), lambda optimizer, model: distributed(model, optimizer))
    by_hand = train(hvd.size(), hvd.rank(), lambda optimizer, model: _Averaged(optimizer))
    for model, expected in zip(found, by_hand, strict=True):
        same(model, expected)


class _Averaged:
    """Plain PyTorch: gradients averaged by hand before the step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()
        self.optimizer.step()


@pytest.mark.ranks(2)
def test_a_second_loss_that_reaches_frozen_parameters_is_named() -> None:
    hvd.init()
    model = network()
    optimizer = distributed(model)
    x, y = data()[0]
    F.mse_loss(model(shard(x)), shard(y)).backward()
    with pytest.raises(UsageError, match=r"zero_grad\(\) was called after loss\.backward\(\)"):
        optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"more than 1 backward passes.*backward_passes_per_step"):
        F.mse_loss(model(shard(x)), shard(y)).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    hvd.init()

    def make() -> nn.Module:
        torch.manual_seed(6)
        return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)).double()

    def optimizers(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    rows = torch.tensor([[1, 1, 5], [7, 1, 2], [3, 4, 5], [19, 0, 0]])
    model, reference = make(), make()
    optimizer, own = distributed(model, optimizers(model), sparse_as_dense=as_dense), optimizers(reference)
    for _ in range(3):
        optimizer.zero_grad()
        model(shard(rows)).square().mean().backward()
        optimizer.synchronize()
        assert model.get_parameter("0.weight").grad.is_sparse  # type: ignore[union-attr]
        with optimizer.skip_synchronize():
            optimizer.step()
        own.zero_grad()
        reference(rows).square().mean().backward()
        own.step()
    same(model, reference)


@pytest.mark.ranks(2)
def test_fp16_compression_is_the_mean_of_rounded_gradients() -> None:
    hvd.init()
    model, single = network(), network()
    optimizer = distributed(model, compression=hvd.Compression.fp16)
    x, y = data()[0]
    F.mse_loss(model(shard(x)), shard(y)).backward()
    optimizer.synchronize()
    F.mse_loss(single(shard(x)), shard(y)).backward()
    for found, own in zip(model.parameters(), single.parameters(), strict=True):
        assert found.grad is not None
        assert own.grad is not None
        halves = [half.half() for half in hvd.allgather_object(own.grad)]
        assert torch.equal(found.grad, (halves[0] + halves[1]).double() / 2)


@pytest.mark.ranks(2)
def test_a_closure_is_averaged_after_each_call() -> None:
    hvd.init()

    def by_closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    same(ours(by_closure), plain(by_closure))


@pytest.mark.ranks(2)
def test_state_schedulers_and_checkpoints_of_the_optimizer_go_on() -> None:
    """The wrapped optimizer had made steps, and a scheduler had put its own `step` on it."""
    hvd.init()
    model, reference = network(), network()
    inner, own = sgd(model), sgd(reference)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (inner, own)]
    batches = data(6)

    for x, y in batches[:2]:
        usual(model, inner, x, y)
        usual(reference, own, x, y)
    optimizer = distributed(model, inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches[2:4]:
            usual(model, optimizer, shard(x), shard(y))
            usual(reference, own, x, y)
            for scheduler in schedulers:
                scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for x, y in batches[4:]:
        usual(model, optimizer, shard(x), shard(y))
        usual(reference, own, x, y)
    same(model, reference)
    assert calls == ["before", "after"] * 2


@pytest.mark.ranks(2)
def test_state_that_the_root_alone_has_comes_to_all_without_a_step() -> None:
    hvd.init()
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1 if hvd.rank() == 0 else 0.5)
    x, y = data()[0]
    if hvd.rank() == 0:
        F.mse_loss(model(x), y).backward()
        inner.step()
        inner.zero_grad()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    before = [parameter.clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    assert all(map(torch.equal, before, model.parameters()))
    assert inner.param_groups[0]["lr"] == 0.1
    states = hvd.allgather_object(inner.state_dict())
    for key, found in states[0]["state"].items():
        for name, value in found.items():
            assert torch.equal(value, states[1]["state"][key][name])


@pytest.mark.ranks(2)
def test_processes_with_other_models_are_told() -> None:
    hvd.init()
    model = nn.Linear(3 if hvd.rank() else 2, 2)
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, model.in_features)).sum().backward()
    with pytest.raises(UsageError, match=r"not the same.*\(rank 0: 'weight', float32 \(2, 2\); rank 1.*and freeze its"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"rank 1: 'weight', float32 \(2, 3\)\)\. Build the model"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names = {f"layer{hvd.rank()}": torch.ones(2)}
    with pytest.raises(UsageError, match=r"rank 0: 'layer0'.*rank 1: 'layer1'"):
        hvd.broadcast_parameters(names, root_rank=0)


@pytest.mark.ranks(2)
def test_a_newer_optimizer_takes_the_parameters_over_and_layers_may_be_unfrozen() -> None:
    hvd.init()

    def freeze(model: nn.Module, frozen: bool) -> None:
        model.get_submodule("0").requires_grad_(not frozen)

    def train(step: Callable[[Any, nn.Module, int], Any]) -> nn.Module:
        model = network()
        freeze(model, True)
        optimizer: Any = None
        for number in range(4):
            if number == 2:
                freeze(model, False)
            optimizer = step(optimizer, model, number)
        return model

    def wrapped(optimizer: Any, model: nn.Module, number: int) -> Any:
        former = optimizer
        if number in (0, 1):
            optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = map(shard, data()[number])
        if number == 1:
            F.mse_loss(model(x), y).backward()
            with pytest.raises(UsageError, match="replaced by a newer optimizer"):
                former.step()
            optimizer.synchronize()
        usual(model, optimizer, x, y)
        return optimizer

    def plainly(optimizer: Any, model: nn.Module, number: int) -> Any:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        usual(model, optimizer, *data()[number])
        return optimizer

    same(train(wrapped), train(plainly))


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused() -> None:
    hvd.init()
    model = network()
    inner = sgd(model)
    wrap = hvd.DistributedOptimizer
    for options, words in (
        ({"op": hvd.Adasum}, "Adasum.*op=hvd.Average"),
        ({"op": hvd.Max}, "hvd.Average or hvd.Sum"),
        ({"op": "mean"}, "hvd.Average, Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"compression": "fp16"}, "hvd.Compression.fp16"),
        ({"process_set": hvd.ProcessSet}, "new_group"),
        ({"named_parameters": model.parameters()}, r"not model\.parameters"),
        ({"named_parameters": []}, "named_parameters is empty"),
        ({"named_parameters": [("0.weight", model.get_parameter("0.weight"))]}, "named_parameters lacks 5 parameters"),
        ({"named_parameters": [("w", p) for p in model.parameters()]}, "more than once: w"),
    ):
        with pytest.raises(SettingError, match=words):
            wrap(inner, **options)
    with pytest.raises(SettingError, match="averaged twice"):
        wrap(wrap(inner))
    with pytest.raises(SettingError, match="LBFGS"):
        wrap(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(SettingError, match="received Sequential"):
        wrap(model)  # type: ignore[arg-type]
    optimizer = wrap(inner)
    x, y = data()[0]
    F.mse_loss(model(x), y).backward()
    with optimizer.skip_synchronize(), pytest.raises(UsageError, match="synchronize\\(\\) was not called"):
        optimizer.step()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="a second time"):
        optimizer.step()
