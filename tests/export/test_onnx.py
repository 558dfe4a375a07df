"""paceline export --to onnx: onnxruntime beside the model in PyTorch, and models that cannot be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.export.a_model import Named, Net

import paceline
from paceline.cli import main
from paceline.errors import ExportError
from paceline.export import export_command, onnx_check
from paceline.state import checkpoint

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]
for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="ONNX is an extra: pip install 'paceline[onnx]'")

HERE = "tests.export.a_model"
IDS = "1x4:int64:20"


def trained(strategy: str | None, folder: Path) -> None:
    """A checkpoint after some steps, by which batch norm has statistics and weights are no longer those of a seed."""
    run = paceline.start(strategy=strategy, progress="off", device="cpu", seed=2)
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randint(20, (48, 4)), torch.randint(20, (48,)))
    for batch in run.loader(data, global_batch=12):
        run.forward_backward(lambda model, b: torch.nn.functional.cross_entropy(model(b[0]), b[1]), model, batch)
        run.step(optimizer)
    run.save(folder)
    run.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trained")
    trained(None, made)
    return made


def weights(folder: Path, kind: type[Net] = Net) -> Net:
    model = kind()
    model.load_state_dict(checkpoint.read(checkpoint.find(folder).path)[1]["model_0"])
    return model.eval()


def outputs(file: Path, **given: torch.Tensor) -> list[torch.Tensor]:
    """What onnxruntime computes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(one) for one in session.run(None, {name: one.numpy() for name, one in given.items()})]


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def refused(folder: Path, tmp_path: Path, name: str, *more: object, given: str = IDS) -> str:
    code, said = command(folder, "-o", tmp_path / "a.onnx", "--model", f"{HERE}:{name}", "--input", given, *more)
    assert code == 1, said
    assert list(tmp_path.iterdir()) == []
    return said


@pytest.mark.ranks(conformance=2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_files_from_checkpoints_of_any_strategy_compute_what_the_model_does(strategy: str, tmp_path: Path) -> None:
    trained(strategy, tmp_path / "saved")
    if torch.distributed.get_rank():
        return
    model = weights(tmp_path / "saved")
    for dtype, tolerance in (("fp32", 1e-5), ("fp16", 2e-2)):
        file = tmp_path / f"{dtype}.onnx"
        options = {"model": f"{HERE}:Net", "input": [IDS], "dtype": dtype, "output": str(file), "check": True}
        said: list[str] = []
        export_command.export(export_command.ExportOptions(str(tmp_path / "saved"), **options), said.append)
        assert "at batch 1" in said[-1]
        assert "at batch 7" in said[-1]
        for batch in (1, 2, 7, 30):
            ids = torch.randint(20, (batch, 4))
            with torch.no_grad():
                expected = model(ids)
            (found,) = outputs(file, ids=ids)
            assert found.dtype == export_command.DTYPES[dtype]
            assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()
    assert (tmp_path / "fp16.onnx").stat().st_size < (tmp_path / "fp32.onnx").stat().st_size


def test_inputs_and_outputs_have_their_names(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "named.onnx"
    code, said = command(folder, "-o", file, "--model", f"{HERE}:Named", "--inputs", f"{HERE}:by_name")
    assert code == 0, said
    for line in ("input  ids  int64 (batch, 4)", "input  mask  float (batch, 20)", "output logits  float (batch, 20)"):
        assert line in said
    assert "integers differ" in said
    ids, mask = torch.randint(20, (3, 4)), torch.rand(3, 20)
    with torch.no_grad():
        expected = weights(folder, Named)(ids, mask)
    logits, best = outputs(file, ids=ids, mask=mask)
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-6)
    assert best.equal(expected["best"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named.onnx", "named.onnx.sha256"]


def test_bf16_is_written_for_other_runtimes(folder: Path, tmp_path: Path) -> None:
    """onnxruntime's CPU kernels take it for some operators only. What does not run is not kept, unless one asks."""
    given = (folder, "-o", tmp_path / "a.onnx", "--model", f"{HERE}:Net", "--input", IDS, "--dtype", "bf16")
    code, said = command(*given, "--no-check")
    assert code == 0, said
    assert "bfloat16 (batch, 20)" in said
    assert "not checked" in said


def test_large_weights_go_into_a_file_beside(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_command, "_IN_ONE_FILE", 100)
    file = tmp_path / "big.onnx"
    code, said = command(folder, "-o", file, "--model", f"{HERE}:Net", "--input", IDS)
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data", "big.onnx.sha256"]
    ids = torch.randint(20, (3, 4))
    with torch.no_grad():
        torch.testing.assert_close(outputs(file, ids=ids)[0], weights(folder)(ids), rtol=1e-5, atol=1e-6)


def test_an_operator_that_onnx_has_not_is_named_with_its_line(folder: Path, tmp_path: Path) -> None:
    said = refused(folder, tmp_path, "Bessel")
    assert "--to onnx: ONNX has no counterpart of the operator prims::bessel_j0, which Bessel uses at " in said
    assert "a_model.py, line " in said
    assert "# the operator" in said


def test_control_flow_that_looks_at_values_is_named_with_its_line(folder: Path, tmp_path: Path) -> None:
    said = refused(folder, tmp_path, "Branch")
    assert "the computation of Branch depends on the values of its input at " in said
    assert "# the branch" in said
    assert "torch.where" in said


def test_a_batch_that_is_a_constant_is_told(folder: Path, tmp_path: Path) -> None:
    assert "OneSize turns the number of examples into a constant (5 during tracing)" in refused(
        folder, tmp_path, "OneSize"
    )


def test_a_model_that_is_not_the_same_each_time_is_found_by_the_check(folder: Path, tmp_path: Path) -> None:
    said = refused(folder, tmp_path, "Restless")
    assert "--check: the file does not compute the same as the model: at batch 1 outputs differ by up to" in said
    assert "No file was written" in said


def test_other_weights_are_found_by_the_check(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = onnx_check.expected

    def other(model: Any, *arguments: Any) -> Any:
        found = real(model, *arguments)
        with torch.no_grad():
            model.out.bias.add_(1.0)
        return found

    monkeypatch.setattr(onnx_check, "expected", other)
    assert "--check: the file does not compute the same as the model" in refused(folder, tmp_path, "Net")


def test_a_file_that_onnxruntime_cannot_run_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_check, "input_names", lambda *_: ["absent"])
    said = refused(folder, tmp_path, "Net")
    assert "--check: onnxruntime " in said
    assert "cannot run the file on a CPU: " in said


def test_what_the_exporter_prints_is_not_shown(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = export_command.ExportOptions(
        str(folder), output=str(tmp_path / "a.onnx"), model=f"{HERE}:Branch", input=[IDS]
    )
    with pytest.raises(ExportError):
        export_command.export(options)
    assert capfd.readouterr() == ("", "")
