"""Several replicas in one process follow their model: buffers, layers and numbers that change after `prepare`, weights
and gradients that a script writes to. And they refuse, in the closure, what would see one replica only."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies import checks
from torch import Tensor, nn

import paceline
from paceline.comm.tree_sums import ranges
from paceline.data.randomness import mix, tag
from paceline.errors import ModelError, SettingError, UsageError
from paceline.strategies.replicated.local_devices import devices_of

ONE = "data_parallel:devices=cpu,cpu,cpu"
STRATEGIES = [ONE, "mirrored:devices=cpu,cpu,cpu,reduction=ring", "central_storage:devices=cpu,cpu"]
SPREAD = ["data_parallel:devices=cpu,cpu,cpu reproducible=4", "mirrored:devices=cpu,cpu,cpu reproducible=5"]


def named(strategy: str) -> str:
    return re.sub(r":[^ ]*", "", strategy)


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
every_way = pytest.mark.parametrize("strategy", [*STRATEGIES, *SPREAD], ids=named)


def started(strategy: str, **settings: Any) -> AbstractContextManager[paceline.Run]:
    name, _, shards = strategy.partition(" reproducible=")
    return checks.started(strategy=name, reproducible=int(shards) if shards else None, **settings)


class Moving(nn.Module):
    """Assigns a new tensor to its buffer in each forward, of another shape in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = 1.0
        self.register_buffer("center", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x) * self.scale
        self.center = self.center.expand(3) * 0.9 + torch.tensor([0.1, 0.2, 0.3])
        return output - self.center


