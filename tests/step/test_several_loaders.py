"""A loop over two training loaders: a loss of both their batches is exact, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import UsageError

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LONG, SHORT = TensorDataset(X, Y), TensorDataset(-X[:19], Y[:19])
SUM = "is a sum of 2 parts from separate forwards"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Job:
    def __init__(self, batch_a: int = 8, batch_b: int = 4, b: Any = SHORT, **options: Any) -> None:
        self.run = paceline.start(device="cpu", **options)
        self.model = build()
        self.model, self.optimizer = self.run.prepare(self.model, sgd(self.model))
        self.a = self.run.loader(LONG, global_batch=batch_a, name="a")
        self.b = self.run.loader(b, global_batch=batch_b, name="b")

    def steps(self, make: Callable[[Any, Any], None]) -> None:
        """Six steps; the loader that ends is begun again."""
        pairs = zip(again(self.a), again(self.b), strict=False)
        for _ in range(6):
            make(*next(pairs))
            self.run.step(self.optimizer)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.run.close()


@pytest.fixture
def equal() -> Iterator[Job]:
    made = Job(8, 8, TensorDataset(-X[:16], Y[:16]))
    yield made
    made.run.close()


def by_hand(batch_a: int, b: Any, batch_b: int) -> nn.Module:
    model = build()
    optimizer = sgd(model)
    pairs = zip(again(DataLoader(LONG, batch_a)), again(DataLoader(b, batch_b)), strict=False)
    for _ in range(6):
        a, b = next(pairs)
        optimizer.zero_grad()
        (mse(model, a) + 0.5 * mse(model, b)).backward()
        optimizer.step()
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def by_closure(job: Job, a: Any, b: Any, combine: Callable[[Tensor, Tensor], Any]) -> None:
    job.run.forward_backward(lambda model, batch: combine(mse(model, a), mse(model, batch)), job.model, b, of=job.b)


def beside_its_own(job: Job, a: Any, b: Any) -> None:
    job.run.backward(mse(job.model, a), of=job.a)
    job.run.backward(mse(job.model, b) + 0.1 * mse(job.model, a), of=job.b)


SUMS: dict[str, Callable[[Job, Any, Any], None]] = {
    "sum": lambda j, a, b: j.run.backward(mse(j.model, a) + 0.5 * mse(j.model, b), of=j.b),
    "of the first": lambda j, a, b: j.run.backward(mse(j.model, a) + 0.5 * mse(j.model, b), of=j.a),
    "product": lambda j, a, b: j.run.backward(mse(j.model, a) * mse(j.model, b), of=j.b),
    "nested": lambda j, a, b: j.run.backward((torch.stack([mse(j.model, a), mse(j.model, b)]).sum() - 1) / 2, of=j.b),
    "count": lambda j, a, b: j.run.backward(mse(j.model, a) + mse(j.model, b), count=len(b[0]), of=j.b),
    "plain sum": lambda j, a, b: j.run.backward(total=mse(j.model, a) + mse(j.model, b), of=j.b),
    "closure": lambda j, a, b: by_closure(j, a, b, lambda loss_a, loss_b: loss_a + loss_b),
    "tuple": lambda j, a, b: by_closure(j, a, b, lambda loss_a, loss_b: (loss_a, loss_b)),
    "totals": lambda j, a, b: by_closure(j, a, b, lambda *both: [paceline.Total(loss) for loss in both]),
    "beside its own": beside_its_own,
}


@pytest.mark.parametrize("how", SUMS)
def test_a_sum_over_two_loaders_is_refused(job: Job, how: str) -> None:
    """Before: exit 0, and wrong on several processes. Refused on one too, so that a script is found out at once."""
    with pytest.raises(UsageError, match=SUM) as refused:
        job.steps(lambda a, b: SUMS[how](job, a, b))
    call = "forward_backward(loss_fn_1, model, batch_1" if how in ("closure", "tuple", "totals") else "backward(loss_1"
    assert f"    run.{call}, of=...)  # computed from a batch of" in str(refused.value)
    assert job.run.steps == 0


@pytest.mark.parametrize("retain", [False, True])
def test_its_parts_in_two_calls_are_exact(job: Job, retain: bool) -> None:
    def make(a: Any, b: Any) -> None:
        parts = mse(job.model, a), 0.5 * mse(job.model, b)
        job.run.backward(parts[0], of=job.a, retain_graph=retain)
        job.run.backward(parts[1], of=job.b)

    job.steps(make)
    assert_same(job.model, by_hand(8, SHORT, 4))


def test_sums_over_a_common_count_are_exact(job: Job) -> None:
    def make(a: Any, b: Any) -> None:
        total = sum(F.mse_loss(job.model(x), y, reduction="sum") for x, y in (a, b))
        job.run.backward(total=total, count=a[1].numel() + b[1].numel(), of=job.b)
        job.run.backward(0 * mse(job.model, a), of=job.a)

    job.steps(make)


@pytest.mark.parametrize("of", ["a", "b"])
def test_a_sum_over_loaders_of_one_size_is_exact(equal: Job, of: str) -> None:
    equal.steps(lambda a, b: equal.run.backward(mse(equal.model, a) + 0.5 * mse(equal.model, b), of=vars(equal)[of]))
    assert_same(equal.model, by_hand(8, equal.b.dataset, 8))


def test_weight_decay_in_the_loss_is_no_part(job: Job) -> None:
    def decay() -> Any:
        return sum(p.norm() for p in job.model.parameters())

    def make(a: Any, b: Any) -> None:
        job.run.backward(mse(job.model, a) + 0.1 * decay(), of=job.a)
        job.run.backward(mse(job.model, b) * mse(job.model, a).detach(), of=job.b)
        job.run.backward(decay(), count=1, of=job.b)

    job.steps(make)


def joined(job: Job, a: Any, b: Any) -> None:
    x, y = (torch.cat(both) for both in zip(a, b, strict=True))
    job.run.backward(mse(job.model, (x, y)), of=job.b)


UNUSED: dict[str, Callable[[Job, Any, Any], None]] = {
    "one forward": joined,
    "one term": lambda j, a, b: j.run.backward((j.model(a[0]).mean(0) - j.model(b[0]).mean(0)).square().sum(), of=j.b),
    "detached": lambda j, a, b: j.run.backward(mse(j.model, a).detach() * mse(j.model, b), of=j.b),
}


@pytest.mark.parametrize("how", UNUSED)
def test_a_loader_whose_batches_have_no_backward_is_refused(job: Job, how: str) -> None:
    with pytest.raises(UsageError, match=r"loader 'a' has yielded batches without a run\.backward"):
        job.steps(lambda a, b: UNUSED[how](job, a, b))
    assert job.run.steps == 1


def test_a_loader_of_one_batch_without_a_backward_is_refused() -> None:
    job = Job(24)
    others = iter(job.b)

    def train() -> None:
        for a in job.a:
            joined(job, a, next(others))
            job.run.step(job.optimizer)

    with pytest.raises(UsageError, match="loader 'a' has yielded batches without a run"):
        train()
    job.run.close()


def test_an_update_for_each_loader_in_turn(job: Job) -> None:
    """Both batches are fetched first; the second one waits while the first one's update is made."""

    def make(a: Any, b: Any) -> None:
        job.run.backward(mse(job.model, a), of=job.a)
        job.run.step(job.optimizer)
        job.run.backward(mse(job.model, b), of=job.b)

    job.steps(make)
    assert job.run.steps == 12


