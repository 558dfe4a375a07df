"""noise="example": dropout and other noise of the loop and the closure, however a global batch is cut. All cuts are
those of one process; those of several are in tests/foreign."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import SettingError, UsageError

torch.manual_seed(0)
INPUTS = torch.randn(22, 5, 4, dtype=torch.float64)
DATA = TensorDataset(torch.arange(22), INPUTS)
Noise = Callable[[nn.Module, Tensor], Tensor]

CUTS: list[dict[str, Any]] = [
    {"micro_batch": 3},
    {"strategy": "single:shards=3"},
    {"strategy": "single:shards=7", "micro_batch": 1},
    {"strategy": "data_parallel:devices=cpu,cpu"},
    {"strategy": "mirrored:devices=cpu,cpu,cpu", "micro_batch": 2},
]
LOOPS = [cut for cut in CUTS if "devices" not in cut.get("strategy", "")]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    run = paceline.session.current()  # type: ignore[attr-defined]
    if run is not None:
        run.close()


class Net(nn.Module):
    def __init__(self, noise: str) -> None:
        super().__init__()
        self.first, self.last, self.noise = nn.Linear(4, 8), nn.Linear(8, 1), noise
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3)  # time first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(getattr(self, "_" + self.noise)(x)).mean((1, 2))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout1d(x, 0.5, self.training), 0.3, self.training)

    def _normal(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.rand(len(x), 1, 1, dtype=x.dtype)

    def _recurrent(self, x: Tensor) -> Tensor:
        made: Tensor = self.rnn(x)[0]
        return made

    def _transformer(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made

    def _weighed(self, x: Tensor) -> Tensor:
        made: Tensor = self.attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), need_weights=True)[0]
        return made.transpose(0, 1)

    def _recomputed(self, x: Tensor) -> Tensor:
        for reentrant in (False, True):
            x = checkpoint(lambda x: F.dropout(x.tanh(), 0.5) + torch.randn_like(x), x, use_reentrant=reentrant)
        return F.dropout(x, 0.2)

    def _batchwise(self, x: Tensor) -> Tensor:
        return x * 2 if float(torch.rand(())) < 0.5 else x * torch.rand((), dtype=x.dtype)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[1]) - batch[1].sum((1, 2))).square().mean()
    return loss


def trained(kind: str, closure: bool = True, micro_batch: int | None = None, **settings: Any) -> dict[str, Tensor]:
    run = paceline.start(seed=1, progress="off", device="cpu", **{"noise": "example", **settings})
    model = Net(kind).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = run.loader(DATA, global_batch=8, micro_batch=micro_batch, shuffle=True)
    for _ in range(2):
        for batch in loader:
            if closure:
                run.forward_backward(loss_fn, model, batch)
            elif len(batch[1]):
                run.backward(loss_fn(model, batch))
            else:
                run.backward(model(batch[1]).sum())
            run.step(optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


LONG = pytest.param("recurrent", marks=pytest.mark.full)
NOISES = ["dropout", "normal", LONG, "transformer", "weighed", "recomputed", "batchwise"]


@pytest.mark.parametrize("kind", NOISES)
def test_the_model_is_the_same_however_the_batch_is_cut(kind: str) -> None:
    alone = trained(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut = trained(kind, strategy="single:shards=3", micro_batch=2)
    assert distance(cut, alone) < 1e-12
    assert distance(trained(kind, noise="shard", micro_batch=3), alone) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("kind", NOISES)
def test_the_model_is_the_same_under_every_cut_of_one_process(kind: str) -> None:
    alone = trained(kind)
    for cut in CUTS:
        assert distance(trained(kind, **cut), alone) < 1e-12, cut
    loop = trained(kind, closure=False)
    assert distance(loop, alone) < 1e-12
    for cut in LOOPS:
        assert distance(trained(kind, closure=False, **cut), loop) < 1e-12, cut


def test_each_step_and_epoch_has_other_noise() -> None:
    run = paceline.start(seed=1, progress="off", device="cpu", noise="example")
    loader = run.loader(DATA, global_batch=11)
    drawn = [torch.randn(11, 3) for _ in range(2) for _ in loader]
    assert len({str(x) for x in drawn}) == 4
    one = {(k // 2, 11 * (k % 2) + i): row for k, rows in enumerate(drawn) for i, row in enumerate(rows.tolist())}
    run = paceline.start(seed=1, progress="off", device="cpu", noise="example", strategy="single:shards=3")
    loader = run.loader(DATA, global_batch=11)
    for epoch in range(2):
        for batch in loader:
            for index, row in zip(batch[0].tolist(), torch.randn(len(batch[0]), 3).tolist(), strict=True):
                assert one[epoch, index] == row


def test_an_evaluation_and_an_update_draw_as_the_program_does() -> None:
    found = []
    for noise in ("shard", "example"):
        run = paceline.start(seed=1, progress="off", device="cpu", noise=noise)
        model = nn.Linear(4, 22)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        drawn: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_, drawn=drawn: drawn.append(torch.randn(22, 2)))
        for batch in run.loader(DATA, global_batch=22):
            for _ in run.loader(DATA, global_batch=22, train=False):
                drawn.append(torch.rand(22))
            run.backward(model(batch[1].float()).square().mean())
            run.step()
        found.append(drawn)
    assert all(map(torch.equal, *found))


def test_noise_that_has_no_row_for_each_example_is_named_once() -> None:
    run = paceline.start(seed=1, progress="off", device="cpu", noise="example")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in run.loader(DATA, global_batch=22):
            torch.randn(5, 22, 3)
            torch.randn(5, 22, 3)
    (one,) = told
    assert "of the shape (5, 22, 3)" in str(one.message)
    assert "The first dimension is not the examples" in str(one.message)


def test_noise_of_weights_is_alike_on_all_shards() -> None:
    run = paceline.start(seed=1, progress="off", device="cpu", noise="example", strategy="single:shards=2")
    weight = nn.Parameter(torch.zeros(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in run.loader(DATA, global_batch=8):
            before = torch.default_generator.get_state()
            torch.randn_like(weight)
            assert not torch.equal(before, torch.default_generator.get_state())


def test_after_the_run_torch_draws_as_ever() -> None:
    run = paceline.start(seed=1, progress="off", device="cpu", noise="example")
    for _ in run.loader(DATA, global_batch=22):
        torch.randn(22)
    run.close()
    assert not torch.overrides._get_current_function_mode_stack()


def test_what_cannot_be_keyed_is_refused() -> None:
    with pytest.raises(SettingError, match="noise='exmple' is not known"):
        paceline.start(noise="exmple")
    with pytest.raises(SettingError, match="noise='example' and compile=True contradict"):
        paceline.start(noise="example", compile=True)
    run = paceline.start(progress="off", device="cpu", noise="example")
    model = nn.Linear(2, 2)
    model._compiled_call_impl = model._call_impl  # as model.compile() leaves it
    with pytest.raises(UsageError, match=r"the model \(Linear\) is compiled by torch.compile"):
        run.prepare(model)
