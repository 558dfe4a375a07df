"""paceline export to safetensors and torch, and what it says to everything that cannot be. ONNX: test_onnx.py."""

from __future__ import annotations

import errno
import resource
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from tests.export.a_model import Net
from torch import nn

import paceline
from paceline.cli import main
from paceline.errors import ExportError, SettingError
from paceline.export import onnx_program
from paceline.export.user_model import own_inputs, random_inputs
from paceline.state import atomic, checkpoint

HERE = "tests.export.a_model"


def saved(folder: Path, **settings: Any) -> Net:
    """A checkpoint of two models and an average, at step 3."""
    run = paceline.start(progress="off", device="cpu", **settings)
    torch.manual_seed(4)
    first, second = Net(), nn.Linear(3, 2)
    run.prepare(first, second)
    average = torch.optim.swa_utils.AveragedModel(first)
    with torch.no_grad():
        next(iter(average.parameters())).mul_(3.0)
    run.track(ema=average, best=_Best())
    run.save(folder)
    run.export(folder / "run.safetensors", first)
    run.close()
    return first


class _Best:
    def state_dict(self) -> dict[str, Any]:
        return {"value": 3.5}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder)
    return folder


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def written(*arguments: object) -> str:
    code, said = call(*arguments)
    assert code == 0, said
    return said


def refused(*arguments: object) -> str:
    code, said = call(*arguments)
    assert code in (1, 2), said
    return said.partition("Error: ")[2]


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_plain_class_loads_the_file(kind: str, checkpoints: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "model.bin"
    said = written(checkpoints, "--name", "model_0", "--to", kind, "-o", file)
    assert "model_0 of" in said
    assert "step-00000000 (12 tensors, 666 numbers, float32)" in said
    state = load_file(file) if kind == "safetensors" else torch.load(file, weights_only=True)
    expected = load_file(checkpoints / "run.safetensors")  # what run.export writes
    assert state.keys() == expected.keys() == Net().state_dict().keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    model = Net()
    model.load_state_dict(state)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, expected["embed.weight"])
    if kind == "safetensors":
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}, "transformers asks for it"
    assert sorted(path.name for path in file.parent.iterdir()) == ["model.bin", "model.bin.sha256"]


def test_dtypes_and_the_ending_of_the_name(checkpoints: Path, tmp_path: Path) -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        written(checkpoints, "--name", 0, "-o", tmp_path / f"{name}.pt", "--dtype", name)
        state = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert {value.dtype for value in state.values()} == {dtype, torch.int64}, "a counter stays one"
        whole = load_file(checkpoints / "run.safetensors")
        assert all(torch.equal(state[key], whole[key].to(state[key].dtype)) for key in whole)


def test_an_average_that_was_tracked(checkpoints: Path, tmp_path: Path) -> None:
    written(checkpoints, "--name", "ema", "--prefix", "module.", "-o", tmp_path / "ema.safetensors")
    average = load_file(tmp_path / "ema.safetensors")
    Net().load_state_dict(average)
    assert torch.equal(average["embed.weight"], 3 * load_file(checkpoints / "run.safetensors")["embed.weight"])
    written(checkpoints, "--name", "ema", "-o", tmp_path / "whole.pt")
    torch.optim.swa_utils.AveragedModel(Net()).load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))


def test_several_models_are_told_apart(checkpoints: Path, tmp_path: Path) -> None:
    said = refused(checkpoints, "-o", tmp_path / "a.pt")
    assert "contains 2 models, in the order of run.prepare: model_0 (12 tensors, 666 numbers" in said
    assert "model_1 (2 tensors, 8 numbers, first 'weight'). Choose one: --name model_1." in said
    assert "no such model. Known: best, ema, model_0, model_1." in refused(checkpoints, "--name", "model_7")
    assert "is not a model's state_dict" in refused(checkpoints, "--name", "best")
    assert "no tensor of model_1 in" in refused(checkpoints, "--name", "1", "--prefix", "net.")


