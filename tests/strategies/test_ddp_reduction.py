"""ddp with reducers and codecs: on one process, and what it refuses. On several: test_ddp_reducers_and_codecs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies import checks, codec_jobs
from tests.strategies.codec_jobs import BATCH, CODECS, Linear, balanced, rows, started, train_and_save

import paceline
from paceline.errors import SettingError


def prepared(strategy: str) -> tuple[paceline.Run, Linear, torch.optim.Optimizer]:
    run = paceline.start(device="cpu", strategy=strategy, progress="off")
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.prepare(model, optimizer)
    return run, model, optimizer


@pytest.mark.conformance
@pytest.mark.timeout(120)
def test_a_checkpoint_with_residuals_is_read_on_another_number_of_processes(tmp_path: Path) -> None:
    """Written on 3 processes with top-k; read on one: with a codec nothing is lost, without one that is said, and
    another strategy takes what it knows."""
    where = Path(run_ranks(3, "tests.strategies.codec_jobs:save_for_others", deadline=60)[0])
    for codec in ("topk:ratio=0.1", "powersgd:rank=1"):
        run, model, optimizer = prepared(f"ddp:codec={codec}")
        run.restore(where)
        loader = run.loader(rows(), global_batch=BATCH)
        train_and_save(run, model, loader, optimizer, 6, tmp_path / codec)
        balanced(run, model, [1.0] * 6)
        run.close()
    run, *_ = prepared("ddp")
    with pytest.warns(UserWarning, match=r"with codec=topk:ratio=0.1, but this run has no codec"):
        run.restore(where)
    run.close()
    run, model, optimizer = prepared("single")
    run.restore(where)
    train_and_save(run, model, run.loader(rows(), global_batch=BATCH), optimizer, 4, tmp_path / "single")
    run.close()
    run, model, _ = prepared("ddp:codec=bf16")
    run.restore(tmp_path / "single")
    assert run.steps == 4
    run.close()


@pytest.mark.parametrize("options", ["", ":reducer=ring", ":codec=bf16", ":codec=fp16,reducer=hierarchical"])
def test_ddp_on_one_process_is_plain_pytorch(options: str) -> None:
    """Nothing travels, so nothing is rounded."""
    for adam in (False, True):
        trained = checks.under_paceline(checks.Net, checks.both_heads, adam=adam, strategy="ddp" + options)
        assert checks.difference(trained, checks.plainly(checks.Net, checks.both_heads, adam=adam)) == 0.0


def test_codecs_on_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that leave parts of a gradient out do so on one replica too."""
    for codec in CODECS[2:]:
        run, model, optimizer = prepared(f"ddp:codec={codec}")
        for _ in run.epochs(2):
            for batch in run.loader(rows(), global_batch=BATCH, name=f"{run.steps}"):
                run.backward(codec_jobs.loss_of(model, batch))
                run.step(optimizer)
        balanced(run, model, [1.0] * 8)
        run.close()
        said = capsys.readouterr().err.count(f"codec={codec} changes the mathematics")
        assert said == 1


def test_nothing_is_said_of_what_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with started(strategy="ddp:reducer=ring,codec=none", progress="off"):
        pass
    assert "mathematics" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("reducer=rnig", "strategy ddp: reducer='rnig' is not known. Did you mean 'ring'"),
        ("codec=powrsgd", "strategy ddp: codec='powrsgd' is not known. Did you mean 'powersgd'"),
        ("codec=powersgd:rank=0", "rank=0: use a whole number of at least 1"),
        ("codec=powersgd:rank=2:ratio=1", "rank=2:ratio=1: use a whole number"),
        ("codec=topk:ratio=2", "ratio=2: use a number above 0 and up to 1"),
        ("codec=topk,reducer=hierarchical", "Use reducer=native or ring"),
        ("codec=topk:ratio=0.5,reducer=reduce_to_one", "Use reducer=native or ring"),
        ("kodec=bf16", "no option 'kodec'. Did you mean 'codec'"),
    ],
)
def test_options_that_cannot_be(options: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        paceline.start(device="cpu", strategy=f"ddp:{options}")
    assert words in str(raised.value)


def test_options_as_on_the_command_line_and_as_arguments() -> None:
    from paceline.config import parse_strategy

    spec = parse_strategy("ddp:codec=powersgd:rank=4,reducer=ring,bucket-mb=5")
    assert spec.options == {"codec": "powersgd:rank=4", "reducer": "ring", "bucket_mb": "5"}
    assert parse_strategy(str(spec)) == spec
    with started(strategy=paceline.strategy("ddp", codec="powersgd:rank=4", reducer="ring"), progress="off") as run:
        assert run._strategy._reduction.codec.rank == 4  # type: ignore[attr-defined]
