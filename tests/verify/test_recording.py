"""What `paceline verify` puts around a run in its processes, on its own."""

from __future__ import annotations

import dataclasses
import resource
import signal
from pathlib import Path

import pytest
import torch

import paceline
from paceline.errors import LaunchError
from paceline.observe.patching import Patches
from paceline.run import observe
from paceline.step.observer import StepObserver
from paceline.verify.worker import rank_queries, record_files


def test_a_disk_that_takes_no_more_is_named_with_what_helps(tmp_path: Path) -> None:
    """Stood in for by the kernel's limit of a file's size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(LaunchError, match=r"(?s)state-0.*too large.*--steps.*TMPDIR"):
            record_files.save_tensors({"weight": torch.zeros(4096)}, str(tmp_path / "state-0.safetensors"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "state-0.safetensors").exists()
    record_files.save_tensors({"weight": torch.zeros(4096)}, str(tmp_path / "state-0.safetensors"))
    assert (tmp_path / "state-0.safetensors").exists()


def test_every_name_by_which_a_script_asks_for_its_rank_is_noted_and_told() -> None:
    run = paceline.start(device="cpu", progress="off")
    real, patches, lines = run.world, Patches(), []
    run.world = dataclasses.replace(real, rank=1, size=3, local_rank=1, local_size=3)
    try:
        rank_queries.RankQueries(run, True, lines.append, patches)
        assert (run.rank, run.local_rank, run.world_size, run.world.rank, run.main) == (0, 0, 1, 0, True)
        assert len(lines) == 5
        assert {file for file, _ in lines} == {__file__}
    finally:
        patches.undo()
        run.world = real
        run.close()


@pytest.mark.parametrize("may", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_a_perturbed_run_goes_back_through_the_model_with_three_quarters_of_the_loss(closure: bool, may: bool) -> None:
    """What enters the backward is 0.75 times as large; what stands in .grad is as before."""
    factor = 0.75 if may else 1.0

    class Perturbed(StepObserver):
        def scale(self) -> float:
            return factor

    run = paceline.start(device="cpu", progress="off")
    try:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        observe(run, lambda run, parts: Perturbed())
        run.prepare(model, optimizer)
        entered: list[float] = []

        def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = model(batch[0]).sum() / 4
            loss.register_hook(lambda grad: entered.append(float(grad)))
            return loss

        for batch in run.loader(torch.utils.data.TensorDataset(torch.arange(4.0)[:, None]), global_batch=4):
            if closure:
                run.forward_backward(loss_fn, model, batch)
            else:
                run.backward(loss_fn(model, batch))
            assert model.weight.grad is not None
            assert model.weight.grad.item() == 1.5
            run.step(optimizer)
        assert entered == [factor]
    finally:
        run.close()