def test_state_that_is_no_tensor_is_told(tmp_path: Path) -> None:
    state = OrderedDict([("weight", torch.ones(2)), ("layer._extra_state", {"count": 3})])
    checkpoint.write(tmp_path, step=1, parts={"model_0": state})
    said = written(tmp_path, "-o", tmp_path / "a.safetensors")
    assert "left out, because safetensors stores only tensors: layer._extra_state (--to torch keeps it)" in said
    written(tmp_path, "-o", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["layer._extra_state"] == {"count": 3}


def test_numbers_that_fp16_cannot_hold_are_told(tmp_path: Path) -> None:
    checkpoint.write(
        tmp_path, step=1, parts={"model_0": {"scale": torch.tensor([1e6]), "no": torch.tensor([torch.inf])}}
    )
    said = refused(tmp_path, "--dtype", "fp16", "-o", tmp_path / "a.pt")
    assert "--dtype fp16: scale contains 1e+06, and the largest number of fp16 is 6.55e+04. Export as bf16" in said
    written(tmp_path, "--dtype", "bf16", "-o", tmp_path / "a.pt")


# What is no checkpoint


def test_paths_that_are_no_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    written(checkpoints, "--name", 0, "-o", tmp_path / "hf" / "model.safetensors")
    said = refused(tmp_path / "hf" / "model.safetensors", "-o", tmp_path / "a.pt")
    assert "is a file, and a checkpoint is a directory. It looks like weights that were already exported." in said
    assert "holds no checkpoint (a directory named like step-00000042). It contains: model.safetensors" in refused(
        tmp_path / "hf"
    )
    assert "does not exist, so there is no checkpoint" in refused(tmp_path / "nowhere")


def test_damage_is_told_with_its_hashes_and_the_older_checkpoint_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, step=step, parts={"model_0": {"weight": torch.full((2,), float(step))}})
    file = tmp_path / "step-00000002" / "model_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = written(tmp_path, "-o", tmp_path / "a.safetensors")
    assert "Warning: a newer checkpoint is damaged and was skipped:" in said
    assert "model_0.safetensors: expected sha256" in said
    assert load_file(tmp_path / "a.safetensors")["weight"].tolist() == [1.0, 1.0]
    said = refused(tmp_path / "step-00000002", "-o", tmp_path / "b.safetensors")
    assert "holds no intact checkpoint" in said
    assert "found" in said
    assert not (tmp_path / "b.safetensors").exists()


# Where it cannot be written


