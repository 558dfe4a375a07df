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
from paceline.verify.worker import backward_watch, perturbation, rank_queries, record_files


def test_what_a_script_asks_all_processes_is_passed_on_whole() -> None:
    """run.ratio(sum=..., count=...) is as good as run.ratio(..., ...)."""
    run = paceline.start(device="cpu", progress="off")
    try:
        watch = backward_watch.BackwardWatch(run, lambda: None)
        assert watch.watch_request(run.ratio)(sum=6.0, count=4) == watch.watch_request(run.ratio)(6.0, 4) == 1.5
        assert watch.asked_all_ranks
    finally:
        run.close()


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
    run = paceline.start(device="cpu", progress="off")
    try:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run._stepper.precision = perturbation.ScaledPrecision(run._stepper.precision, lambda: may)  # type: ignore[assignment]
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
