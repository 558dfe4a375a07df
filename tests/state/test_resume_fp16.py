"""A resumed fp16 run is the undisturbed one, bit for bit: weights, momentum, loss scale and what was skipped."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group

OVERFLOWS = {3, 8, 9}  # optimizer steps whose gradient does not fit, on the last rank only
GROWTH = 3  # good steps until the scale doubles: it also grows in these few steps


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(directory: Path, stops: set[int]) -> dict[str, Any]:
    """15 steps in two epochs, started anew from the checkpoint after each number of steps in `stops`."""
    done, found = 0, {}
    scales: list[float] = []
    for stop in [*sorted(stops), 15]:
        run = paceline.start(device="cpu", precision="fp16", seed=7, progress="off")
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        run.prepare(model, optimizer, schedule)
        scaler = run._precision.scaler
        assert scaler is not None
        scaler.GROWTH_INTERVAL = GROWTH  # type: ignore[misc]
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(80, 6, generator=generator), torch.arange(80) % 3)
        loader = run.loader(data, global_batch=10, shuffle=True)
        assert run.restore(directory, missing_ok=True) == (done > 0)
        for _ in run.epochs(2):
            for batch in loader:
                bad = done in OVERFLOWS and run.world.rank == run.world.size - 1
                run.forward_backward(lambda m, b, f=1e38 if bad else 1.0: loss_fn(m, b) * f, model, batch)
                run.step(optimizer)
                scales.append(scaler.scale)
                done += 1
                if done == stop:
                    run.save(directory)  # before the break, which would end the epoch
                    break
            if done == stop:
                break
        found = {
            "weights": [p.detach().clone() for p in model.parameters()],
            "momentum": [state["momentum_buffer"].clone() for state in optimizer.state.values()],
            "scaler": scaler.state_dict(),
            "schedule": schedule.state_dict(),
            "counts": (run.steps, run.skipped),
            "scales": list(scales),
        }
        run.close()
    return found


@pytest.mark.ranks(1, 2)
def test_a_resumed_fp16_run_is_the_undisturbed_one() -> None:
    run = paceline.start(device="cpu", progress="off")
    base = Path(world_group().broadcast(tempfile.mkdtemp() if run.main else None))
    whole = train(base / "whole", set())
    assert sum(whole["counts"]) == 15
    assert whole["counts"][1] >= len(OVERFLOWS)
    moves = {b / a for a, b in zip(whole["scales"][:-1], whole["scales"][1:], strict=True)}
    assert moves == {0.5, 1.0, 2.0}, "the scale has both grown and shrunk"
    # 4, 9, 10: an overflow waits to halve the scale at the next batch. 2, 6: good steps are counted towards its growth.
    for stops in ({2, 4, 9}, {1, 6, 10, 11}):
        parts = train(base / f"parts {sorted(stops)}", stops)
        for name in ("weights", "momentum"):
            assert all(torch.equal(a, b) for a, b in zip(whole[name], parts[name], strict=True)), (stops, name)
        for name in ("scaler", "schedule", "counts", "scales"):
            assert whole[name] == parts[name], (stops, name)