def train(model: nn.Module, change: Callable[[nn.Module, Any, int], None], strategy: str | None) -> nn.Module:
    """3 epochs, with `change` before each. Without a strategy, in plain PyTorch."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [[t[start : start + 5] for t in (checks.X, checks.TOKENS, checks.Y)] for start in range(0, checks.N, 5)]
    if strategy is None:
        for epoch in range(3):
            change(model, optimizer, epoch)
            for batch in batches:
                checks.sequential_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model
    with started(strategy) as run:
        run.prepare(model, optimizer)
        loader = run.loader(checks.data(), global_batch=5)
        for epoch in run.epochs(3):
            change(model, optimizer, epoch)
            if change is grown:
                run.prepare(model)
            for batch in loader:
                run.forward_backward(checks.sequential_loss, model, batch)
                run.step(optimizer)
    return model


def nothing(model: nn.Module, optimizer: Any, epoch: int) -> None:
    return None


def rescaled(model: nn.Module, optimizer: Any, epoch: int) -> None:
    model.scale = 1.0 / (1 + epoch)  # type: ignore[assignment]


def grown(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        torch.manual_seed(1)
        layer = nn.Linear(3, 3).double()
        model.append(layer)  # type: ignore[operator]
        optimizer.add_param_group({"params": layer.parameters()})


def extended(model: nn.Module, optimizer: Any, epoch: int) -> None:
    """By layers that nothing trains."""
    if epoch:
        layer = nn.Linear(3, 3, bias=False).double()
        nn.init.eye_(layer.weight)
        model.append(layer)  # type: ignore[operator]


def retied(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model[2].weight = model[0].weight  # type: ignore[operator, union-attr]


def replaced(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model[1] = nn.ReLU()  # type: ignore[operator]


def frozen(model: nn.Module, optimizer: Any, epoch: int) -> None:
    model[0].requires_grad_(epoch != 1)  # type: ignore[operator]


def clamped(model: nn.Module, optimizer: Any, epoch: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)


def loaded(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()})


def swapped(model: nn.Module, optimizer: Any, epoch: int) -> None:
    """As an average of weights is put in place for an evaluation."""
    for p in model.parameters():
        p.data = p.data.clone() * 1.1


def faster(model: nn.Module, optimizer: Any, epoch: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.05 / (1 + epoch)


def hooked(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model[0].weight.register_hook(lambda grad: grad * 0.1)  # type: ignore[operator, union-attr]


def regularised(model: nn.Module, optimizer: Any, epoch: int) -> None:
    """By hooks around the update, of which one changes gradients and one weights."""

    def before(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(p, alpha=0.1)

    def after(*_: Any) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)  # type: ignore[operator, union-attr]

    if epoch == 1:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def forgetful(model: nn.Module, optimizer: Any, epoch: int) -> None:
    """A state that the script loads itself."""
    if epoch == 2:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@every_way
@pytest.mark.parametrize(
    ("build", "change"),
    [
        (Moving, nothing),
        (Moving, rescaled),
        (mlp, grown),
        (mlp, extended),
        (mlp, replaced),
        (mlp, frozen),
        (mlp, clamped),
        (mlp, loaded),
        (mlp, swapped),
        (mlp, faster),
        (mlp, hooked),
        (mlp, regularised),
        (mlp, forgetful),
        (square, retied),
    ],
    ids=lambda thing: thing.__name__,
)
def test_copies_follow_a_model_that_changes(build: Callable[[], nn.Module], change: Any, strategy: str) -> None:
    torch.manual_seed(0)
    model, plain = build(), build()
    plain.load_state_dict(model.state_dict())
    if build is Moving and "reproducible" in strategy:
        with pytest.raises(ModelError, match=r"Moving \(Moving\) changes a buffer"):
            train(model, change, strategy)
        return
    checks.same(train(model, change, strategy), train(plain, change, None))


@every_way
def test_a_forward_over_one_optimizers_parameters(strategy: str) -> None:
    """The copies of given parameters are found too."""

    def trained(strategy: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp().double()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[operator]
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[operator]
        with started(strategy) as run:
            run.prepare(model, first, second)
            for batch in run.loader(checks.data(), global_batch=5):
                for optimizer in (first, second):
                    run.forward_backward(checks.sequential_loss, model, batch, optimizer=optimizer)
                    run.step(optimizer)
        return model

    checks.same(trained(strategy), trained("single"))


@pytest.mark.parametrize(
    "call",
    [
        lambda run, x: run.gather(x),
        lambda run, x: run.gather([1]),
        lambda run, x: run.sum(1),
        lambda run, x: run.mean(x),
        lambda run, x: run.ratio(1, 2),
    ],
)
def test_what_would_see_one_replica_is_refused_in_the_closure(call: Callable[[paceline.Run, Tensor], Any]) -> None:
    """`run.world.rank` is 0 in each replica, so that a script could not find its rows in what was gathered either."""
    with checks.started(strategy=ONE) as run:
        model = mlp().double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            call(run, batch[0])
            return F.cross_entropy(model(batch[0]), batch[2])

        for batch in run.loader(checks.data(), global_batch=6):
            with pytest.raises(UsageError, match=r"run\.gather.* in the loss function.*--strategy ddp"):
                run.forward_backward(loss_fn, model, batch)
            break
        assert call(run, checks.X) is not None, "and outside it is as ever"


def past_autograd(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    """3 steps, after each of which weights are clamped as old scripts do it."""
    loader = run.loader(checks.data(), global_batch=5)
    for batch in loader:
        run.forward_backward(checks.sequential_loss, model, batch)
        run.step(optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
        if loader.step == 2:
            break


@every_way
def test_writes_that_autograd_does_not_count_are_followed_or_named(strategy: str) -> None:
    def trained(strategy: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.05, fused=True
        )  # whose own writes are not counted either
        with started(strategy) as run:
            run.prepare(model, optimizer)
            past_autograd(run, model, optimizer)
        return model

    if strategy.startswith("mirrored"):
        with pytest.raises(ModelError, match=r"the replicas differ in 0\.weight, .* torch\.no_grad\(\): p\.clamp_"):
            trained(strategy)
    else:
        checks.same(trained(strategy), trained("single"))


def scaled(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 0.5


def replaced_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.clamp(-0.01, 0.01)


def dropped(model: nn.Module) -> None:
    model[0].zero_grad()  # type: ignore[operator]


@every_way
@pytest.mark.parametrize("change", [scaled, replaced_gradients, dropped], ids=lambda f: f.__name__)
def test_gradients_that_a_script_writes_to(change: Callable[[nn.Module], None], strategy: str) -> None:
    def trained(strategy: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with started(strategy) as run:
            run.prepare(model, optimizer)
            loader = run.loader(checks.data(), global_batch=10, micro_batch=2)
            for _ in run.epochs(2):
                for batch in loader:
                    run.forward_backward(checks.counted_loss, model, batch)
                    if loader.current is not None and loader.current.final:
                        change(model)
                    run.step(optimizer, max_grad_norm=0.05)
        return model

    checks.same(trained(strategy), trained("single"), 1e-8)


@every_way
def test_a_step_that_is_left_out_leaves_nothing_behind(strategy: str) -> None:
    """A gradient that is not finite, and a batch that the script itself drops."""

    def trained(strategy: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with started(strategy, nonfinite="skip") as run:
            run.prepare(model, optimizer)
            loader = run.loader(checks.data(), global_batch=5)
            for batch in loader:
                factor = float("inf") if loader.step == 1 else 1.0
                run.forward_backward(lambda m, b, f=factor: checks.sequential_loss(m, b) * f, model, batch)
                if loader.step == 2:
                    optimizer.zero_grad()
                    continue
                run.step(optimizer)
            assert (run.steps, run.skipped) == (3, 1)
        return model

    checks.same(trained(strategy), trained("single"))


@every_way
def test_an_error_in_one_replica_is_told_once_and_nothing_hangs(strategy: str) -> None:
    with started(strategy) as run:
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        rows = [checks.X[:5].tolist(), checks.X[5:10].tolist()]

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            if len(rows) > 1 and batch[0].tolist() == rows[0][-len(batch[0]) :]:  # the last shard's
                raise KeyError("planted")
            return checks.sequential_loss(model, batch)

        batches = iter(run.loader(checks.data(), global_batch=5))
        with pytest.raises(KeyError, match="planted") as caught:
            run.forward_backward(loss_fn, model, next(batches))
        if sys.version_info >= (3, 11):
            last = run._strategy.plan.shards - 1
            assert caught.value.__notes__ == [f"(in replica {last}, which computes on cpu)"]
        rows.clear()
        run.forward_backward(loss_fn, model, next(batches))
        assert run.step(optimizer), "a script that catches it can go on"


def test_replicas_out_of_step_are_named() -> None:
    with checks.started(strategy=ONE) as run:
        model = checks.Net(norm=True).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            twice = batch[0].tolist() == checks.X[:2].tolist()
            return sum(checks.one_head(model, batch) for _ in range(1 + twice))  # type: ignore[return-value]

        batches = iter(run.loader(checks.data(), global_batch=6))
        with pytest.raises(ModelError, match="out of step"):
            run.forward_backward(loss_fn, model, next(batches))


@pytest.mark.parametrize("strategy", ["single", ONE])
@pytest.mark.parametrize("torchs_own", [False, True])
@pytest.mark.parametrize(("setting", "wrapped"), [(True, False), ("max-autotune", False), (False, True), (True, True)])
def test_every_model_and_copy_is_compiled_in_its_mode_also_of_a_class_of_torchs_own(
    monkeypatch: pytest.MonkeyPatch, strategy: str, torchs_own: bool, setting: bool | str, wrapped: bool
) -> None:
    compiled_in = []

    def backend(graph: Any, inputs: Any, mode: str | None = None) -> Any:
        compiled_in.append((threading.current_thread().name.rpartition("-")[0], mode))
        return graph.forward

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), nn.Tanh()) if torchs_own else Compilable()

    def make() -> Any:
        """The model to prepare at the first call, later those to load its weights into."""
        return torch.compile(plain(), mode="reduce-overhead") if wrapped and next(calls) == 0 else plain()

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    calls = itertools.count()
    trained = checks.under_paceline(make, checks.sequential_loss, compile=setting, strategy=strategy)
    checks.same(trained, checks.plainly(plain, checks.sequential_loss))
    mode = "reduce-overhead" if wrapped else None if setting is True else setting
    assert set(compiled_in) == {("" if strategy == "single" else "paceline-replica", mode)}
    # Copies share a graph: one is for shards of 2 rows, one for 1. No rows are computed without one.
    assert len(compiled_in) >= (1 if strategy == "single" else 2)


class Compilable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_a_model_that_cannot_be_copied_is_named() -> None:
    class Keeps(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            return nn.Linear(6, 3).double()

    for model, words in (
        (nn.Sequential(Keeps(6, 3)), "returns a model with a different structure"),
        (nn.Sequential(nn.Linear(6, 3)), "cannot be copied"),
    ):
        model.double()
        if words == "cannot be copied":
            model.locked = threading.Lock()  # type: ignore[assignment]
        with checks.started(strategy=ONE) as run:
            with pytest.raises(ModelError, match=words):
                run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_central_storage_keeps_state_with_the_masters_and_gives_it_back() -> None:
    model = mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with checks.started(strategy="central_storage:devices=cpu,cpu") as run:
        run.prepare(model, optimizer)
        for batch in run.loader(checks.data(), global_batch=5):
            run.forward_backward(checks.sequential_loss, model, batch)
            run.step(optimizer)
            assert not [p for p in optimizer.state if optimizer.state[p] and p in set(model.parameters())]
        saved = optimizer.state_dict()
        assert len(saved["state"]) == 4
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        own = run._strategy.state_dict()["optimizers"][0]
        assert set(own["state"]) == set(model.state_dict())
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].shape == p.shape
    assert "state_dict" not in vars(optimizer)


def test_what_an_update_draws_is_alike_in_all_replicas() -> None:
    class Langevin(torch.optim.SGD):
        scale = 1e-3

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn_like(p), alpha=self.scale)

    results = []
    for strategy in ("single", "mirrored:devices=cpu,cpu,cpu"):
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = Langevin(model.parameters(), lr=0.05)
        with started(strategy) as run:
            run.prepare(model, optimizer)
            for batch in run.loader(checks.data(), global_batch=5):
                run.forward_backward(checks.sequential_loss, model, batch)
                run.step(optimizer)
                drawn = torch.rand(())
            results.append((model, drawn))
    checks.same(results[1][0], results[0][0])
    assert results[0][1] == results[1][1]


def test_batch_norm_by_shard_keeps_the_mean_of_the_replicas_statistics() -> None:
    """As ddp's ranks keep it."""

    def shard_means(strategy: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        with checks.started(strategy=strategy, batch_norm="shard") as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            for batch in run.loader(checks.data(), global_batch=6):
                run.forward_backward(checks.sequential_loss, model, batch)
                run.step()
                break
        return model[0].running_mean  # type: ignore[return-value]

    expected = torch.stack([checks.X[i : i + 2].mean(0) for i in (0, 2, 4)]).mean(0) * 0.1
    for strategy in STRATEGIES[:2]:
        torch.testing.assert_close(shard_means(strategy), expected)


NAMED = [
    ("cpu,gpu", "devices='cpu,gpu'"),
    ("cpu,cuda:0", "cuda:0 does not exist: this machine has no accelerator"),
    (3, "devices=3: use device names"),
]


@every_way
def test_a_backward_runs_in_its_replicas_own_thread(strategy: str) -> None:
    """Autograd has one thread for each GPU: two replicas of one GPU, each waiting in it for the other, would hang."""
    forwards, backwards = set(), set()
    multithreaded = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        forwards.add(threading.get_ident())
        output.register_hook(lambda _: backwards.add(threading.get_ident()))
        output.register_hook(lambda _: multithreaded.append(torch._C._is_multithreading_enabled()))
        return output.square().mean()

    with started(strategy) as run:
        model = nn.Linear(6, 3).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.loader(checks.data(), global_batch=12):
            run.forward_backward(loss_fn, model, batch)
            break
    assert len(forwards) > 1
    assert backwards == forwards
    assert not any(multithreaded)


@pytest.mark.parametrize(("devices", "words"), NAMED)
@pytest.mark.parametrize("name", ["data_parallel", "mirrored"])
def test_devices_that_cannot_be_are_named_before_anything_starts(name: str, devices: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        paceline.start(strategy=paceline.strategy(name, devices=devices), device="cpu")


@pytest.mark.parametrize(
    ("devices", "first", "found"),
    [
        ("cuda:0,cuda:1", "cuda:0", ["cuda:0", "cuda:1"]),
        (["cuda:2", "cuda:0"], "cuda:2", ["cuda:2", "cuda:0"]),
        ("", "cuda:0", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda,cuda:1", "cuda", ["cuda:0", "cuda:1"]),
        ("cpu+cpu", "cpu", ["cpu", "cpu"]),
        ("cuda:0,cpu", "cuda:0", "of several types"),
        ("cuda:1,cuda:1", "cuda:1", ["cuda:1", "cuda:1"]),
        ("cuda:0,cuda:3", "cuda:0", "cuda:3 does not exist: 3 cuda devices are visible"),
        ("cuda:1,cuda:2", "cuda:0", "--device cuda:1"),
        ("cpu,cpu", "cuda:0", "--device cpu"),
        ("", "cpu", ["cpu"]),
    ],
)
def test_devices_on_a_machine_with_three_gpus(
    devices: Any, first: str, found: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("is_available", True),
        ("current_accelerator", torch.device("cuda")),
        ("device_count", 3),
        ("current_device_index", 0),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    if isinstance(found, str):
        with pytest.raises(SettingError, match=found):
            devices_of("mirrored", devices, torch.device(first))
    else:
        assert [str(device) for device in devices_of("mirrored", devices, torch.device(first))] == found


def test_a_reduction_that_is_not_known_is_named() -> None:
    with pytest.raises(SettingError, match="Did you mean 'ring'"):
        paceline.start(strategy="mirrored:devices=cpu,cpu,reduction=rings", device="cpu")


def test_the_loop_form_works_where_one_device_computes_and_is_refused_by_name_else() -> None:
    trained = checks.under_paceline(mlp, checks.sequential_loss, adam=True, closure=False, strategy="central_storage")
    checks.same(trained, checks.plainly(mlp, checks.sequential_loss, adam=True), 1e-8)
    for strategy in STRATEGIES:
        with pytest.raises(UsageError, match="forward_backward"):
            checks.under_paceline(mlp, checks.sequential_loss, closure=False, strategy=strategy)


@pytest.mark.parametrize("strategy", ["single:shards=3", ONE, "data_parallel:devices=cpu,cpu,cpu reproducible=3"])
def test_each_call_of_a_closure_draws_numbers_of_its_own(strategy: str) -> None:
    """Those of its shard, whoever computes it, and others in the second call of a yield."""
    found: dict[tuple[float, int], float] = {}
    model = nn.Linear(2, 1)
    with started(strategy, seed=7) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in run.loader([torch.full((2,), float(i)) for i in range(3)], global_batch=3, name="few"):
            for call in range(2):

                def drawing(model: nn.Module, batch: Tensor, call: int = call) -> Tensor:
                    found[float(batch[0, 0]), call] = float(torch.rand(()))
                    return model(batch).mean()

                run.forward_backward(drawing, model, batch)
            run.step(optimizer)
    for (shard, call), drawn in found.items():
        key = mix(mix(7, tag("yield"), tag("few")), 0, 0, int(shard), 0)  # epoch, step, shard, micro-batch
        generator = torch.Generator().manual_seed(mix(key, call) if call else key)
        assert drawn == float(torch.rand((), generator=generator))
    assert len(set(found.values())) == 6


@pytest.mark.parametrize("strategy", ["data_parallel", "mirrored"])
def test_the_shards_of_a_reproducible_run_are_spread_over_the_devices(strategy: str) -> None:
    """As over processes: each device has weights of its own, which its shards share."""
    model = nn.Linear(2, 1)
    with started(f"{strategy}:devices=cpu,cpu,cpu reproducible=5") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        places = [
            weight.data_ptr() for weight in (model.weight, *(c[model.weight] for c in run._strategy.store.replicas))
        ]
    assert [places.count(place) for place in dict.fromkeys(places)] == [hi - lo for lo, hi in ranges(5, 3)]
    assert len(places) == 5
