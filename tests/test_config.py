"""Settings: from the script, paceline.toml and the command line, in this order; and what is said about wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import Settings, StrategySpec, file_beside, parse_strategy, read_file, resolve
from paceline.errors import SettingError
from paceline.strategies import check


def written(folder: Path, text: str, name: str = "paceline.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- merging


def test_a_later_place_overrides_and_each_change_is_told() -> None:
    settings, notes = resolve(
        ("the script", {"precision": "fp32", "seed": 1, "device": None, "nonfinite": "skip"}),
        ("/x/paceline.toml", {"precision": "bf16", "seed": 1}),
        ("the command line", {"precision": "fp16", "log_every": 5}),
    )
    assert settings == Settings(precision="fp16", seed=1, nonfinite="skip", log_every=5)
    assert notes == [
        "precision=bf16 from /x/paceline.toml overrides fp32 from the script",
        "precision=fp16 from the command line overrides bf16 from /x/paceline.toml",
    ]


@pytest.mark.parametrize("given", ["jsonl,tensorboard", "jsonl, tensorboard,", ["jsonl", "tensorboard"]])
def test_trackers_are_text_or_a_list(given: Any) -> None:
    assert resolve(("the script", {"trackers": given}))[0].trackers == ("jsonl", "tensorboard")


def test_the_strategy_is_text_or_a_value_or_a_table(tmp_path: Path) -> None:
    file = written(tmp_path, '[strategy]\nname = "ddp"\nbucket_mb = 50\nstatic_graph = true\n')
    table = resolve(("the file", read_file(file)))[0].strategy
    assert table == StrategySpec("ddp", {"bucket_mb": 50, "static_graph": True})
    assert str(resolve(("it", {"strategy": "ddp:bucket_mb=50,static_graph=true"}))[0].strategy) == str(table).lower()
    assert resolve(("it", {"strategy": paceline.strategy("ddp", bucket_mb=50)}))[0].strategy == StrategySpec(
        "ddp", {"bucket_mb": 50}
    )
    assert resolve(("the script", {"strategy": "ddp"}), ("the file", read_file(file)))[1] == [
        "strategy=ddp:bucket_mb=50,static_graph=True from the file overrides ddp from the script"
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "bf61"}, "precision='bf61' is not known. Did you mean 'bf16'"),
        ({"precision": 16}, "precision=16 is not known"),
        ({"precision": ["bf16"]}, r"precision=\['bf16'\] is not known"),
        ({"seed": -1}, "seed=-1: must be a whole number from 0"),
        ({"seed": 1.0}, "seed=1.0: must be a whole number"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"seed": "1"}, "seed='1': must be a whole number"),
        ({"log_every": 0}, "log_every=0: must be a whole number from 1"),
        ({"compile": "yes"}, "compile='yes': must be True, False, or a mode of torch.compile: reduce-overhead, "),
        ({"compile": 1}, "compile=1: must be True, False, or a mode"),
        ({"channels_last": 1}, "channels_last=1: must be True or False"),
        ({"tf32": "on"}, "tf32='on': must be True or False"),
        ({"device": 0}, "device=0: must be a string"),
        ({"log_dir": 3}, "log_dir=3: must be a string"),
        ({"trace": 3}, "trace=3: must be a string"),
        ({"progress": "none"}, "progress='none' is not known"),
        ({"trackers": "tensorbord"}, "trackers='tensorbord' is not known. Did you mean 'tensorboard'"),
        ({"trackers": 3}, "trackers=3: must be a string such as"),
        ({"trackers": ["jsonl", 3]}, "trackers=3 is not known"),
        ({"strategy": 3}, "strategy=3: must be a string such as"),
        ({"strategy": "ddp:bucket_mb"}, "the option 'bucket_mb' has no value"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=rf"{message}.*\(Set by /x/paceline.toml.\)"):
        resolve(("the script", {}), ("/x/paceline.toml", values))


def test_settings_that_contradict_each_other_are_refused() -> None:
    """With the places that they are from."""
    sources = r"\(deterministic is set by the script, cudnn_benchmark is set by /x/paceline.toml.\)"
    with pytest.raises(SettingError, match=rf"deterministic=True and cudnn_benchmark=True.*{sources}"):
        resolve(("the script", {"deterministic": True, "seed": 1}), ("/x/paceline.toml", {"cudnn_benchmark": True}))


def test_trackers_that_would_write_nowhere_are_said() -> None:
    _, notes = resolve(("the script", {"trackers": ["tensorboard", "jsonl"]}))
    assert notes == [
        "trackers=tensorboard,jsonl from the script records nothing, because log_dir is not set. Set a "
        "directory: log_dir='logs' (--log-dir logs)."
    ]
    assert resolve(("the script", {"trackers": "jsonl"}), ("the command line", {"log_dir": "x"}))[1] == []
    assert resolve(("the script", {}))[1] == []


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(SettingError, match=r"the command line sets an unknown setting 'sead'. Did you mean 'seed'"):
        resolve(("the command line", {"sead": 1}))


# --- the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precison = 'bf16'\n", "paceline.toml: 'precison' is not a setting. Did you mean 'precision'"),
        ("[train]\nseed = 1\n", "paceline.toml: 'train' is not a setting"),
        ("seed = 1\nprecision = bf16\n", "paceline.toml is not valid TOML: .*line 2.*Write lines such as"),
        ("seed = 1\nseed = 2\n", "paceline.toml is not valid TOML: .*line 2"),
        ("[strategy]\nbucket_mb = 50\n", r"the table \[strategy\] has no name"),
        ("seed = " + "[" * 100_000, "paceline.toml is not valid TOML: .*recursion"),
        ("seed = " + "1" * 100_000, "paceline.toml is not valid TOML"),
        ("# \n" * 400_000, "paceline.toml is not a settings file: it is larger than 1,048,576 bytes"),
    ],
)
def test_a_file_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        read_file(written(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError,
        match=r"none.toml' cannot be read: No such file or directory. Give another with --config",
    ):
        read_file(tmp_path / "none.toml")
    (tmp_path / "paceline.toml").mkdir()
    assert file_beside(tmp_path / "train.py") == tmp_path / "paceline.toml", "and not passed over in silence"
    with pytest.raises(SettingError, match="cannot be read: it is a directory"):
        read_file(tmp_path / "paceline.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes("# für\n".encode("latin-1"))
    with pytest.raises(SettingError, match="is not valid TOML"):
        read_file(latin)


def test_a_file_with_a_byte_order_mark_and_an_empty_one(tmp_path: Path) -> None:
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert read_file(marked) == {"seed": 3}
    assert read_file(written(tmp_path, "")) == {}


# --- a script

SCRIPT = """
import json, sys
import paceline
run = paceline.start(seed=1, precision="fp32", device="cpu", progress="off")
print("SETTINGS", json.dumps([run.settings.seed, run.settings.precision, str(run.settings.strategy)]))
"""


def run(folder: Path, script: Path, *arguments: str, launcher: Sequence[str] = ()) -> tuple[int, list[Any], str]:
    command = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ})
    lines = [line for line in done.stdout.splitlines() if "SETTINGS" in line]
    return done.returncode, [json.loads(line.split("SETTINGS ")[1]) for line in lines], done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """In a folder of its own; another one, with another file, is the current directory."""
    (tmp_path / "code").mkdir()
    (tmp_path / "cwd").mkdir()
    written(tmp_path / "cwd", "seed = 99\n")
    return written(tmp_path / "code", SCRIPT, "train.py")


@pytest.mark.conformance
def test_under_plain_python_the_file_beside_the_script_counts(script: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "cwd", script) == (0, [[1, "fp32", "None"]], ""), "and not that of the current directory"
    file = written(script.parent, 'seed = 2\nprecision = "bf16"\n')
    code, found, told = run(tmp_path / "cwd", script)
    assert (code, found) == (0, [[2, "bf16", "None"]])
    assert told.splitlines() == [
        f"paceline: seed=2 from {file} overrides 1 from the script",
        f"paceline: precision=bf16 from {file} overrides fp32 from the script",
    ]


@pytest.mark.conformance
def test_under_the_launcher_the_command_line_counts_most_and_rank_0_reports(script: Path, tmp_path: Path) -> None:
    file = written(script.parent, 'seed = 2\nprecision = "bf16"\n')
    launcher = ["-m", "paceline", "run", "--nproc", "2", "--seed", "3", "--strategy", "ddp:bucket_mb=5"]
    code, found, told = run(tmp_path / "cwd", script, launcher=launcher)
    assert code == 0, told
    assert found
    assert all(one == [3, "bf16", "ddp:bucket_mb=5"] for one in found)
    for note in (f"seed=2 from {file}", "seed=3 from the command line overrides 2", f"precision=bf16 from {file}"):
        assert told.count(note) == 1, told


@pytest.mark.conformance
def test_a_named_file_takes_the_place_of_the_one_beside(script: Path, tmp_path: Path) -> None:
    written(script.parent, 'seed = 2\nprecision = "bf16"\n')
    written(tmp_path / "cwd", "seed = 5\n", "other.toml")
    launcher = ["-m", "paceline", "run", "--config", "other.toml"]
    code, found, told = run(tmp_path / "cwd", script, launcher=launcher)
    assert (code, found) == (0, [[5, "fp32", "None"]]), told
    code, found, told = run(tmp_path / "cwd", script, launcher=["-m", "paceline", "run", "--config", "none.toml"])
    assert code != 0
    assert "none.toml' cannot be read: No such file" in told
    assert "Traceback" not in told


@pytest.mark.full
def test_a_faulty_file_is_named_without_our_own_frames(script: Path, tmp_path: Path) -> None:
    file = written(script.parent, 'precision = "bf61"\n')
    code, _, told = run(tmp_path / "cwd", script)
    assert code == 1
    assert "precision='bf61' is not known. Did you mean 'bf16'?" in told
    assert f"(Set by {file}.)" in told
    assert str(Path(paceline.__file__).parent) not in told


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    missing = [name for name in Settings.__dataclass_fields__ if f"| `{name}` |" not in page]
    assert not missing


@pytest.mark.parametrize(
    ("setting", "value", "meant"),
    [
        *(("precision", name, None) for name in ("fp8", "float8", "bf8", "fp64", "fp4", "int8", "nf4", "fp8-mixed")),
        ("precision", "fp23", "fp32"),
        ("precision", "bf-16", "bf16"),
        ("precision", "bf16-mixed", "bf16"),  # Lightning's, which is no bf16-params
        ("precision", "16-mixed", "fp16"),
        ("precision", "float32", "fp32"),
        ("batch_norm", "globl", "global"),
        ("batch_norm", "local", "shard"),  # and not "global", which looks like it
        ("noise", "exmaple", "example"),
        ("nonfinite", "warn", None),
    ],
)
def test_a_value_is_suggested_where_it_can_be_meant(setting: str, value: str, meant: str | None) -> None:
    with pytest.raises(SettingError) as caught:
        Settings(**{setting: value})  # type: ignore[arg-type]
    text = str(caught.value)
    assert f"{setting}={value!r} is not known. " in text
    assert "Known: " in text
    assert ("Did you mean" in text) == (meant is not None)
    assert meant is None or f"Did you mean {meant!r}?" in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model_parallel", "tensor"), ("dp", "data_parallel"), ("zero3", "fsdp"), ("allreduce", None), ("gpu", None),
        ("parameter-server", "parameter_server"), ("pipline", "pipeline"), ("local", "local_sgd"), ("fspd", "fsdp"),
    ],
)  # fmt: skip
def test_a_strategy_is_suggested_where_it_can_be_meant(name: str, meant: str | None) -> None:
    with pytest.raises(SettingError) as caught:
        check(parse_strategy(name), 2)
    assert str(caught.value).startswith(f"strategy={name!r} is not known. {'Did you mean' if meant else 'Known: '}")
    assert meant is None or f"Did you mean {meant!r}?" in str(caught.value)


def test_no_other_setting_is_suggested() -> None:
    for name in ("batch_size", "backend", "learning_rate"):
        with pytest.raises(SettingError, match=f"sets an unknown setting {name!r}. Known: "):
            resolve(("the script", {name: 1}))
