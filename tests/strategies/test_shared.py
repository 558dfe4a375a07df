"""shared: one copy of the weights for the processes of a machine, what each may do to it, and what is left of it."""

from __future__ import annotations

import copy
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies import checks
from tests.strategies.checks import BATCH, EPOCHS, TOKENS, N, X, Y
from torch import Tensor, nn

import paceline
from paceline.comm import copied_pages, shared_memory
from paceline.config import parse_strategy
from paceline.errors import ModelError, NonFiniteError, SettingError, UsageError
from paceline.run import Run
from paceline.strategies import make
from paceline.strategies.replicated.slice_updates import ELEMENTWISE
from paceline.world import World

pytestmark = pytest.mark.timeout(200)
shared: Any = partial(checks.started, strategy="shared", progress="off")
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def built(make_model: Callable[[], nn.Module], optimizer: Optimizers) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make_model().double()
    return model, optimizer(model)


class Ours:
    """A run, with its model and optimizer prepared, and its loader."""

    def __init__(self, run: Run, make_model: Callable[[], nn.Module], optimizer: Optimizers) -> None:
        self.run = run
        self.model, self.optimizer = run.prepare(*built(make_model, optimizer))
        self.loader = run.loader(checks.data(), global_batch=BATCH)

    def batches(self) -> Iterator[list[Tensor]]:
        for _ in self.run.epochs(EPOCHS):
            yield from self.loader


def each_batch() -> Iterator[list[Tensor]]:
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            yield [t[start : start + BATCH] for t in (X, TOKENS, Y)]


def compared(
    make_model: Callable[[], nn.Module] = checks.Net,
    optimizer: Optimizers = sgd,
    *,
    before: Callable[[nn.Module], None] | None = None,
    after: Callable[[nn.Module], None] | None = None,
    max_grad_norm: float | None = None,
    loss_fn: checks.Loss = checks.both_heads,
    tolerance: float = 1e-10,
    **settings: Any,
) -> None:
    """Trains under shared and in plain PyTorch. before, after: called with the model, before and after each update."""
    plain, its = built(make_model, optimizer)
    for batch in each_batch():
        loss_fn(plain, batch).backward()
        if before is not None:
            before(plain)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
        its.step()
        if after is not None:
            after(plain)
        its.zero_grad()
    with shared(**settings) as run:
        ours = Ours(run, make_model, optimizer)
        for batch in ours.batches():
            run.backward(loss_fn(ours.model, batch))
            if before is not None:
                before(ours.model)
            run.step(ours.optimizer, max_grad_norm=max_grad_norm)
            if after is not None:
                after(ours.model)
        checks.same(ours.model, plain, tolerance)


@contextmanager
def copies_of_weights(run: Run) -> Iterator[Callable[[], int]]:
    """How many pages of weights this process has copies of."""
    arena: Any = run._strategy._arena  # type: ignore[attr-defined]
    yield lambda: sum(len(segment.copied_weights.numbers()) for segment in arena._segments)


# --- the mathematics


@pytest.mark.ranks(2, full=(3, 4))
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("adam", [False, True])
def test_the_weights_are_those_of_plain_pytorch(adam: bool, micro: int | None) -> None:
    for closure in (True, False):
        found = checks.under_paceline(
            checks.Net, checks.both_heads, adam=adam, closure=closure, micro=micro, strategy="shared", progress="off"
        )
        checks.same(found, checks.plainly(checks.Net, checks.both_heads, adam=adam))


OPTIMIZERS: dict[str, Optimizers] = {
    kind.__name__: lambda model, kind=kind: kind(model.parameters(), lr=0.01)  # type: ignore[misc]
    for kind in ELEMENTWISE
} | {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "fused SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "maximize": lambda model: torch.optim.Adam(model.parameters(), lr=0.001, maximize=True, weight_decay=0.1),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
            {"params": [p for p in model.parameters() if p.dim() > 1]},
        ],
        lr=0.01,
    ),
    "Lamb": lambda model: Lamb(model.parameters(), lr=0.01),  # looks at whole tensors
}


