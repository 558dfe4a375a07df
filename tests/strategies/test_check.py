"""A strategy that cannot work is refused before any process starts, whoever names it, in one message."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click.testing
import pytest

import paceline
from paceline.cli import main
from paceline.config import StrategySpec, parse_strategy
from paceline.errors import PacelineError, SettingError
from paceline.strategies import STRATEGIES, check

BAD = [  # spec, processes (None: not known), what the message holds
    ("dpp", 2, "strategy='dpp' is not known. Did you mean 'ddp'"),
    ("local-sgd", 2, "Did you mean 'local_sgd'"),
    ("ddp:buket_mb=3", 2, "has no option 'buket_mb'. Did you mean 'bucket_mb'"),
    ("single:x=1", 1, "has no option 'x'. Known: shards"),
    ("single", 2, "strategy='single' is for one process"),
    ("ddp:bucket_mb=big", 2, "bucket_mb='big': use a number"),
    ("ddp:bucket_mb=0", 2, "bucket_mb=0.0"),
    ("ddp:bucket_mb=nan", None, "bucket_mb=nan"),
    ("ddp:static_graph=maybe", 2, "use true or false"),
    ("ddp:static_graph=true,find_unused=true", 2, "contradict"),
    ("ddp:reducer=rings", 2, "Did you mean 'ring'"),
    ("ddp:codec=topk:ratio=7", 2, "above 0 and up to 1"),
    ("ddp:codec=powersgd:rank=0", None, "at least 1"),
    ("ddp:codec=topk,reducer=reduce_to_one", 2, "Use reducer=native or ring"),
    ("fsdp:stage=4", 2, "stage=4: use 1 "),
    ("fsdp:stage=2.5", 2, "stage='2.5': use a whole number"),
    ("fsdp:mixed=bf32", 2, "mixed='bf32' is not known. Known: bf16, fp16, none"),
    ("fsdp:min_params=-1", 2, "min_params=-1"),
    ("fsdp:stage=1,offload=true", 2, "needs stage=2 or stage=3"),
    ("fsdp:replicate=2", 2, "Set replicate to 1; or start 4 processes"),
    ("fsdp:replicate=3", 4, "Set replicate to 1 or 2; or start 6 processes"),
    ("fsdp:replicate=0", None, "at least 1"),
    ("fsdp+tensor:size=3", 4, "size=3: it must divide the number of processes, 4"),
    ("fsdp+tensor:size=2", 2, "size=2 with 2 processes leaves only one to shard over. Start 4 or more"),
    ("fsdp+tensor:stage=1", 4, "Use stage=2 or stage=3"),
    ("fsdp+tensor:replicate=2", 4, "Start 8 processes, or drop replicate"),
    ("fsdp+ulysses:stage=1", 4, "fsdp+ulysses: stage=1 is not supported. Use stage=2 or stage=3"),
    ("fsdp+ulysses:size=3", 4, "fsdp+ulysses: size=3: it must divide the number of processes, 4"),
    ("fsdp+ulysses:replicate=2", 2, "fsdp+ulysses: replicate=2: each replica is sharded over at least two"),
    ("tensor+fsdp", 4, "write 'fsdp+tensor', with the outer dimension first"),
    (
        "pipeline+data_parallel",
        4,
        "pipeline and data_parallel cannot be combined. Supported: fsdp+tensor or fsdp+ulysses",
    ),
    ("ddp+tensr", 4, "Did you mean 'tensor'"),
    ("deepspeed:stage=4", 2, "stage=4: use 1 "),
    ("deepspeed:config=nowhere.json", None, "nowhere.json cannot be read"),
    ("local_sgd:every=0", 2, "every=0"),
    ("local_sgd:warmup=-1", 2, "warmup=-1"),
    ("diloco:outer_lr=0", 2, "outer_lr=0.0"),
    ("diloco:outer_lr=inf", 2, "outer_lr=inf"),
    ("diloco:outer_momentum=1", 2, "outer_momentum=1.0"),
    ("diloco:every=2,fragments=3", 2, "fragments=3 with every=2"),
    ("diloco:every=2,delay=2", 2, "delay=2 with every=2"),
    ("pipeline:stages=1", 2, "stages=1: it must divide the number of processes, 2, and be at least 2. Use 2."),
    ("pipeline:stages=3", 2, "Use 2; or start 3 processes"),
    ("pipeline:stages=-2", None, "stages=-2"),
    ("pipeline:schedule=gpipes", 2, "Did you mean 'gpipe'"),
    ("pipeline:balance=even", 2, "balance='even' is not known"),
    ("tensor:size=3", 2, "size=3: it must divide the number of processes, 2"),
    ("tensor:plan=up:diagonal", 2, "diagonal"),
    ("data_parallel:devices=cpu+cpu", 2, "runs in one process"),
    ("data_parallel:devices=cpu+nowhere", 1, "nowhere"),
    ("mirrored:reduction=rings", 1, "Did you mean 'ring'"),
    ("mirrored", 2, "runs in one process"),
    ("central_storage", 2, "runs in one process"),
]
GOOD = [
    ("single", 1), ("single", None), ("ddp", 1), ("ddp:codec=topk:ratio=0.01,reducer=ring", 2), ("fsdp:stage=1", 2),
    ("fsdp:mixed=bf16,offload=true", None), ("pipeline:stages=2,schedule=1f1b", 4), ("pipeline", 3),
    ("pipeline:stages=3", None), ("tensor:size=2", 4), ("tensor:plan=up:column+down:row", 2), ("local_sgd", 1),
    ("diloco:every=2,fragments=2", 2), ("data_parallel:devices=cpu,cpu", 1), ("mirrored:devices=cpu+cpu", 1),
    ("data_parallel", 1), ("shared", 2), ("shared", None), ("central_storage", 1), ("central_storage:devices=cpu", 1),
]  # fmt: skip
PYTHON_VALUES = [
    (StrategySpec("ddp", {"bucket_mb": "x"}), "bucket_mb='x': use a number"),
    (StrategySpec("ddp", {"bucket_mb": None}), "bucket_mb=None: use a number"),
    (StrategySpec("ddp", {"static_graph": 1}), "static_graph=1: use true or false"),
    (StrategySpec("fsdp", {"stage": 2.0}), "stage=2.0: use a whole number"),
    (StrategySpec("fsdp", {"stage": True}), "stage=True: use a whole number"),
]


@pytest.mark.parametrize(("spec", "size", "words"), BAD)
def test_what_cannot_work(spec: str, size: int | None, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(parse_strategy(spec), size)
    assert words in str(caught.value)
    assert spec.partition(":")[0] in str(caught.value)


@pytest.mark.parametrize(("spec", "size"), GOOD)
def test_what_can_work(spec: str, size: int | None) -> None:
    check(parse_strategy(spec), size)


REPRODUCIBLE = [  # strategy, processes, V, what the message holds
    ("fsdp", 2, 4, "reproducible=4 with strategy='fsdp': only 'data_parallel', 'mirrored', 'ddp' (without options)"),
    ("central_storage", 1, 4, "Set strategy='ddp', or drop reproducible"),
    ("data_parallel:devices=cpu,cpu", 2, 4, "data_parallel runs in one process, but there are 2"),
    ("mirrored:devices=cpu,cpu,reduction=ring", 1, 4, "Drop reduction"),
    ("data_parallel:devices=cpu,cpu,cpu", 1, 2, "2 shards, fewer than the 3 devices of strategy data_parallel"),
    ("ddp:bucket_mb=2", None, 4, "without options"),
    ("dpp", 2, 4, "Did you mean 'ddp'"),
    ("single", 2, 4, "'single' is for one process"),
    ("ddp", 3, 2, "fewer than the 3 processes. Start at most 2"),
    (None, 3, 2, "fewer than the 3 processes. Start at most 2"),
]


@pytest.mark.parametrize(("spec", "size", "shards", "words"), REPRODUCIBLE)
def test_what_cannot_be_reproducible(spec: str | None, size: int | None, shards: int, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(None if spec is None else parse_strategy(spec), size, shards)
    assert words in str(caught.value)
    for good in (None, parse_strategy("ddp")):
        check(good, 4, 4)
        check(good, None, 4)
    check(parse_strategy("single"), 1, 4)


@pytest.mark.parametrize(("spec", "words"), PYTHON_VALUES)
def test_values_of_python(spec: StrategySpec, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        check(spec, 2)
    check(StrategySpec("data_parallel", {"devices": ["cpu", "cpu"]}), 1)
    check(StrategySpec("tensor", {"plan": {"up": "column"}}), 2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_can_be_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has a `check` of options that the class has, which takes their defaults; and of the number of shards,
    where the class takes what adds over them."""
    module, _, cls = STRATEGIES[name].partition(":")
    options = set(inspect.signature(getattr(import_module(module), cls)).parameters)
    looks = inspect.signature(import_module(module).check).parameters
    named = {key for key, p in looks.items() if p.kind is p.KEYWORD_ONLY}
    assert named <= options | ({"shards"} if "sums" in options else set())
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())  # as if extras were installed
    check(StrategySpec(name), None)


