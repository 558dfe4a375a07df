"""balance=True on real processes, one of them slow: the model of plain PyTorch, from unequal shares."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.balance.own_time import OwnTime
from paceline.errors import SettingError

BATCH, EXAMPLES, EPOCHS = 16, 200, 3  # the last batch of an epoch has 8
SECONDS = 0.0005, 0.004  # that an example takes on a fast process, and on the slow one


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(EXAMPLES, n, generator=g, dtype=torch.float64) for n in (6, 2)))


class SetClock(OwnTime):
    """A clock that only the forwards of a Net move. So the shares do not depend on this machine."""

    moment = 0.0

    def now(self) -> float:
        return SetClock.moment

    def begin(self, fetched: float, waited: float) -> None:
        super().begin(self.now(), 0.0)


class Net(nn.Module):
    """A network whose forward takes some time for each example, by that clock.

    norm: with batch norm.
    """

    def __init__(self, slow: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        middle = nn.BatchNorm1d(12) if norm else nn.Tanh()
        # A bias before batch norm has a gradient of rounding errors alone, which Adam would make as large as others.
        self.layers = nn.Sequential(nn.Linear(6, 12, bias=not norm), middle, nn.Linear(12, 2)).double()
        self.seconds = SECONDS[slow]

    def forward(self, x: Tensor) -> Tensor:
        SetClock.moment += self.seconds * len(x)
        result: Tensor = self.layers(x)
        return result


@contextmanager
def on_set_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.balance.balance.OwnTime", SetClock)
        yield


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def plainly(norm: bool = False) -> dict[str, Tensor]:
    net = Net(norm=norm)
    net.seconds = 0.0
    optimizer = adam(net)
    for _ in range(EPOCHS):
        for batch in DataLoader(data(), batch_size=BATCH):
            optimizer.zero_grad()
            loss_fn(net, batch).backward()
            optimizer.step()
    return net.state_dict()


def difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in
             model.state_dict().items()}  # fmt: skip
    return max((whole[name] - value).abs().max().item() for name, value in expected.items())


def balanced(
    given: Any = None, *, norm: bool = False, losses: int = 1, **options: Any
) -> tuple[nn.Module, list[tuple[int, int]]]:
    """Train with the last rank being slow. Returns the model, and per update this rank's examples and the total."""
    settings = {key: options.pop(key) for key in ("strategy", "noise", "reproducible") if key in options}
    with on_set_clock(), started(balance=True, progress="off", **settings) as run:
        net = Net(slow=run.rank == run.world_size - 1, norm=norm)
        model, optimizer = run.prepare(net, adam(net))
        loader = run.loader(data() if given is None else given, global_batch=BATCH, **options)
        sizes, own = [], 0
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                own += loader.examples
                for _ in range(losses):  # a sum of losses, each with a backward
                    run.backward(loss_fn(model, batch) / losses)
                if run.step(optimizer):
                    assert loader.current is not None
                    sizes.append((own, loader.current.total))
                    own = 0
        return net, sizes


