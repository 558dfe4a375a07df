"""Names and calls that everyone tries who comes from another library: they work, or the error says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import SettingError, UsageError

DATA = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)


@pytest.fixture
def run() -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", progress="off")
    yield run
    run.close()


def loss_fn(model: Any, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_names_that_cost_nothing(run: paceline.Run) -> None:
    assert (run.rank, run.local_rank, run.world_size) == (0, 0, 1)
    run.wait()
    assert run.broadcast({"directory": "out"}) == {"directory": "out"}
    assert run.loader(DATA, global_batch=4).dataset is DATA


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("is_main_process", "run.main"),
        ("is_global_zero", "run.main"),
        ("process_index", "run.rank"),
        ("num_processes", "run.world_size"),
        ("wait_for_everyone", "run.wait()"),
        ("barrier", "run.wait()"),
        ("gather_for_metrics", "run.gather"),
        ("all_reduce", "run.sum"),
        ("clip_grad_norm_", "max_grad_norm"),
        ("accumulate", "micro_batch"),
        ("unwrap_model", "the model itself"),
        ("setup_dataloaders", "run.loader"),
        ("save_state", "run.save"),
    ],
)
def test_a_name_of_another_library_says_what_it_is_here(run: paceline.Run, name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=rf"a run has no attribute '{name}'. Use .*{re.escape(here)}"):
        getattr(run, name)
    with pytest.raises(AttributeError, match=r"a run has no attribute 'nonsense'\.$"):
        run.nonsense  # noqa: B018
    assert not hasattr(run, name)


def test_so_do_names_of_a_loader(run: paceline.Run) -> None:
    loader = run.loader(DATA, global_batch=4)
    with pytest.raises(AttributeError, match=r"'batch_size'. Use loader.global_batch.*loader.examples"):
        loader.batch_size  # noqa: B018
    with pytest.raises(AttributeError, match=r"'sampler'. Use run.loader alone, which gives each epoch"):
        loader.sampler.set_epoch(1)


def first(run: paceline.Run, call: Callable[[nn.Module, list[Tensor]], object]) -> None:
    model = nn.Linear(4, 3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.loader(DATA, global_batch=4):
        call(model, batch)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_loss_of_output_and_target_is_named(run: paceline.Run, loss: Any) -> None:
    message = r"a loss_fn is called as loss_fn\(model, batch\)(?s:.)*def loss_fn\(model, batch\): x, y = batch"
    with pytest.raises(UsageError, match=message):
        first(run, lambda model, batch: run.forward_backward(loss, model, batch))
    model = nn.Linear(4, 3)
    with pytest.raises(SettingError, match=message):
        paceline.fit(model, loss, DATA, optimizer=torch.optim.SGD(model.parameters()), global_batch=4, epochs=1)


def test_arguments_in_each_others_place_are_named(run: paceline.Run) -> None:
    with pytest.raises(UsageError, match=r"Did you swap them\? Write run\.forward_backward\(loss_fn, model"):
        first(run, lambda model, batch: run.forward_backward(model, loss_fn, batch))
    model: Any = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SettingError, match=r"paceline\.fit\(model, loss_fn, train_set"):
        paceline.fit(loss_fn, model, DATA, optimizer=optimizer, global_batch=4, epochs=1)  # type: ignore[arg-type]


def test_an_error_in_the_scripts_own_closure_stays_what_it_is(run: paceline.Run) -> None:
    def wrong(model: Any, batch: list[Tensor]) -> Tensor:
        return model(batch[0]) + "text"  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="unsupported operand"):
        first(run, lambda model, batch: run.forward_backward(wrong, model, batch))


def test_under_no_grad_is_named(run: paceline.Run) -> None:
    with torch.no_grad(), pytest.raises(UsageError, match=r"run\.forward_backward was called under torch\.no_grad"):
        first(run, lambda model, batch: run.forward_backward(loss_fn, model, batch))


def test_backward_under_no_grad_is_named(run: paceline.Run) -> None:
    with torch.no_grad(), pytest.raises(UsageError, match=r"run\.backward was called under torch\.no_grad"):
        first(run, lambda model, batch: run.backward(loss_fn(model, batch)))


def test_a_lambda_that_a_spawned_worker_cannot_be_sent_is_named(run: paceline.Run) -> None:
    loader = run.loader(
        DATA, global_batch=4, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda examples: examples
    )
    with pytest.raises(UsageError, match=r"loader 'train': num_workers starts processes.*a lambda.*num_workers=0"):
        next(iter(loader))


def test_of_a_scheduler_by_epoch_the_first_advice_is_not_to_prepare_it(run: paceline.Run) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    run.prepare(model, optimizer, scheduler)
    with pytest.raises(UsageError) as raised:
        scheduler.step()
    said = str(raised.value)
    by_epoch, by_step = said.index("once per epoch"), said.index("delete the call")
    assert by_epoch < said.index("run.track(scheduler=scheduler)") < by_step


def test_settings_of_launch_are_said_to_be_its_own() -> None:
    with pytest.raises(SettingError, match=r"strategy='dpp'.*Did you mean 'ddp'.*Set by paceline\.launch\("):
        paceline.launch(print, strategy="dpp")
