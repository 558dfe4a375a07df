"""paceline compare: real trials of a small script, and what they leave."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from tests.compare import small
from tests.compare.test_compare_figures import row as row_of

from paceline.cli import main
from paceline.compare import compare_command
from paceline.compare.figures import Row
from paceline.launcher.interrupts import Interrupts
from paceline.strategies import STRATEGIES

SCRIPT = str(Path(small.__file__))
STEPS = 8
DDP = "ddp:reducer=native"  # what one machine's processes sum in shared memory is not sent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Result:
    """single, ddp, one that fails and one whose library is missing: from an empty folder, which has another empty one
    for temporary files."""
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TMPDIR", str(folder / "tmp"))
        patch.setattr("tempfile.tempdir", None)
        patch.setitem(sys.modules, "deepspeed", None)  # not installed, as far as importlib can see
        options = ["--nproc", "2", "--strategies", f"{DDP},pipeline:cut=9,deepspeed,single", "--steps", str(STEPS)]
        options += ["--rounds", "1", "--device", "cpu", "--json", "out.json", "--html", "out.html"]
        result = compare(*options, SCRIPT)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def document(folder: Path, compared: Result) -> Any:
    return json.loads((folder / "out.json").read_text())


def rows(document: Any) -> dict[str, Any]:
    return {row["name"]: row for row in document["rows"]}


@pytest.mark.conformance
def test_a_trial_leaves_nothing_of_the_scripts(folder: Path, compared: Result) -> None:
    """No checkpoint, no export, no log, no temporary file."""
    assert sorted(path.name for path in folder.iterdir()) == ["out.html", "out.json", "tmp"]
    assert list((folder / "tmp").glob("paceline*")) == []


def test_the_table_and_the_sentence(compared: Result, document: Any) -> None:
    lines = compared.stdout.splitlines()
    assert [line.split()[0] for line in lines[4:6]] == ["single", DDP]
    assert "epoch" not in compared.output  # what the script prints
    reason = "SettingError: strategy pipeline: cut='9': 2 stages need 1 split point"
    assert f"  pipeline:cut=9: {reason}" in compared.stdout
    assert rows(document)["pipeline:cut=9"]["failed"].startswith(reason)
    assert "  deepspeed: strategy deepspeed needs DeepSpeed, which is not installed" in compared.stdout
    assert document["verdict"] is None  # from one round
    assert lines[-1] == document["no_verdict"]
    assert lines[-1].startswith("No recommendation: one round does not show")
    assert "Why losses differ" not in compared.stdout
    assert compared.stderr.splitlines()[0].startswith("round 1 of 1: single ... ")


def test_losses_are_those_of_plain_pytorch(document: Any) -> None:
    model, data = small.network(), small.Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=small.LR)
    wanted = []
    for step in range(STEPS):
        first = step * small.GLOBAL_BATCH % small.EXAMPLES
        part = slice(first, first + small.GLOBAL_BATCH)
        loss = small.loss_fn(model, (data.x[part], data.y[part]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for name in ("single", DDP):
        losses = [entry["loss"] for entry in rows(document)[name]["losses"]]
        assert losses == pytest.approx(wanted, rel=1e-12), name
    found = rows(document)[DDP]["loss_difference"]
    own, base = ([entry["loss"] for entry in rows(document)[name]["losses"]] for name in (DDP, "single"))
    assert found == max(abs(a - b) for a, b in zip(own, base, strict=True))
    assert found <= 1e-12


def test_times_and_bytes(document: Any) -> None:
    single, ddp = rows(document)["single"], rows(document)[DDP]
    for row, examples in ((single, 32), (ddp, 16)):
        step, parts = row["step_seconds"], row["mean_step"]
        assert parts["waiting_for_data_seconds"] >= examples * 1e-3  # each example sleeps 1 ms
        assert step["mean"] > parts["waiting_for_data_seconds"]
        assert step["median"] <= step["p95"]
        whole = parts["compute_seconds"] + parts["waiting_for_data_seconds"] + parts["communicating_seconds"]
        assert whole == pytest.approx(step["mean"], rel=1e-6)
        assert row["examples_per_second"] == pytest.approx(small.GLOBAL_BATCH / step["mean"], rel=0.05)
        assert row["start_up_seconds"] > 0.2
        assert len(row["peak_memory_bytes_by_rank"]) == row["processes"]
        assert min(row["peak_memory_bytes_by_rank"]) > 50e6  # torch alone is more
    parameter_bytes = sum(p.nbytes for p in small.network().parameters())
    assert single["parameter_bytes"] == ddp["parameter_bytes"] == parameter_bytes
    assert single["wire_bytes_per_step"] == 0
    assert single["mean_step"]["communicating_seconds"] == 0
    # 2 (n - 1) / n of the gradients' bytes, sent by each of n = 2.
    assert ddp["wire_bytes_per_step"] == pytest.approx(2 * parameter_bytes, rel=0.03)
    assert ddp["mean_step"]["communicating_seconds"] > 0


def test_the_page_says_the_same_as_the_terminal(folder: Path, compared: Result, document: Any) -> None:
    page = (folder / "out.html").read_text(encoding="utf-8")
    assert f"1 round of {STEPS} steps each" in page
    assert document["no_verdict"] in page
    assert '["Did not run","Did not run"],["pipeline:cut=9","deepspeed"]' in page


@pytest.mark.full
@pytest.mark.timeout(300)  # it launches every strategy
def test_every_strategy_is_a_row_where_a_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    result = compare("--nproc", "2", "--steps", "3", "--rounds", "1", "--device", "cpu", "--json", "out.json", SCRIPT)
    assert result.exit_code == 0, result.output
    found = rows(json.loads((tmp_path / "out.json").read_text()))
    assert {row["strategy"].partition(":")[0] for row in found.values()} >= set(STRATEGIES) - {"fsdp+tensor"}
    assert "DeepSpeed, which is not installed" in found["deepspeed"]["failed"]
    assert sum("examples_per_second" in row for row in found.values()) >= 8


@pytest.mark.full
def test_the_losses_of_a_model_with_dropout_differ_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--nproc", "2", "--strategies", "ddp", "--steps", "4", "--rounds", "1", "--device", "cpu"]
    result = compare(*options, "--json", "out.json", SCRIPT, "dropout")
    assert result.exit_code == 0, result.output
    found = rows(json.loads((tmp_path / "out.json").read_text()))
    cause = found["ddp"]["loss_difference_cause"]
    assert cause.startswith("the model or the loss draws random numbers (such as dropout)")
    assert found["single"]["loss_difference_cause"] is None
    assert "Why losses differ:\n  ddp: the model or the loss draws" in result.stdout


def test_a_file_that_cannot_be_written_takes_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the JSON is written: the table and the page are there, and the exit code is 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_command, "run_rounds", lambda *_: [row_of("single", 100.0, 0.0)])
    monkeypatch.setattr(compare_command, "write_json", full)
    result = compare(
        "--nproc", "1", "--strategies", "single", "--device", "cpu", "--json", "out.json", "--html", "out.html", SCRIPT
    )
    assert result.exit_code == 1, result.output
    assert "cannot write out.json: OSError: [Errno 28] No space left on device" in result.stderr
    assert "\nsingle  " in result.stdout
    assert (tmp_path / "out.html").exists()


def test_what_was_measured_before_ctrl_c_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(options: Any, asked: Any, length: Any, interrupts: Interrupts) -> list[Row]:
        interrupts.received.append(signal.SIGINT)
        return [row_of("single", 100.0, 0.0, made=2), row_of("ddp", 190.0, made=1)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_command, "run_rounds", stopped)
    result = compare("--nproc", "1", "--strategies", "ddp", "--json", "out.json", SCRIPT)
    assert result.exit_code == 130
    assert "\nddp  " in result.stdout
    assert "interrupted; all ranks have ended" in result.stderr
    assert list(rows(json.loads((tmp_path / "out.json").read_text()))) == ["single", "ddp"]


def full(path: str, document: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("missing", ["plotly", "plotly.io"])
def test_a_page_that_cannot_be_made_is_refused_before_anything_is_measured(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    result = compare("--html", "out.html", SCRIPT)
    assert result.exit_code == 2
    assert "pip install" in result.stderr
    assert "round 1" not in result.stderr


@pytest.mark.conformance
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt install chromium)")
def test_the_page_in_chromium(folder: Path, compared: Result, tmp_path: Path) -> None:
    """Offline and from one file: every chart is drawn, the script raises no error, and a picture is taken."""
    assert CHROMIUM is not None
    page = folder / "out.html"
    assert "<script src" not in page.read_text(encoding="utf-8")
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    common += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path}/profile",
        "--enable-logging=stderr",
    ]
    picture = tmp_path / "page.png"
    options = ["--window-size=1280,1800", f"--screenshot={picture}", "--dump-dom", page.as_uri()]
    done = subprocess.run([*common, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Uncaught" not in done.stderr, done.stderr
    drawn = done.stdout if "main-svg" in done.stdout else _dom(common, page)
    titles = ("Examples per second", "Mean step time", "Peak memory", "Bytes sent per step", "Loss")
    for title in titles:
        assert f">{title}" in drawn, title
    assert drawn.count('class="table"') == 3, "the sentence, the figures, and what did not run"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 30_000  # an empty page has some 5,000


def _dom(common: list[str], page: Path) -> str:
    done = subprocess.run([*common, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.conformance
def test_a_script_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = compare("--nproc", "1", "--strategies", "single", "--deadline", "3", "--device", "cpu", SCRIPT, "hang")
    assert result.exit_code == 1
    assert "single: not done after 3 s (rank 0 is at small.py, line" in " ".join(result.stdout.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.conformance
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "compare", "--nproc", "2", "--strategies", "ddp", "--device", "cpu"]
    command += ["--steps", "100000", SCRIPT]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        parent = psutil.Process(process.pid)
        deadline = time.monotonic() + 40
        while not any("launcher.worker" in " ".join(_command(child)) for child in parent.children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        children = parent.children(recursive=True)
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
        assert process.wait(15) == 130
    assert "interrupted; all ranks have ended" in told
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert list((tmp_path / "tmp").glob("paceline*")) == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "ddpp", SCRIPT], "--strategies: 'ddpp' is not known. Did you mean 'ddp'?"),
        (["--strategies", ",", SCRIPT], "contains no name"),
        (["--precision", "bf61", SCRIPT], "--precision: 'bf61' is not known. Did you mean 'bf16'?"),
        (["--global-batch", "64,x", SCRIPT], "'x' is not a number of examples"),
        (["--steps", "2", SCRIPT], "--steps 2: give at least 3"),
        (["--rounds", "0", SCRIPT], "--rounds 0: give at least 1"),
        (["--deadline", "0", SCRIPT], "--deadline 0: give a number of seconds"),
        (["--nproc", "none", SCRIPT], "--nproc none"),
        (["nowhere.py"], "There is no script 'nowhere.py'"),
        (["--json", "/nowhere/out.json", SCRIPT], "cannot write '/nowhere/out.json'"),
        (["--device", "tpu0", "--strategies", "ddp:no_such=1", "--seed", "-1", SCRIPT], "seed=-1"),
    ],
)
def test_bad_usage(arguments: list[str], message: str) -> None:
    result = compare(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
