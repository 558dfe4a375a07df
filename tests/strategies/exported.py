"""The weights that a run exports, whole under every strategy, beside those of plain PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from tests.strategies.checks import BATCH, EPOCHS, Loss, data, make, plainly, started
from torch import Tensor, nn

import paceline


def whole(run: paceline.Run) -> dict[str, Tensor]:
    """The weights of the run's model, as an export holds them."""
    name = [tempfile.mkdtemp() if run.main else ""]
    dist.broadcast_object_list(name)
    path = Path(name[0]) / "model.safetensors"
    run.export(path)
    return load_file(path)


def apart(ours: dict[str, Tensor], theirs: nn.Module) -> float:
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    square = sum(float((ours[k].double() - expected[k].double()).square().sum()) for k in expected)
    return float((square / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5)


def same(ours: dict[str, Tensor], theirs: nn.Module, tolerance: float = 1e-10) -> None:
    assert apart(ours, theirs) <= tolerance, apart(ours, theirs)


def check_checkpoints(build: Callable[[], nn.Module], loss_fn: Loss, others: Sequence[Any]) -> None:
    """Each strategy goes on from a checkpoint of another, ddp among them, and ends with plain PyTorch's weights."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    reference = plainly(build, loss_fn, adam=True)
    for number, (before, after) in enumerate(zip(["ddp", *others], [*others, "ddp"], strict=True)):
        place = Path(folder[0]) / str(number)
        for strategy, stop in ((before, 7), (after, None)):
            with started(strategy=strategy) as run:
                model, optimizer = run.prepare(*make(build, True))
                loader = run.loader(data(), global_batch=BATCH)
                assert run.restore(place, missing_ok=True) == (stop is None)
                for _ in run.epochs(EPOCHS):
                    for batch in loader:
                        run.forward_backward(loss_fn, model, batch)
                        run.step(optimizer)
                        if run.steps == stop:
                            run.save(place)
                            break
                    if run.steps == stop:
                        break
                if stop is None:
                    same(whole(run), reference, 1e-8)
