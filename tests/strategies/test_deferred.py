"""Models that were built on "meta" start with the same weights on any number of processes, under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.strategies import checks
from torch import Tensor, nn

from paceline.comm import dtensor
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, UsageError
from paceline.strategies.kit import deferred, stand_ins
from paceline.torch_private.core import TorchDispatchMode


class Block(nn.Module):
    """A layer with parameters of its own, a buffer that no checkpoint has, and a rule for its child."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.empty(6))
        self.register_buffer("steps", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        self.gain.data[0] = 3.0
        self.steps.copy_(torch.arange(6.0))
        nn.init.normal_(self.down.weight, std=0.01)
        with torch.no_grad():
            self.up.weight[1:2].zero_()  # of values that the child has drawn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x + self.steps)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.out, self.tied = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tied(self.out(self.norm(x)))


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: dtensor.whole(t).detach().clone() for name, t in named.items()}


def alone(make: Callable[[], Any], **options: Any) -> dict[str, Tensor]:
    """The start of the same model, filled without any run."""
    from paceline.data import randomness

    model = on_meta(make)
    filling = deferred.Filling(model, randomness.mix(0, randomness.tag("initialisation"), 0), options.get("init", True))
    deferred.allocate([*model.parameters(), *model.buffers()], torch.device("cpu"))
    filling()
    return whole_state(model)


STRATEGIES = [
    "ddp",
    "fsdp:min_params=0",
    "fsdp:stage=1",
    "fsdp:stage=2,offload=true,min_params=0",
    "tensor:plan=layers.*.up:column,layers.*.down:row",
    "pipeline:stages=2",
    "local_sgd:every=2",
    "shared",
]


def same_start(strategy: str) -> None:
    expected = alone(Net)
    with checks.started(strategy=strategy, seed=0) as run:
        model = on_meta(Net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        found = whole_state(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert model.tied.weight is model.out.weight
        loader = run.loader(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), global_batch=4)
        for batch in loader:
            run.forward_backward(lambda m, x: m(x).square().mean(), model, batch)
            run.step(optimizer)
        moved = whole_state_after(run, model)
    assert not torch.equal(moved, expected["out.weight"])


def whole_state_after(run: Any, model: Any) -> Tensor:
    run._strategy.gather_weights()
    return dtensor.whole(model.out.weight).detach().clone()


@pytest.mark.ranks(1)
def test_the_start_is_that_of_the_modules_own_functions() -> None:
    """Constants are those of the constructors, and draws have their scale."""
    start = alone(Net)
    assert torch.equal(start["layers.0.gain"], torch.tensor([3.0, 1, 1, 1, 1, 1]))
    assert torch.equal(start["layers.1.steps"], torch.arange(6.0))
    assert torch.equal(start["norm.running_var"], torch.ones(6))
    assert 0 < start["layers.0.down.weight"].abs().max() < 0.06
    assert torch.equal(start["layers.0.up.weight"][1], torch.zeros(6))
    assert 0 < start["layers.0.up.weight"][0].abs().max() <= 6**-0.5
    assert not torch.equal(start["layers.0.up.weight"], start["layers.1.up.weight"])
    same_start("single")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_start_under_every_strategy(strategy: str) -> None:
    same_start(strategy)


@pytest.mark.ranks(4)
@pytest.mark.conformance
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp:min_params=0",
        "fsdp:replicate=2,min_params=0",
        "fsdp+tensor:size=2,min_params=0,plan=layers.*.up:column,layers.*.down:row",
    ],
)
def test_the_same_start_on_four_ranks(strategy: str) -> None:
    same_start(strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp:min_params=0", "tensor:plan=layers.*.up:column,layers.*.down:row"])
def test_the_same_start_with_tensors_of_many_blocks(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_ins, "ROWS", 13)  # two rows of 6
        same_start(strategy)


FUNCTIONS: list[Callable[[Tensor], object]] = [
    lambda t: t.fill_(3),
    lambda t: t.data.zero_(),
    lambda t: t.uniform_(1, 2),
    lambda t: t.data.normal_(mean=1.0, std=0.1),
    lambda t: nn.init.uniform_(tensor=t, a=2.0, b=3.0),
    lambda t: nn.init.normal_(t, 2.0, std=0.5),
    lambda t: nn.init.trunc_normal_(t, std=0.02, a=-0.03, b=0.03),
    lambda t: nn.init.constant_(t, 0.25),
    nn.init.kaiming_uniform_,
    lambda t: nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="relu"),
    lambda t: nn.init.xavier_uniform_(t, gain=2.0),
    nn.init.xavier_normal_,
]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(300, 200))


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_values_in_blocks_are_distributed_as_those_of_the_function(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins, "ROWS", 2000)
    call = FUNCTIONS[number]
    found = alone(Weight, init=lambda module: call(module.weight))["weight"]
    expected = torch.empty(300, 200)
    call(expected)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.mean(), expected.mean(), rtol=0.01, atol=0.02 * scale)
    torch.testing.assert_close(found.std(), expected.std(), rtol=0.02, atol=0)
    for end in (found.min() - expected.min(), found.max() - expected.max()):
        assert abs(end.item()) <= 0.2 * scale
    if found.std() > 0:
        assert len(found.unique()) > 0.9 * found.numel()  # no block repeats another