class Lamb(torch.optim.SGD):
    """The update is as long as the parameter, as in LAMB."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)) * group["lr"])


@pytest.mark.ranks(2, full=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_makes_its_own_update(name: str) -> None:
    compared(optimizer=OPTIMIZERS[name], tolerance=1e-8 if name == "Rprop" else 1e-10)


@pytest.mark.ranks(2)
def test_an_optimizer_that_torch_cannot_compute_on_slices_is_refused_by_name() -> None:
    with shared() as run:
        ours = Ours(run, checks.Net, lambda model: torch.optim.Adafactor(model.parameters()))
        for batch in ours.loader:
            run.backward(checks.both_heads(ours.model, batch))
            words = ("strategy shared: Adafactor", "AdamW", "strategy='ddp'")
            checks.named(lambda: run.step(ours.optimizer), UsageError, *words)
            break


class Odd(nn.Module):
    """A scalar, tied weights, a frozen one, a buffer, one that no loss reaches, one that is alone in its dtype, and
    a filter in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 1))
        self.frozen = nn.Parameter(torch.full((3, 7), 0.3), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(5))
        self.count = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.register_buffer("offset", torch.full((24,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 1, 1, 6)).flatten(1) + self.frozen.sum()
        return self.second(self.first(x).tanh() + self.offset)[:, :3] * self.scale + self.shift * self.count.sum()


def odd_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


@pytest.mark.ranks(2, full=(3, 4))
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_odd_parameters_are_trained_as_they_are_alone(optimizer: Optimizers) -> None:
    def trainable(model: nn.Module) -> torch.optim.Optimizer:
        made = optimizer(model)
        made.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        return made

    compared(Odd, trainable, loss_fn=odd_loss, tolerance=1e-8)
    compared(Odd, trainable, loss_fn=odd_loss, tolerance=1e-8, max_grad_norm=0.05)


@pytest.mark.ranks(2, full=3)
def test_clipping_goes_by_the_norm_of_all_slices() -> None:
    compared(max_grad_norm=0.1)


@pytest.mark.ranks(2, full=3)
def test_weights_of_16_bits_are_alike_and_near_those_of_ddp() -> None:
    def half() -> nn.Module:
        return checks.layers().to(torch.bfloat16)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[2])

    ends = []
    for strategy in ("shared", "ddp"):
        with checks.started(strategy=strategy, progress="off") as run:
            torch.manual_seed(0)
            model = half()
            model, optimizer = run.prepare(model, adamw(model))
            for batch in run.loader(checks.data(), global_batch=BATCH):
                run.backward(loss_fn(model, batch))
                run.step(optimizer)
        ends.append(model)
    checks.same(ends[0], ends[1], 2e-2)


@pytest.mark.ranks(2, full=3)
def test_ranks_that_reach_different_parameters_add_zeros() -> None:
    found = checks.under_paceline(checks.Net, checks.by_data, closure=False, strategy="shared", progress="off")
    checks.same(found, checks.plainly(checks.Net, checks.by_data))


@pytest.mark.ranks(2)
def test_parameters_are_frozen_unfrozen_and_added_in_the_middle() -> None:
    def trained(run: Run | None) -> nn.Module:
        torch.manual_seed(0)
        model = checks.layers().double()
        optimizer = sgd(model)
        if run is not None:
            run.prepare(model, optimizer)
            batches: Any = iter(run.loader(checks.data(), global_batch=BATCH))
        else:
            batches = each_batch()
        for number in range(5):
            if number == 2:
                model[0].requires_grad_(False)
            if number == 3:
                model[0].requires_grad_(True)
                torch.manual_seed(1)
                model.append(nn.Linear(3, 3).double())
                optimizer.add_param_group({"params": list(model[-1].parameters())})
                if run is not None:
                    run.prepare(model)
            loss = checks.sequential_loss(model, next(batches))
            if run is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                run.backward(loss)
                run.step(optimizer)
        return model

    with shared() as run:
        found = trained(run)
    checks.same(found, trained(None))