WRITES = "import pathlib; pathlib.Path('started').touch()\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WRITES)
    return tmp_path


def command(*line: str) -> str:
    done = click.testing.CliRunner().invoke(main, line)
    assert done.exit_code == 2, done.output
    assert not Path("started").exists()
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


def test_run_starts_nothing(script: Path) -> None:
    said = command("run", "--nproc", "2", "--strategy", "fsdp:stage=4", "train.py")
    assert "Error: strategy fsdp: stage=4" in said
    assert "(Set by the command line.)" in said
    assert "'dpp' is not known. Did you mean 'ddp'" in command("run", "--strategy", "dpp", "train.py")
    assert "stages=3" in command("run", "--nproc", "2", "--strategy", "pipeline:stages=3", "train.py")
    said = command("run", "--nproc", "3", "--reproducible", "2", "train.py")
    assert "fewer than the 3 processes" in said
    assert "(Set by the command line.)" in said


def test_several_machines_are_counted(script: Path) -> None:
    many = ("--nnodes", "3", "--rdzv-endpoint", "127.0.0.1:29777", "train.py")
    assert "number of processes, 3" in command("run", "--strategy", "tensor:size=2", *many)


def test_the_settings_file_is_named(script: Path) -> None:
    (script / "paceline.toml").write_text('strategy = "local_sgd:every=0"\n')
    said = command("run", "--nproc", "2", "train.py")
    assert "every=0" in said
    assert "paceline.toml.)" in said
    (script / "paceline.toml").write_text('[strategy]\nname = "local_sgd"\nevery = 2.5\n')
    assert "every=2.5: use a whole number" in command("run", "--nproc", "2", "train.py")
    said = command("run", "--nproc", "2", "--strategy", "ddp:bucket_mb=0", "train.py")  # it overrides the file
    assert "bucket_mb=0.0" in said
    (script / "paceline.toml").write_text('strategy = "fsdp"\n')
    said = command("run", "--nproc", "2", "--reproducible", "4", "train.py")
    assert "reproducible=4 with strategy='fsdp'" in said
    assert said.endswith("paceline.toml and the command line.)")


