"""A restored run goes on with the checkpoint's hyperparameters and says so, or with the script's, as if they had been
there from the beginning of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies import checks
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from paceline.errors import SettingError

Schedule = Callable[[torch.optim.Optimizer], Any]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[2])


def trained(
    folder: Path,
    epochs: int,
    schedule: Schedule | None = None,
    strategy: str = "single",
    whose: Any = None,
    **options: Any,
) -> tuple[torch.optim.Optimizer, list[float], nn.Module]:
    """The optimizer, the rate after each step, the model."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})
    rates = []
    with checks.started(strategy=strategy) as run:
        run.prepare(model, optimizer, *([] if schedule is None else [schedule(optimizer)]))
        loader = run.loader(checks.data(), global_batch=checks.BATCH)
        run.restore(folder, missing_ok=True, **({} if whose is None else {"hyperparameters": whose}))
        for _ in run.epochs(epochs):
            for batch in loader:
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
                rates.append(float(optimizer.param_groups[0]["lr"]))
        run.save(folder)
    return optimizer, rates, model


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline: using ")]


def test_the_checkpoint_wins_with_a_line_for_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 1)
    for _ in range(2):  # also when the run is stopped a second time
        optimizer, rates, _ = trained(tmp_path, 2, lr=0.02, betas=(0.8, 0.9), weight_decay=0.0)
        assert set(rates) <= {0.1}
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        remedy = "To use the script's value: run.restore(directory, hyperparameters='script')."
        assert lines(capfd) == [
            f"paceline: using lr=0.1 from the checkpoint (this script has 0.02). {remedy}",
            f"paceline: using betas=[0.9, 0.999] from the checkpoint (this script has [0.8, 0.9]). {remedy}",
            f"paceline: using weight_decay=0.01 from the checkpoint (this script has 0.0). {remedy}",
        ]
    trained(tmp_path, 3)
    assert lines(capfd) == []


def test_the_script_wins_where_it_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 1)
    optimizer, rates, _ = trained(tmp_path, 2, whose="script", lr=0.02, betas=(0.8, 0.9))
    assert set(rates) == {0.02}
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert lines(capfd) == [
        "paceline: using lr=0.02 from this script (the checkpoint has 0.1).",
        "paceline: using betas=[0.8, 0.9] from this script (the checkpoint has [0.9, 0.999]).",
    ]
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 10  # its state is the checkpoint's
    trained(tmp_path, 3, lr=0.02, betas=(0.8, 0.9))
    assert lines(capfd) == []


SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 15, eta_min=0.001),
    "steps": lambda optimizer: schedules.StepLR(optimizer, 3, 0.5),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"] * 3, total_steps=20),
    "warm": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chain": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_scripts_schedule_is_moved_on(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its rates are those of a run that had the script's rate from the beginning. The checkpoint's go on as they were,
    and a rate that the schedule alone has changed is no change of the script's."""
    schedule = SCHEDULES[name]
    _, whole, _ = trained(tmp_path / "whole", 2, schedule, lr=0.02)
    _, first, _ = trained(tmp_path / "a", 1, schedule)
    _, kept, _ = trained(tmp_path / "a", 2, schedule)
    assert lines(capfd) == []
    assert kept != first
    trained(tmp_path / "b", 1, schedule)
    _, own, _ = trained(tmp_path / "b", 2, schedule, whose="script", lr=0.02)
    assert own == pytest.approx(whole[5:], rel=1e-12)
    assert any(line.startswith("paceline: using lr=") or "max_lr=" in line for line in lines(capfd))


def test_a_changed_schedule(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 1, lambda optimizer: schedules.StepLR(optimizer, 3, 0.5))
    _, rates, _ = trained(tmp_path, 2, lambda optimizer: schedules.StepLR(optimizer, 4, 0.5))
    assert "using step_size=3 of scheduler 0 from the checkpoint (this script has 4)" in lines(capfd)[0]
    assert rates == [0.025] * 3 + [0.0125] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp:stage=2", "ddp"])
def test_on_several_processes(strategy: str, tmp_path: Path) -> None:
    trained(tmp_path, 1, strategy=strategy)
    _, rates, _ = trained(tmp_path, 2, strategy=strategy, whose="script", lr=0.0, weight_decay=0.0)
    assert set(rates) == {0.0}


def test_a_name_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"run\.restore\(hyperparameters='mine'\): write 'checkpoint'"):
        trained(tmp_path, 1, whose="mine")
