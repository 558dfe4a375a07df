"""Replicas on threads: sums, order, turns, errors, and what a thread sees of its caller. Processes:
test_collectives_on_ranks.py."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.comm import mesh
from paceline.comm.group import ALONE, Group
from paceline.comm.mesh import replicas_here as current
from paceline.comm.replicas import differentiable_sum
from paceline.comm.threads import ThreadTeam
from paceline.errors import ModelError, SettingError, UsageError

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(params=[False, True], ids=["free", "turns"])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    before = threading.active_count()
    with contextlib.closing(ThreadTeam(3, take_turns=request.param)) as team:
        yield team
    assert threading.active_count() == before, "closing leaves no thread"


def test_alone_and_the_default() -> None:
    assert (current().size, current().rank) == (1, 0)
    tensor = torch.ones(2, requires_grad=True)
    total = current().sum(tensor)
    assert total.data_ptr() != tensor.data_ptr()
    assert not total.requires_grad
    one, other = ALONE, Group(None)
    assert (other.size, other.rank) == (1, 0)
    with mesh.current().computing(one):
        with mesh.current().computing(other):
            assert current() is other
            seen = []
            thread = threading.Thread(target=lambda: seen.append(current()))
            thread.start()
            thread.join()
            assert seen == [other], "a thread that is no replica's sees what the process computes"
        assert current() is one


def test_sums_in_the_order_of_the_replicas(team: ThreadTeam) -> None:
    """In float32 (1 + 1e8) - 1e8 is 0 and 1 + (1e8 - 1e8) is 1: the order shows, whoever comes last."""
    values = [1.0, 1e8, -1e8]

    def one(rank: int) -> Callable[[], list[float]]:
        def function() -> list[float]:
            found = []
            for late in range(3):
                time.sleep(0.02 * (late == rank))
                own = torch.tensor([values[rank]])
                total = current().sum(own)
                assert own.item() == values[rank]
                own.zero_()  # the others have theirs already
                found.append(total.item())
                total += 1  # a tensor of one's own
            return found

        return function

    assert team.run([one(rank) for rank in range(3)]) == [[0.0] * 3] * 3
    assert current().size == 1


def test_many_runs_many_rounds(team: ThreadTeam) -> None:
    def function() -> list[int]:
        return [int(current().sum(torch.tensor(current().rank + n))) for n in range(30)]

    for _ in range(5):
        assert team.run([function] * 3) == [[3 + 3 * n for n in range(30)]] * 3


def test_differentiable_sum_in_threads(team: ThreadTeam) -> None:
    xs = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)

    def one(rank: int) -> Callable[[], Tensor]:
        def function() -> Tensor:
            x = xs[rank].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(differentiable_sum(x**3, current()) ** 2, x, create_graph=True)
            return torch.autograd.grad(gradient, x)[0]

        return function

    whole = xs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(3 * (whole**3).sum() ** 2, whole, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), whole)
    torch.testing.assert_close(torch.stack(team.run([one(rank) for rank in range(3)])), second, rtol=1e-13, atol=0)


def test_the_first_error_wins_and_nobody_hangs(team: ThreadTeam) -> None:
    def function() -> None:
        current().sum(torch.zeros(1))
        if current().rank == 1:
            raise KeyError("mine")
        current().sum(torch.zeros(1))

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            team.run([function] * 3)
    assert current().size == 1
    assert team.run([lambda: current().rank] * 3) == [0, 1, 2], "and the team still works"


@pytest.mark.parametrize("fewer", [0, 1, 2])
def test_a_replica_that_sums_less_often(team: ThreadTeam, fewer: int) -> None:
    def function() -> None:
        for _ in range(2 - (current().rank == fewer)):
            current().sum(torch.zeros(1))

    with pytest.raises(ModelError, match="out of step"):
        team.run([function] * 3)


def test_tensors_of_different_shapes(team: ThreadTeam) -> None:
    with pytest.raises(ModelError, match=r"shapes \(1,\), \(2,\), \(3,\)"):
        team.run([lambda: current().sum(torch.zeros(current().rank + 1))] * 3)


def test_each_replica_draws_its_own_stream_with_turns() -> None:
    """As in processes of their own: dropout before and after a sum, while the others draw in between."""

    def draws(rank: int, meet: Callable[[], object]) -> Callable[[], list[Tensor]]:
        def function() -> list[Tensor]:
            torch.default_generator.manual_seed(100 + rank)
            found = []
            for _ in range(4):
                found += [torch.randn(3 + rank), F.dropout(torch.ones(9), 0.5)]
                meet()
            return found

        return function

    expected = [draws(rank, lambda: None)() for rank in range(3)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with contextlib.closing(ThreadTeam(3, take_turns=True)) as team:
        found = team.run([draws(rank, lambda: current().sum(torch.zeros(1))) for rank in range(3)])
        for own, wanted in zip(found, expected):
            assert all(torch.equal(a, b) for a, b in zip(own, wanted))
        draws(0, lambda: None)()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        team.run([draws(rank, lambda: current().sum(torch.zeros(1))) for rank in range(3)])
        assert torch.equal(torch.get_rng_state(), after), "the caller goes on as replica 0 does"
        starts = team.run([lambda: torch.rand(1).item()] * 3)
        assert len(set(starts)) == 1, "all begin with the caller's state"


def test_only_one_runs_with_turns() -> None:
    running: list[int] = []
    worst = []

    def function() -> None:
        for _ in range(3):
            running.append(1)
            time.sleep(0.005)
            worst.append(len(running))
            running.pop()
            current().sum(torch.zeros(1))

    with contextlib.closing(ThreadTeam(3, take_turns=True)) as team:
        team.run([function] * 3)
    assert max(worst) == 1
    with contextlib.closing(ThreadTeam(3)) as team:
        team.run([function] * 3)
    assert max(worst) == 3, "and without turns they overlap"


WORD = contextvars.ContextVar("WORD", default="none")


def test_threads_see_their_callers_surroundings(team: ThreadTeam) -> None:
    def function() -> tuple[object, ...]:
        product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        return product.requires_grad, product.dtype, product.is_inference(), WORD.get()

    token = WORD.set("set")
    try:
        assert team.run([function] * 3) == [(True, torch.float32, False, "set")] * 3
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert team.run([function] * 3) == [(False, torch.bfloat16, False, "set")] * 3
        with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode():
            assert team.run([function] * 3) == [(False, torch.float16, True, "set")] * 3
    finally:
        WORD.reset(token)
    assert team.run([function] * 3) == [(True, torch.float32, False, "none")] * 3


def test_a_thread_that_is_no_replica_is_refused(team: ThreadTeam) -> None:
    def function() -> str:
        seen = []

        def stray() -> None:
            try:
                seen.append(str(current().size))
            except UsageError as error:
                seen.append(str(error))

        thread = threading.Thread(target=stray)
        thread.start()
        thread.join()
        return seen[0]

    assert all("belongs to no replica" in text for text in team.run([function] * 3))


def test_wrong_use(team: ThreadTeam) -> None:
    with pytest.raises(UsageError, match="2 functions for 3 replicas"):
        team.run([lambda: None] * 2)
    with pytest.raises(UsageError, match="while the team is running"):
        team.run([lambda: team.run([lambda: None] * 3)] * 3)
    with pytest.raises(SettingError, match="size=0"):
        ThreadTeam(0)
    team.close()
    team.close()
    with pytest.raises(UsageError, match="after close"):
        team.run([lambda: None] * 3)


def test_results_do_not_outlive_the_run(team: ThreadTeam) -> None:
    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    captured = Big()
    team.run([lambda big=captured: current().sum(torch.zeros(1)) is big] * 3)
    del captured
    gc.collect()
    deadline = time.monotonic() + 30
    while Big.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Big.alive == 0


def test_a_forgotten_team_ends_its_threads() -> None:
    before = threading.active_count()
    team = ThreadTeam(2)
    team.run([lambda: None] * 2)
    del team
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
