"""local_sgd and diloco on one process, their options, their fragments. On several: test_local_sgd_and_diloco.py."""

from __future__ import annotations

import pytest
import torch
from tests.strategies import checks

import paceline
from paceline.config import parse_strategy
from paceline.errors import SettingError
from paceline.strategies import make
from paceline.strategies.periodic.periodic_averaging import split
from paceline.world import World


def test_local_sgd_on_one_process_is_plain_pytorch() -> None:
    for adam in (False, True):
        trained = checks.under_paceline(checks.Net, checks.both_heads, adam=adam, strategy="local_sgd:every=3")
        assert checks.difference(trained, checks.plainly(checks.Net, checks.both_heads, adam=adam)) == 0.0


def test_diloco_on_one_process_looks_ahead() -> None:
    """The inner optimizer's steps, and every third step an outer one."""
    trained = checks.under_paceline(checks.Net, checks.both_heads, strategy="diloco:every=3,outer_lr=0.5")
    plain, inner = checks.make(checks.Net, False)
    shared = [p.detach().clone() for p in plain.parameters()]
    outer = torch.optim.SGD(shared, lr=0.5, momentum=0.9, nesterov=True)
    starts = [start for _ in range(checks.EPOCHS) for start in range(0, checks.N, checks.BATCH)]
    for step, start in enumerate(starts, start=1):
        batch = [t[start : start + checks.BATCH] for t in (checks.X, checks.TOKENS, checks.Y)]
        checks.both_heads(plain, batch).backward()
        inner.step()
        inner.zero_grad()
        if step % 3 == 0:
            for own, p in zip(shared, plain.parameters(), strict=True):
                own.grad = own - p.detach()
            outer.step()
            with torch.no_grad():
                for own, p in zip(shared, plain.parameters(), strict=True):
                    p.copy_(own)
    checks.same(trained, plain, 1e-12)


def test_the_start_says_that_the_mathematics_is_another(capfd: pytest.CaptureFixture[str]) -> None:
    checks.under_paceline(checks.Net, checks.both_heads, strategy="diloco", progress="off")
    assert capfd.readouterr().err.count("strategy diloco changes the mathematics on purpose") == 1


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("local_sgd:every=0", "every=0: use a whole number of at least 1"),
        ("local_sgd:every=2.5", "every='2.5': use a whole number"),
        ("local_sgd:warmup=-1", "warmup=-1: use a whole number of at least 0"),
        ("local_sgd:average=true", "has no option 'average'. Did you mean 'average_state'"),
        ("diloco:every=0", "every=0: use a whole number"),
        ("diloco:outer_lr=0", "outer_lr=0.0: use a learning rate above 0"),
        ("diloco:outer_lr=nan", "outer_lr=nan: use a learning rate above 0"),
        ("diloco:outer_momentum=1", "outer_momentum=1.0: use a number of at least 0 and below 1"),
        ("diloco:every=4,fragments=5", "fragments=5 with every=4"),
        ("diloco:fragments=0", "fragments=0: use a whole number of at least 1"),
        ("diloco:delay=-1", "delay=-1: use a whole number of at least 0"),
        ("diloco:every=4,delay=4", "delay=4 with every=4"),
        ("diloco:every=1,delay=1", "delay=1 with every=1"),
        ("diloco:delay=2,mix=1", "mix=1.0: use a number of at least 0 and below 1"),
        ("diloco:mix=nan,delay=2", "mix=nan: use a number of at least 0 and below 1"),
        ("diloco:mix=0.2", "mix=0.2 without delay"),
        ("diloco:delay=2,average_state=true", "average_state=true with delay=2"),
    ],
)
def test_options_that_cannot_be(strategy: str, message: str) -> None:
    world = World(0, 2, 0, 2, 0, 1, "start()")
    with pytest.raises(SettingError) as error:
        make(parse_strategy(strategy), world, torch.device("cpu"))
    assert message in str(error.value)


def test_sparse_gradients_are_refused_where_gradients_are_averaged() -> None:
    def sparse() -> torch.nn.Module:
        return checks.Net(sparse=True)

    with pytest.raises(paceline.errors.ModelError, match="warmup=0"):
        checks.under_paceline(sparse, checks.both_heads, strategy="local_sgd:warmup=2")


def test_fragments_are_about_equally_large_and_in_order() -> None:
    parameters = [torch.zeros(n) for n in (5, 5, 1, 40, 9, 10, 10)]
    for count in range(1, 7):
        runs = split(parameters, count)
        assert len(runs) == count
        assert [id(p) for run in runs for p in run] == [id(p) for p in parameters]
        assert max(sum(p.numel() for p in run) for run in runs) <= 80 / count + 40
