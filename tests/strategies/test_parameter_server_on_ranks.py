"""parameter_server in step with 2 workers and 1 server or 2, against plain PyTorch. The first ranks are workers, the
last servers. A server ends at `prepare`, and comes to the next run that a test starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.strategies import checks
from tests.strategies.checks import BATCH, EPOCHS, N, Net, X, Y, data, make, plainly, same
from torch import Tensor, nn

import paceline
from paceline.errors import UsageError

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def servers() -> int:
    return 2 if SIZE > 3 else 1


def serves() -> bool:
    return int(os.environ["RANK"]) >= SIZE - servers()


@contextmanager
def started(mode: str = "sync", strategy: Any = None, **settings: Any) -> Iterator[Any]:
    """A run, of which a server sees what comes before `prepare`, and ends there with exit code 0."""
    strategy = strategy or paceline.strategy("parameter_server", servers=servers(), mode=mode)
    try:
        with checks.started(strategy=strategy, progress="off", **settings) as run:
            yield run
            assert not serves() or strategy == "ddp", "prepare returned on a server"
    except SystemExit as end:
        assert serves(), "a worker ended"
        assert end.code == 0


def train(
    model: Callable[[], nn.Module],
    loss_fn: checks.Loss,
    *,
    adam: bool = False,
    closure: bool = True,
    micro: int | None = None,
    norm: float | None = None,
    **settings: Any,
) -> nn.Module:
    """As checks.under_paceline; on a server a model that has not been trained."""
    trained = make(model, adam)
    with started(**settings) as run:
        built, optimizer = run.prepare(*trained)
        loader = run.loader(data(), global_batch=BATCH, micro_batch=micro)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                if closure:
                    run.forward_backward(loss_fn, built, batch)
                else:
                    run.backward(loss_fn(built, batch))
                run.step(optimizer, max_grad_norm=norm)
    return trained[0]


def alike(trained: nn.Module, reference: nn.Module, tolerance: float = 1e-10) -> None:
    if not serves():
        same(trained, reference, tolerance)


def with_norm() -> nn.Module:
    return Net(norm=True)


def sparse() -> nn.Module:
    return Net(sparse=True)


def by_hand(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss = checks.counted_loss(model, batch)
    return loss.sum / loss.count


@pytest.mark.ranks(3, full=4)
def test_in_step_it_trains_as_plain_pytorch_and_servers_end_cleanly() -> None:
    """Closure and loop, SGD and AdamW, uneven and empty shards; with the servers having ended cleanly (`started`)."""
    alike(train(Net, checks.both_heads), plainly(Net, checks.both_heads))
    alike(train(Net, checks.both_heads, adam=True, closure=False), plainly(Net, checks.both_heads, adam=True), 1e-8)


@pytest.mark.ranks(3, full=4)
def test_batch_norm_micro_batches_counts_and_sparse_gradients_train_as_plain_pytorch() -> None:
    alike(train(with_norm, checks.both_heads), plainly(with_norm, checks.both_heads))
    alike(train(checks.layers, checks.counted_loss, micro=1), plainly(checks.layers, by_hand))
    alike(train(sparse, checks.both_heads), plainly(sparse, checks.both_heads))
    alike(train(Net, checks.by_data), plainly(Net, checks.by_data))  # which gradients there are differs over ranks


@pytest.mark.ranks(3, full=4)
def test_clipping_is_of_the_whole_global_batch() -> None:
    """Both from the mean over the whole global batch, on the workers; what they leave is what the servers use."""
    plain, optimizer = make(Net, False)
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            batch = [t[start : start + BATCH] for t in (X, checks.TOKENS, Y)]
            checks.both_heads(plain, batch).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    alike(train(Net, checks.both_heads, norm=0.3), plain)


@pytest.mark.ranks(3, full=4)
def test_two_models_prepared_one_by_one_train_as_plain_pytorch() -> None:
    """A server runs on to each `prepare`. The second model learns from the first one's output, after its update."""

    def trained(step: Callable[..., None], models: list[nn.Module], optimizers: list[Any], batches: Any) -> None:
        for x, _, _ in batches:
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, sum((m(x).square().mean() for m in models), torch.zeros(())))

    def built() -> tuple[list[nn.Module], list[Any]]:
        torch.manual_seed(0)
        models: list[nn.Module] = [nn.Linear(6, 3).double() for _ in range(2)]
        return models, [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]

    def plain_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()

    reference, optimizers = built()
    trained(plain_step, reference, optimizers, (checks.data()[k : k + BATCH] for k in range(0, N, BATCH)))
    models, optimizers = built()
    with started() as run:
        run.prepare(models[0], optimizers[0])
        run.prepare(models[1])
        run.prepare(optimizers[1])
        run.prepare(torch.optim.lr_scheduler.ConstantLR(optimizers[0], 1.0))

        def step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
            run.backward(loss, optimizer=optimizer)
            run.step(optimizer)

        trained(step, models, optimizers, run.loader(data(), global_batch=BATCH))
    for model, plain in zip(models, reference, strict=True):
        alike(model, plain, 1e-8)