@pytest.mark.ranks(2)
def test_two_losses_of_two_optimizers_have_their_own_gradients() -> None:
    def parts(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        spare = list(model.spare.parameters())
        others = [p for p in model.parameters() if all(p is not q for q in spare)]
        return torch.optim.AdamW(others, lr=0.01), torch.optim.SGD(spare, lr=0.1)

    def spare_loss(model: Any, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model.spare(model.features(*batch[:2])), batch[2])

    torch.manual_seed(0)
    plain: nn.Module = checks.Net().double()
    for optimizer, batch in ((o, b) for optimizers in [parts(plain)] for b in each_batch() for o in optimizers):
        plain.zero_grad()
        loss_fn = checks.one_head if isinstance(optimizer, torch.optim.AdamW) else spare_loss
        loss_fn(plain, batch).backward()
        optimizer.step()
    with shared() as run:
        torch.manual_seed(0)
        model = checks.Net().double()
        model, one, other = run.prepare(model, *parts(model))
        loader = run.loader(checks.data(), global_batch=BATCH)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.backward(checks.one_head(model, batch), optimizer=one)
                run.step(one)
                run.backward(spare_loss(model, batch), optimizer=other)
                run.step(other)
        checks.same(model, plain)


# --- what a script does to its model


@pytest.mark.ranks(2, full=3)
@pytest.mark.parametrize("late", [None, 0, 1])
def test_what_a_script_does_to_weights_is_done_once(late: int | None) -> None:
    """By ways that autograd counts and by ways that it does not; also where one rank is late."""

    def clamped(model: nn.Module) -> None:
        if dist.get_rank() == late:
            time.sleep(0.01)
        for p in model.parameters():
            p.data.mul_(0.9)
        with torch.no_grad():
            next(iter(model.parameters())).add_(0.01)

    compared(after=clamped)
    compared(optimizer=adamw, after=clamped)


@pytest.mark.ranks(2)
def test_weights_that_lie_elsewhere_come_back() -> None:
    """vector_to_parameters makes each parameter a view of the vector."""

    def shrunk(model: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.9 * vector.detach(), model.parameters())

    compared(after=shrunk)


@pytest.mark.ranks(2, full=3)
def test_an_average_is_swapped_in_and_out_by_ranks_that_are_not_in_step() -> None:
    """As an EMA is for an evaluation: nobody sees another's swap."""
    with shared() as run, copies_of_weights(run) as copies:
        ours = Ours(run, checks.Net, adamw)
        average = copy.deepcopy(ours.model)
        for number, batch in enumerate(ours.batches()):
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
            if number % 3 == run.rank:
                time.sleep(0.02)
            kept = copy.deepcopy(ours.model.state_dict())
            ours.model.load_state_dict(average.state_dict())
            time.sleep(0.005)
            assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), average.parameters(), strict=True))
            ours.model.load_state_dict(kept)
            assert copies()
        ours.run._strategy._follow()  # type: ignore[attr-defined]
        assert not copies()
    checks.same(ours.model, checks.plainly(checks.Net, checks.both_heads, adam=True))


@pytest.mark.ranks(2)
def test_weights_that_some_ranks_alone_change_are_named() -> None:
    for change in (1.0, None):
        with shared() as run:
            ours = Ours(run, checks.Net, sgd)
            for number, batch in enumerate(ours.loader):
                run.backward(checks.both_heads(ours.model, batch))
                if number == 2:
                    if run.rank == 1 or change is None:
                        ours.model.head.weight.data.add_(change or 1.0 + run.rank)
                    words = ("head.weight", "before an update", "on some")
                    checks.named(partial(run.step, ours.optimizer), ModelError, *words)
                    break
                run.step(ours.optimizer)
    with shared() as run:
        ours = Ours(run, checks.Net, sgd)
        if run.rank == 1:
            ours.model.head.weight.data.add_(1.0)
        for batch in ours.loader:
            loss = checks.both_heads(ours.model, batch)
            checks.named(partial(run.backward, loss), ModelError, "head.weight", "before the first step")
            break


@pytest.mark.ranks(2)
def test_one_rank_may_swap_weights_for_an_evaluation_of_its_own() -> None:
    with shared() as run, copies_of_weights(run) as copies:
        ours = Ours(run, checks.Net, sgd)
        for batch in ours.batches():
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
            if run.main:
                kept = copy.deepcopy(ours.model.state_dict())
                for p in ours.model.parameters():
                    p.data.zero_()
                ours.model.load_state_dict(kept)
        run._strategy._follow()  # type: ignore[attr-defined]
        assert not copies()
    checks.same(ours.model, checks.plainly(checks.Net, checks.both_heads))


@pytest.mark.ranks(2, full=3)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_what_a_script_does_to_gradients_is_done_once(clip: float | None) -> None:
    def halved(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.5)

    compared(before=halved, max_grad_norm=clip)
    compared(before=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None, max_grad_norm=clip)


