"""deepspeed: what is refused and how a config is merged, also without the library. Stages: test_deepspeed_stages.py."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import StrategySpec, parse_strategy
from paceline.errors import SettingError
from paceline.strategies import check, make
from paceline.strategies.deepspeed.deepspeed_build import warn_of_left_locks
from paceline.strategies.deepspeed.deepspeed_config import merged
from paceline.world import World

TWO = World(0, 2, 0, 2, 0, 1, "start()")


def start(text: str, world: World = TWO) -> None:
    make(parse_strategy(text), world, torch.device("cpu"))


def test_without_the_library_the_line_to_type_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r'pip install "paceline\[deepspeed\]"'):
        start("deepspeed")


def test_a_lock_that_a_killed_process_has_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baton = pytest.importorskip("torch.utils.file_baton")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_left_locks()
        held = baton.FileBaton(str(lock))
        assert held.try_acquire()
        warn_of_left_locks()  # it is being compiled, and will come to an end
    os.close(held.fd)  # as the kernel does when a process is killed
    with pytest.warns(UserWarning, match=f"a killed process left it.*rm {lock}"):
        warn_of_left_locks()


def test_it_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "Adam"}}')
    spec = StrategySpec("deepspeed", {"config": str(tmp_path / "ds.json")})
    with pytest.raises(SettingError, match=r"the optimizer passed to run\.prepare"):
        check(spec, None)
    with pytest.raises(SettingError, match="stage=4"):
        check(parse_strategy("deepspeed:stage=4"), 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r'pip install "paceline\[deepspeed\]"'):
        check(parse_strategy("deepspeed"), 2)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(SettingError, match=r"has no option 'stagee'. Did you mean 'stage'"):
        start("deepspeed:stagee=2")
    for stage in (4, -1):
        with pytest.raises(SettingError, match=f"stage={stage}: use 1 .shards optimizer state"):
            start(f"deepspeed:stage={stage}")
    with pytest.raises(SettingError, match="stage=5: use 1"):
        make(StrategySpec("deepspeed", {"stage": 5}), TWO, torch.device("cpu"))


def read(folder: Path, config: Any, stage: int = 0) -> dict[str, Any]:
    path = folder / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return merged(str(path), stage)


def test_a_config_is_merged(tmp_path: Path) -> None:
    plain = merged("", 0)
    assert plain["zero_optimization"]["stage"] == 2
    assert plain["gradient_clipping"] == 0.0  # DeepSpeed's own default is 1.0
    assert merged("", 3)["zero_optimization"]["stage"] == 3
    given = {
        "train_batch_size": "auto",
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "amp": {"enabled": "auto", "opt_level": "O1"},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 7,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": "auto",
            "offload_optimizer": {"device": "none"},
            "round_robin_gradients": False,
        },
    }
    zero = {**plain["zero_optimization"], "stage": 1, "reduce_bucket_size": 1000, "overlap_comm": True}
    assert (
        read(tmp_path, given) == read(tmp_path, given, 1) == {**plain, "steps_per_print": 7, "zero_optimization": zero}
    )
    assert read(tmp_path, {}, 3) == merged("", 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 32}, r"sets train_batch_size=32, .* with run.loader\(global_batch=...\). Remove"),
        ({"train_micro_batch_size_per_gpu": 4}, r"run.loader\(micro_batch=...\)"),
        ({"gradient_accumulation_steps": 2}, "sets gradient_accumulation_steps=2"),
        ({"gradient_clipping": 1.0}, "max_grad_norm="),
        ({"optimizer": {"type": "Adam"}}, "the optimizer passed to run.prepare"),
        ({"scheduler": {"type": "WarmupLR"}}, "the scheduler passed to run.prepare"),
        ({"fp16": {"enabled": True}}, "--precision fp16"),
        ({"bf16": {"enabled": True}}, "--precision bf16"),
        ({"compression_training": {}}, "'compression_training' is not supported"),
        ({"zero_optimisation": {}}, "Did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 0}}, "use strategy='ddp'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer is not"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients is not supported"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients is not supported"),
        ({"zero_optimization": 3}, "zero_optimization=3: use an object"),
        ("{", "is not JSON"),
        ("[]", "the top level must be an object"),
    ],
)
def test_a_config_that_contradicts_is_refused(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read(tmp_path, config)


def test_two_stages_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"stage=3, but config=.* sets zero_optimization.stage=1. Set it in one place"
    ):
        read(tmp_path, {"zero_optimization": {"stage": 1}}, 3)
    with pytest.raises(SettingError, match=r"nowhere.json cannot be read: No such file"):
        merged(str(tmp_path / "nowhere.json"), 0)