def part(stop: int | None, folder: str, strategy: Any = None) -> nn.Module:
    """Trains with a schedule, from the checkpoint in the folder to the end, or to step `stop`, where it saves."""
    built = make(Net, True)
    with started(strategy=strategy) as run:
        model, optimizer = run.prepare(*built)
        run.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        loader = run.loader(data(), global_batch=BATCH, shuffle=True)
        run.restore(folder, missing_ok=True)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.forward_backward(checks.both_heads, model, batch)
                run.step(optimizer)
                if run.steps == stop:
                    run.save(folder)
                    return built[0]
    return built[0]


@pytest.mark.ranks(3, full=4)
def test_checkpoints_go_to_ddp_and_come_from_it() -> None:
    """In mid-epoch, from the servers to ddp and back, with a schedule, AdamW's state and numbers from evaluation."""
    with tempfile.TemporaryDirectory() as own:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        straight = part(None, str(Path(everyone[0]) / "none"))
        folder = str(Path(everyone[0]) / "chain")
        part(3, folder)
        part(8, folder, strategy="ddp")
        ended = part(None, folder)
        dist.barrier()
    alike(ended, straight, 1e-10)


@pytest.mark.ranks(3, full=4)
def test_weights_that_the_script_changes_reach_the_servers() -> None:
    """Pretrained ones loaded after `prepare`, and clipped ones after each update, as for a Wasserstein GAN."""
    saved = {name: t + 0.1 for name, t in make(Net, False)[0].state_dict().items()}

    def clip(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)

    plain, optimizer = make(Net, True)
    plain.load_state_dict(saved)
    for start in range(0, N, BATCH):
        checks.both_heads(plain, [t[start : start + BATCH] for t in (X, checks.TOKENS, Y)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        clip(plain)
    built = make(Net, True)
    with started() as run:
        model, optimizer = run.prepare(*built)
        model.load_state_dict(saved)
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(checks.both_heads, model, batch)
            run.step(optimizer)
            clip(model)
    alike(built[0], plain, 1e-8)


@pytest.mark.ranks(3, full=4)
def test_sums_means_gathers_and_predictions_are_over_the_workers_alone() -> None:
    """run.mean and the rest, an evaluation, predict: over the workers alone."""
    built = make(Net, False)
    with started() as run:
        model, _ = run.prepare(*built)
        seen = []
        for x, _, y in run.loader(data(), global_batch=BATCH, train=False):
            seen += [len(x), run.mean(x[:, 0])]
            assert run.gather(y).numel() <= BATCH
        assert run.sum(sum(seen[::2])) == N
        assert abs(run.ratio(sum(seen[::2]), 1) - N / len(run.gather([0]))) < 1e-12
        whole = run.predict(model, data(), global_batch=BATCH, fn=lambda m, b: m(b[0], b[1]))
        torch.testing.assert_close(whole, model(X, checks.TOKENS))
        assert run.gather(run.world.rank) == list(range(SIZE - servers()))
        assert dist.get_world_size() == SIZE - servers(), "what a script calls itself"
    assert dist.get_world_size() == SIZE, "of the next run"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_between_two_prepares_a_server_takes_part_in_nothing(mode: str) -> None:
    first, second = nn.Linear(6, 3), nn.Linear(3, 1)
    with started(mode) as run:
        run.prepare(first)
        if serves():
            refused = pytest.raises(UsageError, match=r"between two run\.prepare calls a server can only prepare")
            with refused:
                run.sum(1)
            with refused:
                list(run.loader(data(), global_batch=BATCH, train=False))
            with refused:
                for x, *_ in run.loader(data(), global_batch=BATCH):
                    run.backward(first(x.float()).sum())
        run.prepare(second)
        assert run.sum(1) == 2


@pytest.mark.ranks(3)
def test_not_in_step_what_all_do_is_refused_in_a_training_batch() -> None:
    model = nn.Linear(6, 3).double()
    with started("async") as run:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        calls: list[Callable[[], object]] = [
            lambda: run.mean(1.0),
            lambda: run.save("nowhere"),
            lambda: list(run.loader(data(), global_batch=BATCH, train=False)),
        ]
        for x, *_ in run.loader(data(), global_batch=BATCH):
            for call in calls:
                with pytest.raises(UsageError, match=r"needs all workers, .* not in step"):
                    call()
            run.backward(model(x).sum())
            run.step(optimizer)
        assert run.sum(1) == 2
        assert len(run.gather([run.steps])) == 2