@pytest.mark.ranks(2)
def test_every_rank_sees_the_whole_gradient_and_hooks_see_whole_weights() -> None:
    plain, its = built(checks.Net, adamw)
    seen: dict[str, list[Any]] = {"ours": [], "plain": []}

    def hooked(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> None:
        def note(*_: Any) -> None:
            total = sum(p.detach().double().sum() for p in model.parameters())
            grads = sum(p.grad.double().sum() for p in model.parameters() if p.grad is not None)
            seen[key].append([float(total), float(grads)])

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)

    hooked(plain, its, "plain")
    for batch in each_batch():
        its.zero_grad()
        checks.both_heads(plain, batch).backward()
        its.step()
    with shared() as run:
        ours = Ours(run, checks.Net, adamw)
        hooked(ours.model, ours.optimizer, "ours")
        for batch in ours.batches():
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
    torch.testing.assert_close(torch.tensor(seen["ours"]), torch.tensor(seen["plain"]), rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
def test_an_update_by_hand_needs_no_run_step() -> None:
    plain, _ = built(checks.Net, sgd)
    for batch in each_batch():
        checks.both_heads(plain, batch).backward()
        for p in plain.parameters():
            p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
            p.grad = None
    with shared() as run:
        torch.manual_seed(0)
        model = run.prepare(checks.Net().double())
        loader = run.loader(checks.data(), global_batch=BATCH)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.backward(checks.both_heads(model, batch))
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-0.1)
                    p.grad = None
        checks.same(model, plain)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_is_told_by_all_or_skipped() -> None:
    def poisoned(model: Any, batch: list[Tensor], number: int) -> Tensor:
        factor = float("nan") if number == 2 and dist.get_rank() == 1 else 1.0
        return checks.both_heads(model, batch) * factor

    with shared() as run:
        ours = Ours(run, checks.Net, sgd)
        for number, batch in enumerate(ours.loader):
            run.backward(poisoned(ours.model, batch, number))
            if number == 2:
                checks.named(lambda: run.step(ours.optimizer), NonFiniteError, "rank 1")
                break
            run.step(ours.optimizer)
    with shared(nonfinite="skip") as run:
        ours = Ours(run, checks.Net, sgd)
        for number, batch in enumerate(ours.loader):
            run.backward(poisoned(ours.model, batch, number))
            run.step(ours.optimizer)
        assert run.skipped == 1
        assert all(bool(p.isfinite().all()) for p in ours.model.parameters())


# --- state


@pytest.mark.ranks(2, full=3)
def test_an_optimizers_own_state_goes_out_and_in_again() -> None:
    """And a checkpoint in the middle changes nothing."""
    plain, its = built(checks.Net, adamw)
    with shared() as run:
        ours = Ours(run, checks.Net, adamw)
        for batch, own in zip(ours.batches(), each_batch(), strict=True):
            checks.both_heads(plain, own).backward()
            its.step()
            its.zero_grad()
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
            state = ours.optimizer.state_dict()
            moments = [values["exp_avg"] for values in state["state"].values()]
            whole = [values["exp_avg"] for values in its.state_dict()["state"].values()]
            for one, other in zip(moments, whole, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-9, atol=1e-12)
            ours.optimizer.load_state_dict(state)
            run._strategy.state_dict()
        checks.same(ours.model, plain)


@pytest.mark.ranks(2)
def test_a_restored_run_has_the_same_bits_and_no_copies(tmp_path: Path) -> None:
    def steps(run: Run, ours: Ours, count: int) -> None:
        for batch in ours.loader:
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
            if run.steps == count:
                return

    with shared() as run:
        ours = Ours(run, checks.Net, adamw)
        steps(run, ours, 2)
        run.save(tmp_path)
        steps(run, ours, 4)
    with shared() as run, copies_of_weights(run) as copies:
        again = Ours(run, checks.Net, adamw)
        run.restore(tmp_path)
        assert not copies()
        steps(run, again, 4)
    checks.same(again.model, ours.model, 0.0)


@pytest.mark.ranks(2)
def test_there_is_one_copy_of_the_weights() -> None:
    """What one process writes into them the other reads, without any message."""
    with shared() as run, copies_of_weights(run) as copies:
        ours = Ours(run, checks.Net, adamw)
        for batch in ours.loader:
            run.backward(checks.both_heads(ours.model, batch))
            run.step(ours.optimizer)
            assert not copies()
        weights = run._strategy._arena.weights(ours.model.head.weight)  # type: ignore[attr-defined]
        if run.rank == 1:
            weights[2, 1] = 77.0
        dist.barrier()
        assert ours.model.head.weight[2, 1] == 77.0
        assert not copies()