class Made(TorchDispatchMode):
    """Counts the elements that are drawn, and the largest tensor that is made in memory."""

    drawn = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not found.is_meta:
            self.largest = max(self.largest, dtensor.local(found).numel())
            self.drawn += found.numel() * (func.name() in ("aten::uniform_", "aten::normal_"))
        return found


@pytest.mark.ranks(2)
def test_a_process_makes_and_draws_its_own_rows() -> None:
    with pytest.MonkeyPatch.context() as patch, checks.started(strategy="fsdp:min_params=0") as run:
        patch.setattr(stand_ins, "ROWS", 6400)
        model = on_meta(lambda: nn.Sequential(nn.Linear(640, 640, bias=False), nn.Embedding(640, 64)))
        with Made() as made:
            run.prepare(model)
        own = sum(dtensor.local(p).numel() for p in model.parameters())
        assert own == (640 * 640 + 640 * 64) / 2
        assert made.largest == 640 * 640 / 2  # of the weight's own part
        assert own <= made.drawn <= own + 2 * 6400


@pytest.mark.ranks(2)
def test_a_function_of_the_script() -> None:
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.copy_(torch.randn(p.shape) if p.dim() > 1 else torch.full(p.shape, 2.0))
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    expected = alone(Net, init=init)
    assert torch.equal(expected["layers.0.gain"], torch.full((6,), 2.0))
    with checks.started(strategy="fsdp:min_params=0", seed=0) as run:
        model = on_meta(Net)
        run.prepare(model, init=init)
        found = whole_state(model)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp:min_params=0"])
def test_without_values_a_batch_is_an_error_until_they_are_loaded(strategy: str, tmp_path: Path) -> None:
    state = {name: t for name, t in alone(Net).items() if not name.endswith("steps") and name != "tied.weight"}
    if world_group().rank == 0:
        save_file(state, tmp_path / "model.safetensors")
    world_group().barrier()
    data = torch.randn(8, 6)
    with checks.started(strategy=strategy, seed=5) as run:
        model = on_meta(Net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, init=False)
        with pytest.raises(UsageError, match=r"have no values yet: layers\.0\.down\.bias"):
            next(iter(run.loader(data, global_batch=4)))
        with pytest.raises(UsageError, match="have no values yet"):
            run.save(tmp_path / "checkpoints")
        assert run.load_pretrained(tmp_path) == ([], [])
        for name, value in whole_state(model).items():
            assert torch.equal(value, alone(Net)[name]), name
        run.save(tmp_path / "checkpoints")
    with checks.started(strategy=strategy, seed=5) as run:
        model = on_meta(Net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, init=False)
        run.loader(data, global_batch=4)
        assert run.restore(tmp_path / "checkpoints")
        for name, value in whole_state(model).items():
            assert torch.equal(value, alone(Net)[name]), name


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(3.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp:min_params=0"])
def test_what_nothing_fills_is_named(strategy: str) -> None:
    def model(kind: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), kind())

    with checks.started(strategy=strategy) as run:
        with pytest.raises(ModelError, match=r"no reset_parameters .* writes 1\.scale\. Give"):
            run.prepare(on_meta(lambda: model(Without)))
    with checks.started(strategy=strategy) as run:
        with pytest.raises(ModelError, match=r"1 buffer\(s\) of it are in no checkpoint .*: 1\.table\. Compute"):
            run.prepare(on_meta(lambda: model(Lost)), init=False)
    with checks.started(strategy=strategy) as run:
        with pytest.raises(ModelError, match=r"1\.table of Sequential is a tensor on \"meta\" that is neither"):
            run.prepare(on_meta(lambda: model(Attribute)))