def test_nothing_is_overwritten_unless_it_is_told_so(checkpoints: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_text("mine")
    assert f"{file} exists. Give another name (-o FILE), or replace it with --force" in refused(
        checkpoints, "--name", 0, "-o", file
    )
    assert file.read_text() == "mine"
    written(checkpoints, "--name", 0, "-o", file, "--force")
    assert "weight" in str(torch.load(file, weights_only=True).keys())
    assert "it is a directory; give the name of a file" in refused(checkpoints, "--name", 0, "-o", tmp_path)
    assert "could not be exported to" in refused(checkpoints, "--name", 0, "-o", "/proc/model.pt")
    assert "could not be exported to" in refused(checkpoints, "--name", 0, "-o", file / "model.pt")


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_full_disk_leaves_no_half_a_file(kind: str, checkpoints: Path, tmp_path: Path) -> None:
    said = refused(checkpoints, "--name", 0, "--to", kind, "-o", tmp_path / "model")
    assert f"could not be exported to {tmp_path / 'model'}: File too large. " in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call_name", ["fsync", "replace"])
def test_an_interrupt_leaves_the_old_file(
    call_name: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.pt"
    file.write_text("mine")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, call_name, interrupted)
    code, said = call(checkpoints, "--name", 0, "-o", file, "--force")
    assert (code, "Aborted!" in said) == (1, True)
    monkeypatch.undo()
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


# Options, and the user's module. None of these needs the packages of ONNX.


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_program, "require_packages", lambda: None)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--to", "torch", "-o", "a.onnx"], "--to torch and -o a.onnx: .onnx is the extension of --to onnx."),
        (["-o", "weights.bin"], "-o weights.bin: no format has the extension .bin. Add --to safetensors, torch or"),
        (["--to", "torch", "--model", "a:b"], "--model is only for --to onnx. --to torch needs only the checkpoint"),
        (["--to", "onnx"], "--to onnx needs the model's code, which a checkpoint does not contain: give --model"),
        (["--model", f"{HERE}:Net"], "--input SHAPE for each input"),
        (["--model", f"{HERE}:Net", "--input", "1x4", "--inputs", "a:b"], "give either --input SHAPE for each input"),
        (["--model", "Net", "--input", "1x4"], "--model 'Net': give MODULE:NAME or FILE.py:NAME"),
        (["--model", "absent:Net", "--input", "1x4"], "there is no module 'absent', seen from"),
        (["--model", "placeholders.py:Net", "--input", "1x4"], "there is no file placeholders.py"),
        (["--model", f"{HERE}:Nett", "--input", "1x4"], "has no 'Nett'. Did you mean 'Net'?"),
        (["--model", f"{HERE}:needs", "--input", "1x4"], "calls it without arguments, but it needs width"),
        (["--model", f"{HERE}:broken", "--input", "1x4"], "in broken: ValueError: no weights.bin"),
        (["--model", f"{HERE}:examples", "--input", "1x4"], "a torch.nn.Module is needed, but it returned Tensor"),
        (["--model", f"{HERE}:a_number", "--input", "1x4"], "a torch.nn.Module is needed, but it returned int"),
        (["--model", f"{HERE}:wide", "--input", "1x4"], "embed.weight is (20, 8), in the model (20, 12)"),
        (["--model", f"{HERE}:Inside", "--input", "1x4"], "Name the inner module, without 'net.' before"),
        (["--model", "torch.nn:Identity", "--input", "1x4"], "the checkpoint has 12 that the model lacks: scale,"),
        (["--model", f"{HERE}:Net", "--input", "1x4"], "Net fails on inputs of (8, 4) float32: "),
        (["--model", f"{HERE}:Net", "--input", "x=1x4:int64"], "unexpected keyword argument 'x'"),
        (["--model", f"{HERE}:Net", "--input", "1,4"], "--input '1,4': give SHAPE[:DTYPE[:LIMIT]]"),
        (["--model", f"{HERE}:Net", "--input", "1x4:in64"], "'in64' is not a dtype. Did you mean 'int64'?"),
        (["--model", f"{HERE}:Net", "--inputs", f"{HERE}:Net"], "it returned Net. Return a tensor, a tuple of tensors"),
        (["--model", f"{HERE}:Net", "--inputs", f"{HERE}:uneven"], "but the shapes are (3, 4), (2, 4)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(options: list[str], told: str, checkpoints: Path, tmp_path: Path) -> None:
    end = [] if "-o" in options else ["-o", tmp_path / "made"]
    assert told in refused(checkpoints, "--name", 0, *options, *end)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("packages")
def test_names_that_begin_otherwise_are_put_right(checkpoints: Path) -> None:
    said = refused(checkpoints, "--name", "ema", "--model", f"{HERE}:Net", "--input", "1x4:int64")
    assert "Net does not match ema in " in said
    assert "Add --prefix 'module.', which removes it from the checkpoint's names." in said


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "import paceline\nrun = paceline.start()",
            "trainer.py, line 2, in <module>: UsageError: paceline export imports",
        ),
        ("import sys\nsys.exit('usage: -h')", "__main__"),
        ("def half(", "SyntaxError"),
        ("import no_such_package", "Install no_such_package"),
    ],
)
def test_a_script_does_not_run(
    text: str, told: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "trainer.py").write_text(text)
    options = ("--name", 0, "--model", f"{tmp_path / 'trainer.py'}:Net", "--input", "1x4")
    assert told in refused(checkpoints, *options)
    sys.modules.pop("trainer", None)


def test_packages_that_are_missing_are_named(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_program.importlib.util, "find_spec", lambda name: None)
    said = refused(checkpoints, "--name", 0, "--model", f"{HERE}:Net", "--input", "1x4:int64")
    assert "--to onnx needs onnx and onnxscript: pip install 'paceline[onnx]'." in said


def test_random_inputs_are_as_described() -> None:
    inputs = random_inputs(["1x3x4", "5:int64:7", "mask=1x2:bool"])
    assert [tuple(one.shape) for one in inputs.tensors] == [(8, 3, 4), (8,), (8, 2)]
    assert inputs.args[1].max() < 7
    assert inputs.kwargs["mask"].dtype == torch.bool
    nine = inputs.of(9, torch.float16)
    assert [len(one) for one in nine.tensors] == [9, 9, 9]
    assert (nine.args[0].dtype, nine.args[1].dtype) == (torch.float16, torch.int64)
    assert torch.equal(nine.args[1][8], inputs.args[1][0]), "taken in turn"
    with pytest.raises(SettingError, match="put inputs without a name before"):
        random_inputs(["mask=1x2", "1x3"])
    with pytest.raises(SettingError, match="a limit is only for integers"):
        random_inputs(["1x3:float:4"])
    assert list(own_inputs(f"{HERE}:by_name").kwargs) == ["ids", "mask"]
    with pytest.raises(ExportError, match="first dimension of every input"):
        own_inputs(f"{HERE}:uneven")


def test_the_errors_of_the_system_keep_their_remedy(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(paceline.errors.CheckpointError, match=r"No space left on device.*Free some space"):
        atomic.write_whole(tmp_path / "file", full, "It could not be written to")
    assert list(tmp_path.iterdir()) == []