# --- what it refuses, and its end


@pytest.mark.ranks(2)
@pytest.mark.parametrize("why", ["machines", "system", "pages", "device"])
def test_processes_that_cannot_share_are_refused_with_the_reason(why: str) -> None:
    rank, device = dist.get_rank(), torch.device("cpu")
    words = {"machines": "several machines", "system": "Linux on x86-64", "pages": "pagemap", "device": "needs CPUs"}
    with pytest.MonkeyPatch.context() as patch:
        if why == "machines":
            patch.setattr(socket, "gethostname", lambda: f"machine-{rank}")
        elif why == "system":
            patch.setattr(shared_memory, "supported", lambda: False)
        elif why == "pages":
            patch.setattr(copied_pages, "visible", lambda: False)
        else:
            device = torch.device("meta")
        world = World(rank, 2, rank, 2, 0, 1, "start()")
        with pytest.raises(SettingError, match=rf"{words[why]}.*'ddp'"):
            make(parse_strategy("shared"), world, device)


@pytest.mark.ranks(2)
def test_what_has_no_slices_is_refused() -> None:
    with shared() as run:
        model = nn.Embedding(9, 3, sparse=True)
        checks.named(lambda: run.prepare(model), ModelError, "strategy shared", "sparse=True", "'ddp'")
    with shared() as run:
        ours = Ours(run, checks.layers, lambda model: torch.optim.LBFGS(model.parameters()))
        for batch in ours.loader:

            def again(batch: list[Tensor] = batch) -> Tensor:
                ours.optimizer.zero_grad()
                loss = checks.sequential_loss(ours.model, batch)
                run.backward(loss)
                return loss

            checks.named(partial(run.step, ours.optimizer, again), UsageError, "LBFGS", "--strategy ddp")
            break
    with shared() as run:
        ours = Ours(run, checks.layers, sgd)
        for batch in ours.loader:
            run.backward(checks.sequential_loss(ours.model, batch))
            ours.model.float()
            words = ("0.weight", "torch.float32", "before run.prepare")
            checks.named(lambda: run.step(ours.optimizer), ModelError, *words)
            break
    with pytest.raises(SettingError, match=r"reproducible=4 with strategy='shared'.*Set strategy='ddp'"):
        paceline.start(strategy="shared", reproducible=4, device="cpu")


@pytest.mark.ranks(2)
def test_nothing_is_left_when_runs_follow_each_other() -> None:
    me = psutil.Process()
    counts = []
    for _ in range(3):
        with shared() as run:
            ours = Ours(run, checks.Net, adamw)
            for batch in ours.loader:
                run.backward(checks.both_heads(ours.model, batch))
                run.step(ours.optimizer)
        del ours, run, batch
        gc.collect()
        counts.append((me.num_fds(), len(list(Path("/dev/shm").iterdir()))))
    assert counts[1] == counts[2]


SCRIPT = """
import os, time, torch, paceline
run = paceline.start(device="cpu", strategy="shared", progress="off")
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run.prepare(model, optimizer)
open(f"pid{run.rank}", "w").write(str(os.getpid()))
for batch in run.batches(lambda rows: torch.ones(len(rows), 1000), global_batch=4):
    run.forward_backward(lambda model, x: model(x).square().mean(), model, batch)
    run.step(optimizer)
    if run.steps == 20:
        open(f"ready{run.rank}", "w").close()
"""


@pytest.mark.conformance
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_process_is_killed_all_end_and_leave_nothing(rank: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = set(Path("/dev/shm").iterdir())
    # --output: without it, a failed run keeps what a rank has printed in TMPDIR, such as that another rank is gone
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "--output", "logs", "train.py"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{each}").exists() for each in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int((tmp_path / f"pid{each}").read_text()) for each in range(2)]
    os.kill(pids[rank], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert f"rank {rank} was killed by SIGKILL" in err
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not set(Path("/dev/shm").iterdir()) - before
    assert not [path for path in scratch.rglob("*") if path.is_socket() or "paceline" in path.name]