def test_an_outer_loop_whose_batch_waits_for_the_inner_one(job: Job) -> None:
    for a in job.a:
        for b in job.b:
            job.run.backward(mse(job.model, b), of=job.b)
            job.run.step(job.optimizer)
        job.run.backward(mse(job.model, a), of=job.a)
        job.run.step(job.optimizer)
    assert job.run.steps == 18


def test_two_forwards_of_one_loader_where_the_other_ones_batch_is_used_up(job: Job) -> None:
    others = iter(job.b)
    for a in job.a:
        job.run.backward(mse(job.model, a) + mse(job.model, (-a[0], a[1])), of=job.a)
        job.run.step(job.optimizer)
        job.run.backward(mse(job.model, next(others)), of=job.b)
        job.run.step(job.optimizer)
    assert job.run.steps == 6


def test_a_sum_over_batches_of_one_loader(job: Job) -> None:
    batches = iter(job.a)
    loss = mse(job.model, next(batches))
    with pytest.raises(UsageError, match="a sum over several batches, make one call per part"):
        job.run.backward(loss + mse(job.model, next(batches)))


def test_a_bundle_within_a_batch_is_refused() -> None:
    job = Job(strategy="data_parallel:devices=cpu,cpu")
    with pytest.raises(
        UsageError, match=r"not the batch that the loader yielded.*make one call per loader, with of=loader"
    ):
        job.steps(lambda a, b: by_closure(job, a, (a, b), lambda loss, _: loss))
    job.run.close()