def expect_shares(sizes: list[tuple[int, int]]) -> None:
    """All examples are used once, and the slow rank has fewer at the end."""
    for own, total in zip(*(torch.tensor(list(column)) for column in zip(*sizes, strict=True)), strict=True):
        everyone = own.clone()
        torch.distributed.all_reduce(everyone)
        assert everyone == total
    slow = torch.tensor([own for own, _ in sizes])
    torch.distributed.broadcast(slow, torch.distributed.get_world_size() - 1)
    equal = round(BATCH / torch.distributed.get_world_size())
    assert abs(slow[0] - equal) <= 1  # a whole number of examples, or of shards of two
    assert slow[:9].tolist() == [slow[0]] * 9
    assert slow[-3] < slow[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("ddp:reducer=native", marks=pytest.mark.conformance),
        "fsdp",
        pytest.param("fsdp:stage=2", marks=pytest.mark.full),
        pytest.param("fsdp:stage=1", marks=pytest.mark.conformance),
    ],
)
@pytest.mark.ranks(2, full=3)
def test_the_model_is_that_of_plain_pytorch(strategy: str) -> None:
    model, sizes = balanced(strategy=strategy)
    expect_shares(sizes)
    assert difference(model, plainly()) < 1e-12


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"micro_batch": 3},
        {"losses": 2},
        {"norm": True},
        {"collate": "global"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.conformance
@pytest.mark.ranks(2, full=3)
def test_workers_micro_batches_losses_and_batch_norm(options: dict[str, Any]) -> None:
    model, sizes = balanced(**options)
    expect_shares(sizes)
    assert difference(model, plainly(norm=options.get("norm", False))) < 1e-12


@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "given", [{}, {"strategy": "fsdp"}, {"reproducible": 8}, {"strategy": "local_sgd:every=4"}], ids=str
)
@pytest.mark.ranks(2, full=3)
def test_an_evaluation_has_the_latest_shares(given: dict[str, Any]) -> None:
    """The loss and the predictions are those of one process on all examples; so is the number of yields."""
    whole = data()
    with on_set_clock(), started(balance=True, progress="off", **given) as run:
        net = Net(slow=run.rank == run.world_size - 1)
        model, optimizer = run.prepare(net, adam(net))
        test = run.loader(whole, global_batch=BATCH, train=False, micro_batch=2)
        in_worker = run.loader(Stream(), global_batch=BATCH, train=False, num_workers=1)
        train = run.loader(whole, global_batch=BATCH)
        equal = sum(test.examples for _ in test)
        for _ in run.epochs(EPOCHS):
            for batch in train:
                run.backward(loss_fn(model, batch))
                run.step(optimizer)
        number = len(test)
        shares = [test.examples for _ in test]
        assert number == len(shares)
        loss = paceline.evaluate(model, loss_fn, test, run=run)["loss"]
        predicted = run.predict(model, whole, global_batch=BATCH)
        own = torch.tensor([[equal, sum(shares), sum(in_worker.examples for _ in in_worker)]])
        everyone = run.gather(own)
        assert everyone.sum(0).tolist() == [len(whole)] * 3
        assert everyone[-1, 1] < everyone[-1, 0]
        assert everyone[-1, 2] == everyone[-1, 1]
        net.seconds = 0.0
        with torch.no_grad():
            inputs, targets = whole.tensors
            expected = net(inputs)
        assert (predicted - expected).abs().max() < 1e-12
        assert abs(loss - F.mse_loss(expected, targets)) < 1e-12


@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.ranks(2, full=3)
def test_reproducible_gives_the_same_bits_from_shards_by_speed(micro_batch: int | None) -> None:
    model, sizes = balanced(reproducible=8, micro_batch=micro_batch)
    expect_shares(sizes)
    with started(reproducible=8, progress="off") as run:
        equal = Net()
        equal.seconds = 0.0
        prepared, optimizer = run.prepare(equal, adam(equal))
        loader = run.loader(data(), global_batch=BATCH, micro_batch=micro_batch)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.backward(loss_fn(prepared, batch))
                run.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), equal.parameters(), strict=True))
    assert difference(model, plainly()) < 1e-12


@pytest.mark.ranks(2)
def test_reproducible_with_batch_norm_over_the_global_batch_is_refused() -> None:
    net = Net(norm=True)
    with started(balance=True, reproducible=4, progress="off") as run:
        with pytest.raises(SettingError, match="balance=True with reproducible=4: the model has batch norm"):
            run.prepare(net, adam(net))


class Stream(IterableDataset[Any]):
    """The same examples as a stream."""

    def __iter__(self) -> Any:
        return iter(data())


