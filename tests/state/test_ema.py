"""`run.ema` beside torch's AveragedModel in a plain loop over whole batches, under every strategy."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.strategies import checks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.comm import same_bits
from paceline.comm.mesh import world_group
from paceline.errors import PacelineError, SettingError, UsageError
from paceline.export.checkpoint_weights import read_weights

DECAY = 0.8


class Net(nn.Sequential):
    """A stack that a pipeline cuts and tensor cuts too, with a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[2])


def by_hand(epochs: int = 2) -> tuple[nn.Module, nn.Module, float]:
    """The model, the average, and the average's loss."""
    model, optimizer = checks.make(Net, True)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(epochs):
        for start in range(0, checks.N, checks.BATCH):
            loss_fn(model, [t[start : start + checks.BATCH] for t in (checks.X, checks.TOKENS, checks.Y)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
    with torch.no_grad():
        return model, averaged.module, loss_fn(averaged.module, [checks.X, checks.TOKENS, checks.Y]).item()


def trained(folder: Path, epochs: int, strategy: str, micro: int | None = 2) -> float:
    """Trains from the checkpoint that is in the folder on; leaves one, and the exported model and average."""
    with checks.started(strategy=strategy) as run:
        model, optimizer = run.prepare(*checks.make(Net, True))
        ema = run.ema(model, decay=DECAY)
        loader = run.loader(checks.data(), global_batch=checks.BATCH, micro_batch=micro)
        run.restore(folder, missing_ok=True)
        for _ in run.epochs(epochs):
            for batch in loader:
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
                ema.update()
        found: float = paceline.evaluate(ema, loss_fn, checks.data(), global_batch=7, run=run)["loss"]
        run.save(folder)
        run.export(folder / "ema.safetensors", ema)
        run.export(folder / "model.safetensors", model)
        predicted = run.predict(ema, checks.data(), global_batch=7)
        assert predicted.shape == (checks.N, 3)
        return found


def check(folder: Path, *parts: str) -> None:
    """Two epochs, the second under the last of the strategies."""
    for epochs, strategy in enumerate((parts[0], parts[-1]), start=1):
        found = trained(folder, epochs, strategy)
    compare(folder, found)


def compare(folder: Path, found: float) -> None:
    model, average, loss = by_hand()
    assert found == pytest.approx(loss, rel=1e-9)
    for name, wanted in (("model", model), ("ema", average)):
        for key, value in load_file(folder / f"{name}.safetensors").items():
            torch.testing.assert_close(value, wanted.state_dict()[key], rtol=1e-8, atol=1e-9)
    if world_group().rank == 0:
        exported = read_weights(folder, "ema").tensors  # as `paceline export --name ema` does
        for key, wanted_value in average.state_dict().items():
            torch.testing.assert_close(exported[key], wanted_value, rtol=1e-8, atol=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategies", ["ddp", "fsdp:min_params=0 ddp", "pipeline fsdp:min_params=0", "ddp pipeline"])
def test_it_is_that_of_torch_and_goes_on_under_another_strategy(strategies: str, tmp_path: Path) -> None:
    check(tmp_path, *strategies.split())


@pytest.mark.ranks(conformance=(2, 4))
@pytest.mark.parametrize(
    "strategy",
    ["shared", "fsdp:stage=1", "fsdp:stage=2,offload=true", "tensor:size=2,plan=0:column,2:row", "pipeline:stages=2"],
)
def test_under_more_strategies(strategy: str, tmp_path: Path) -> None:
    check(tmp_path, strategy)


@pytest.mark.parametrize(
    "strategy", ["single", "data_parallel:devices=cpu+cpu", "mirrored:devices=cpu+cpu", "central_storage:devices=cpu"]
)
def test_in_one_process(strategy: str, tmp_path: Path) -> None:
    check(tmp_path, strategy)


@pytest.mark.ranks(conformance=2)
def test_independent_replicas(tmp_path: Path) -> None:
    """The mean of their averages. Where the replicas are averaged after each step of plain SGD, it is that of one
    model."""
    found = []
    for strategy in ("ddp", "local_sgd:every=1", "local_sgd:every=3", "diloco:every=3"):
        with checks.started(strategy=strategy) as run:
            model, optimizer = checks.make(Net, False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.prepare(model, optimizer)
            ema = run.ema(model, DECAY)
            for batch in run.loader(checks.data(), global_batch=4, drop_last=True):
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
                ema.update()
            before = [p.clone() for p in model.parameters()]
            run.export(tmp_path / "ema.safetensors", ema)
            found.append(load_file(tmp_path / "ema.safetensors"))
            if run._strategy.synchronized() and strategy == "ddp":
                assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            paceline.evaluate(model, loss_fn, checks.data(), global_batch=4, run=run)
            assert not same_bits.digest_mismatch(model.named_parameters(), world_group())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-9)
        assert not torch.equal(found[2][name], value)


SERVED = """
import sys
from pathlib import Path
from tests.state import test_ema

folder = Path(sys.argv[1])
test_ema.compare(folder, test_ema.trained(folder, 2, "parameter_server", micro=None))
"""


@pytest.mark.conformance
def test_under_a_parameter_server(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVED)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "3", "train.py", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_it_counts_updates_and_not_calls(tmp_path: Path) -> None:
    """Else it would depend on the number of micro-batches, and so on that of devices."""
    with checks.started() as run:
        model, optimizer = run.prepare(*checks.make(Net, True))
        ema = run.ema(model, DECAY)
        with pytest.raises(UsageError, match=r"no weights yet. Call its update\(\) after run.step"):
            paceline.evaluate(ema, loss_fn, checks.data(), global_batch=7, run=run)
        for batch in run.loader(checks.data(), global_batch=checks.BATCH, micro_batch=2):
            ema.update()
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
            ema.update()
            ema.update()
        assert ema.state_dict()["count"] == run.steps == 5


def test_two_models_have_an_average_each(tmp_path: Path) -> None:
    with checks.started() as run:
        first, second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        run.prepare(first, second, *optimizers)
        averages = [run.ema(second, 0.0), run.ema(first, 0.5)]
        for batch in run.loader(checks.data(), global_batch=checks.BATCH):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
            for ema in averages:
                ema.update()
        run.save(tmp_path)
        run.export(tmp_path / "second.safetensors", averages[0])
        assert torch.equal(load_file(tmp_path / "second.safetensors")["weight"], second.weight)  # of a decay of 0
        assert torch.equal(read_weights(tmp_path, "ema").tensors["weight"], second.weight)
        assert not torch.equal(read_weights(tmp_path, "ema 2").tensors["weight"], first.weight)


def test_what_is_no_average_of_the_run_names_it(tmp_path: Path) -> None:
    with checks.started() as run:
        model = run.prepare(checks.make(Net, True)[0])
        for copied in (copy.deepcopy(model), AveragedModel(model)):
            with pytest.raises(UsageError, match=r"ema = run\.ema\(model, decay\)"):
                run.export(tmp_path / "x.safetensors", copied)
        with pytest.raises(UsageError, match=r"run\.prepare\(model\) first"):
            run.ema(nn.Linear(2, 2))
        for decay in (1, -0.1, "0.9", True):
            with pytest.raises(SettingError, match=r"run\.ema\(decay="):
                run.ema(model, decay)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_copy_of_a_model_in_parts_names_it(strategy: str) -> None:
    with checks.started(strategy=strategy) as run:
        model = run.prepare(checks.make(Net, True)[0])
        with pytest.raises(PacelineError, match=r"ema = run\.ema\(model, decay\)"):
            copy.deepcopy(model)


@pytest.mark.ranks(2)
def test_updated_on_one_rank_only(tmp_path: Path) -> None:
    with checks.started(strategy="ddp") as run:
        model, optimizer = run.prepare(*checks.make(Net, True))
        ema = run.ema(model)
        for batch in run.loader(checks.data(), global_batch=checks.BATCH):
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
            if run.main or run.steps == 1:
                ema.update()
        with pytest.raises(PacelineError, match="some ranks did not update the average"):
            run.export(tmp_path / "x.safetensors", ema)
