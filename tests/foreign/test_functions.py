"""Jobs whose data come from a function, against their plain originals, on 1, 2 and 3 processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.foreign.functions import CLOSE, JOBS, Rows, nanogpt, started
from tests.ranks import run_ranks

from paceline.errors import SettingError, UsageError

LONG = pytest.param("word_language_model", marks=pytest.mark.conformance)


@pytest.mark.parametrize("job", [LONG if job == "word_language_model" else job for job in JOBS])
def test_one_process_trains_as_the_original(job: str) -> None:
    assert JOBS[job]() < CLOSE
    assert JOBS[job](micro_batch=3, strategy="single:shards=2") < CLOSE


@pytest.mark.parametrize(("size", "micro"), [(2, "0"), pytest.param(3, "2", marks=pytest.mark.full)])
def test_several_processes_train_as_the_original(size: int, micro: str) -> None:
    for found in run_ranks(size, "tests.foreign.functions:distances", "ddp", micro, deadline=300):
        assert len(found) == len(JOBS)
        assert all(value < CLOSE for value in found.values()), found


@pytest.mark.conformance
@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 2), pytest.param("fsdp", 3, marks=pytest.mark.full)])
def test_sharded_models_train_as_the_original(strategy: str, size: int) -> None:
    for found in run_ranks(size, "tests.foreign.functions:sharded", strategy, deadline=300):
        assert found < CLOSE


@pytest.mark.conformance
@pytest.mark.timeout(600)
def test_verify_says_the_same_where_noise_belongs_to_the_example() -> None:
    script = Path(__file__).parent / "scripts" / "vae_noise.py"
    command = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, within rounding" in done.stdout


def test_replicas_of_one_process_train_as_the_original() -> None:
    assert nanogpt(strategy="data_parallel:devices=cpu,cpu", closure=True) < CLOSE


def drawing(rows: Rows) -> tuple[torch.Tensor, int, int]:
    return torch.randint(10**6, (len(rows), 1)), rows.epoch, rows.step


def test_a_run_goes_on_where_it_was_saved(tmp_path: object) -> None:
    def seen(restore: bool) -> list[tuple[int, int, list[int]]]:
        with started() as run:
            model = torch.nn.Linear(1, 1)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            loader = run.batches(drawing, global_batch=4, steps=3)
            if restore:
                run.restore(str(tmp_path))
            found = []
            for _ in run.epochs(2):
                for drawn, epoch, step in loader:
                    found.append((epoch, step, drawn.flatten().tolist()))
                    run.backward(model(drawn / 1e6).mean())
                    run.step(optimizer)
                    if not restore and len(found) == 2:
                        run.save(str(tmp_path))
            return found

    whole = seen(False)
    assert [row[:2] for row in whole] == [(e, k) for e in range(2) for k in range(3)]
    assert len({str(drawn) for _, _, drawn in whole}) == 6
    assert seen(True) == whole[2:]


def test_the_function_is_told_its_rows() -> None:
    with started(strategy="single:shards=3") as run:
        loader = run.batches(lambda rows: list(rows), global_batch=7, steps=2, micro_batch=2)
        seen = [(loader.step, loader.rows, tuple(batch)) for batch in loader]
        assert len(loader) == len(seen) == 12
        assert loader.steps == 2
    assert all(rows == batch for _, rows, batch in seen)
    for step in range(2):
        assert sorted(row for k, rows, _ in seen for row in rows if k == step) == list(range(7))


def test_without_steps_it_has_no_end_and_no_length() -> None:
    with started() as run:
        loader = run.batches(lambda rows: torch.rand(len(rows)), global_batch=2)
        with pytest.raises(TypeError, match="has no end"):
            len(loader)
        drawn = [batch for batch, _ in zip(loader, range(50), strict=False)]
        assert len({str(batch.tolist()) for batch in drawn}) == 50


def test_numbers_that_numpy_draws_for_each_row_are_refused_where_the_batch_is_cut() -> None:
    import numpy as np

    def get_batch(rows: Rows) -> torch.Tensor:
        return torch.from_numpy(np.random.randint(0, 9, (len(rows),)))

    with started() as run:
        assert len(list(run.batches(get_batch, global_batch=4, steps=2))) == 2
    with started() as run:
        loader = run.batches(get_batch, global_batch=4, steps=2, micro_batch=2)
        with pytest.raises(UsageError, match=r"get_batch draws from NumPy's .* Use run.loader"):
            next(iter(loader))
    with started() as run:
        loader = run.batches(get_batch, global_batch=4, steps=2, micro_batch=2, collate="global")
        assert [len(batch) for batch in loader] == [2] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": [1, 2]}, r"run.batches\(list\): pass a function"),
        ({"global_batch": 0}, "run.batches.global_batch=0.: pass an integer"),
        ({"steps": 1.5}, "run.batches.steps=1.5."),
        ({"shuffle": True}, "run.batches.shuffle=....: the function makes each batch"),
    ],
)
def test_arguments_that_cannot_be_are_told(arguments: dict[str, object], message: str) -> None:
    with started() as run, pytest.raises(SettingError, match=message):
        run.batches(**{"fn": len, "global_batch": 4, **arguments})  # type: ignore[arg-type]