@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.ranks(2)
def test_a_stream_is_balanced_without_a_worker_and_is_said_not_to_be_with_one() -> None:
    model, sizes = balanced(Stream())
    expect_shares(sizes)
    assert difference(model, plainly()) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("paceline.data.sources.warn", said.append)
        model, sizes = balanced(Stream(), num_workers=1)
    assert {own for own, _ in sizes} == {BATCH // 2, 4}
    assert difference(model, plainly()) < 1e-12
    if torch.distributed.get_rank() == 0:
        assert any("balance=True has no effect on this loader" in line for line in said)


@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.ranks(2)
def test_noise_by_example_does_not_depend_on_the_shares() -> None:
    """Dropout on processes of unequal speed, against the same run without balance."""

    class Dropping(Net):
        def __init__(self, slow: bool) -> None:
            super().__init__(slow)
            self.layers.append(nn.Dropout(0.5))

    def train(balance: bool) -> dict[str, Tensor]:
        with on_set_clock(), started(balance=balance, progress="off", noise="example") as run:
            net = Dropping(run.rank == 1)
            model, optimizer = run.prepare(net, adam(net))
            loader = run.loader(data(), global_batch=BATCH)
            for _ in run.epochs(2):
                for batch in loader:
                    run.backward(loss_fn(model, batch))
                    run.step(optimizer)
            return net.state_dict()

    one, other = train(True), train(False)
    assert max((one[name] - value).abs().max().item() for name, value in other.items()) < 1e-12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["local_sgd:every=4", "diloco:every=8"])
@pytest.mark.conformance
@pytest.mark.ranks(2)
def test_independent_replicas_train_on_shares_by_speed(strategy: str) -> None:
    model, sizes = balanced(strategy=strategy)
    expect_shares(sizes)
    copies = [torch.empty_like(p) for p in model.parameters()]
    for p, copy in zip(model.parameters(), copies, strict=True):
        torch.distributed.broadcast(copy.copy_(p.detach()), 0)
        assert p.isfinite().all()


@pytest.mark.ranks(2)
def test_a_strategy_that_cannot_is_refused() -> None:
    with pytest.raises(SettingError, match=r"balance=True with strategy tensor.*Use ddp, fsdp"):
        paceline.start(device="cpu", strategy="tensor", balance=True, progress="off")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_norm": "shard"}, "balance=True and batch_norm='shard' contradict"),
        ({"balance": 3}, "balance=3: must be True or False"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        paceline.start(device="cpu", **{"balance": True, **settings})


SCRIPT = """
import torch, paceline
from torch import nn

run = paceline.start(device="cpu", seed=3, progress="off"{more})
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2)).double()
x, y = (torch.randn(200, n, generator=g, dtype=torch.float64) for n in (6, 2))
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=20)
for epoch in run.epochs(1):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        run.backward({loss})
        run.step(optimizer)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "noise", [pytest.param("shard", marks=pytest.mark.conformance), pytest.param("example", marks=pytest.mark.full)]
)
def test_verify_checks_shards_of_unequal_size(tmp_path: Path, noise: str) -> None:
    done = verify(tmp_path, "loss", f', noise="{noise}"', "--balance")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("set_by", [("", "--balance"), (", balance=True",)], ids=["option", "script"])
def test_verify_finds_a_factor_that_is_right_only_for_shards_of_equal_size(
    tmp_path: Path, set_by: tuple[str, ...]
) -> None:
    done = verify(tmp_path, "loss * len(batch[0]) * run.world_size / 20", *set_by)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different" in done.stdout


@pytest.mark.conformance
def test_verify_refuses_a_strategy_as_a_run_does(tmp_path: Path) -> None:
    done = verify(tmp_path, "loss", "", "--balance", "--strategy", "pipeline")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "balance=True with strategy pipeline: it does not split a global batch by speed." in done.stdout


def verify(folder: Path, loss: str, more: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(more=more, loss=loss))
    line = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", *options, str(script)]
    return subprocess.run(line, capture_output=True, text=True, timeout=240)
