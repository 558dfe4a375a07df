"""Strategies of one process against plain PyTorch: single, and data_parallel on several logical devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies import checks
from torch import Tensor, nn

import paceline
from paceline.errors import SettingError
from paceline.strategies import STRATEGIES
from paceline.world import World


def with_norm() -> nn.Module:
    return checks.Net(norm=True)


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,cpu,cpu", "cpu+cpu+cpu+cpu"])
@pytest.mark.parametrize("model", [checks.Net, with_norm])
def test_data_parallel(devices: str, model: Callable[[], nn.Module]) -> None:
    """4 replicas and a last global batch of 2: empty shards too."""
    strategy = f"data_parallel:devices={devices}"
    for adam in (False, True):
        trained = checks.under_paceline(model, checks.both_heads, adam=adam, strategy=strategy)
        checks.same(trained, checks.plainly(model, checks.both_heads, adam=adam), 1e-8 if adam else 1e-10)


def test_data_parallel_with_micro_batches_and_counts() -> None:
    def by_hand(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = checks.counted_loss(model, batch)
        return loss.sum / loss.count

    trained = checks.under_paceline(
        checks.layers, checks.counted_loss, micro=1, strategy="data_parallel:devices=cpu,cpu"
    )
    checks.same(trained, checks.plainly(checks.layers, by_hand))


@pytest.mark.parametrize(("shards", "micro"), [(2, None), (3, None), (3, 1), (5, 2)])
def test_single_computes_shards_one_after_the_other(shards: int, micro: int | None) -> None:
    """Global batches of 6 and a last one of 2: shards of unequal length, and empty ones."""

    def by_hand(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = checks.counted_loss(model, batch)
        return loss.sum / loss.count

    trained = checks.under_paceline(checks.layers, checks.counted_loss, micro=micro, strategy=f"single:shards={shards}")
    checks.same(trained, checks.plainly(checks.layers, by_hand))


def test_data_parallel_computes_dropout_as_ddp_does() -> None:
    """The masks of a shard are the shard's, whoever computes it: two runs are alike, replicas are not."""

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    one, two = (
        checks.under_paceline(dropping, checks.sequential_loss, strategy="data_parallel:devices=cpu,cpu")
        for _ in range(2)
    )
    in_turn = checks.under_paceline(dropping, checks.sequential_loss, strategy="single:shards=2")
    assert checks.difference(one, two) == 0.0
    checks.same(one, in_turn)


def test_single_is_plain_pytorch_bit_for_bit() -> None:
    for adam in (False, True):
        trained = checks.under_paceline(checks.Net, checks.both_heads, adam=adam, closure=False)
        assert checks.difference(trained, checks.plainly(checks.Net, checks.both_heads, adam=adam)) == 0.0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-params"])
def test_precision_is_autocast_by_hand(precision: str) -> None:
    """The same bits as torch.autocast by hand; fp16's scale is a power of two and changes none."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if precision == "bf16-params":
        plain.to(torch.bfloat16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = checks.X.float()
    for start in range(0, 20, 5):
        with torch.autocast("cpu", dtype):
            output = plain(x[start : start + 5])
        F.cross_entropy(output.float(), checks.Y[start : start + 5]).backward()
        optimizer.step()
        optimizer.zero_grad()

    results: list[Any] = []
    for closure in (True, False):
        run = paceline.start(precision=precision, device="cpu")
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
            own = type(model)
            model, own_optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            assert isinstance(model, own)
            data = torch.utils.data.TensorDataset(x[:20], checks.Y[:20])
            for batch in run.loader(data, global_batch=5):
                if closure:
                    run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
                else:
                    output = model(batch[0])
                    assert output.dtype == torch.float32
                    run.backward(F.cross_entropy(output, batch[1]))
                run.step(own_optimizer)
            results.append(model)
        finally:
            run.close()
    for model in results:
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.dtype == q.dtype
            torch.testing.assert_close(p, q, rtol=1e-6 if precision != "bf16-params" else 1e-2, atol=1e-6)


def test_a_copy_of_a_model_under_autocast_computes_with_its_own_weights() -> None:
    import copy
    import pickle

    run = paceline.start(precision="bf16", device="cpu")
    try:
        model = run.prepare(nn.Linear(6, 3))
        ema = copy.deepcopy(model)
        with torch.no_grad():
            for p in ema.parameters():
                p.zero_()
        assert float(ema(checks.X.float()).abs().sum()) == 0.0
        assert float(model(checks.X.float()).abs().sum()) > 0.0
        assert type(pickle.loads(pickle.dumps(model))) is nn.Linear
    finally:
        run.close()


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.conformance
def test_compile_gives_the_same_model() -> None:
    trained = checks.under_paceline(checks.layers, checks.sequential_loss, compile=True)
    checks.same(trained, checks.plainly(checks.layers, checks.sequential_loss), 1e-9)
    assert list(trained.state_dict()) == list(checks.layers().state_dict())


def test_strategies_of_one_process_refuse_several() -> None:
    world = World(0, 2, 0, 2, 0, 1, "start()")
    from paceline.config import parse_strategy
    from paceline.strategies import make

    one_process = ("data_parallel:devices=cpu,cpu", "mirrored:devices=cpu,cpu", "central_storage")
    for name, remedy in (("single", "Use strategy='ddp'"), *((name, "use strategy='ddp'") for name in one_process)):
        with pytest.raises(SettingError, match=remedy):
            make(parse_strategy(name), world, torch.device("cpu"))
    assert set(STRATEGIES) == {
        "single",
        "ddp",
        "shared",
        "data_parallel",
        "mirrored",
        "central_storage",
        "fsdp",
        "pipeline",
        "tensor",
        "fsdp+tensor",
        "fsdp+ulysses",
        "ulysses",
        "local_sgd",
        "diloco",
        "parameter_server",
        "deepspeed",
    }