def test_compare_starts_nothing(script: Path) -> None:
    """What was asked for by name; of what was not, the row says why it cannot be tried."""
    assert "stages=3" in command("compare", "--strategies", "ddp,pipeline:stages=3", "train.py")
    assert "ratio=7" in command("compare", "--strategies", "ddp:codec=topk:ratio=7", "train.py")
    assert "'dpp' is not known. Did you mean 'ddp'" in command("compare", "--strategies", "dpp", "train.py")


def test_launch_starts_nothing(tmp_path: Path) -> None:
    def touch() -> None:
        (tmp_path / "started").touch()

    for spec, words in (("tensor:size=3", "size=3"), ("ddp:bucket_mb=-1", "bucket_mb=-1.0"), ("dpp", "mean 'ddp'")):
        with pytest.raises(SettingError, match=words):
            paceline.launch(touch, nproc=2, strategy=spec)
    assert issubclass(SettingError, PacelineError)
    assert not (tmp_path / "started").exists()


@pytest.mark.full
def test_the_scripts_own_strategy_is_one_message(tmp_path: Path) -> None:
    """Only the processes can know it. All of them refuse it, and the launcher says it once."""
    (tmp_path / "train.py").write_text("import paceline\npaceline.start(strategy='fsdp:stage=4')\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count(" failed: ") == 1, done.stderr
    assert 'train.py", line 2' in done.stderr
