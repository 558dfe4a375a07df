"""paceline plan: a real measurement of scripts, and its table and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.compare import small
from tests.planning.test_cost_model import MODEL

from paceline.cli import main
from paceline.compare.cases import Case
from paceline.compare.rounds import run_trial
from paceline.config import parse_strategy
from paceline.launcher.interrupts import Interrupts
from paceline.planning.cluster import Cluster
from paceline.planning.cost_model import Job
from paceline.planning.measurement import Measurement, read_measurement_file
from paceline.planning.plan_command import cost_of
from paceline.trials.start import Length, Script

SCRIPT = str(Path(__file__).parent / "gpt2.py")
GPUS = ("--nodes", "2", "--gpus", "4", "--gpu", "h100", "--node-bandwidth", "400GB/s")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], catch_exceptions=False)


@pytest.fixture
def earlier(tmp_path: Path) -> str:
    """A file with a measurement."""
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"measurement": MODEL.to_json()}))
    return str(path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any, Measurement]:
    """Of the script with GPT-2: the output, the document, and its measurement."""
    folder = tmp_path_factory.mktemp("plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = plan(*GPUS, "--device", "cpu", "--steps", "4", "--json", "plan.json", SCRIPT)
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.iterdir()] == ["plan.json"], "the script's own files are not written"
    path = folder / "plan.json"
    return result, json.loads(path.read_text()), read_measurement_file(str(path))


@pytest.mark.conformance
def test_a_script_of_transformers(planned: tuple[Result, Any, Measurement]) -> None:
    """Tied weights count once. FLOPs: 6 per weight of a product and token, and attention's 12 x layers x width x
    length (the backward as twice the forward)."""
    from tests.planning import gpt2  # imports transformers

    _, _, found = planned
    model = gpt2.build()
    assert found.parameter_bytes == 4 * model.num_parameters()
    layers, width, length = (gpt2.CONFIG[key] for key in ("n_layer", "n_embd", "n_positions"))
    weights = layers * 12 * width**2 + width * gpt2.CONFIG["vocab_size"]
    expected = length * (6 * weights + 12 * layers * width * length)
    assert found.flops == pytest.approx(expected, rel=0.02)
    assert [layer.name for layer in found.layers] == [f"transformer.h.{i}" for i in range(layers)]
    assert found.cuts[2].parameter_bytes > 0, "attention and MLPs can be split"
    assert found.example_activation_bytes > 4 * length * gpt2.CONFIG["vocab_size"], "at least the logits"


@pytest.mark.conformance
def test_the_table_and_the_file_agree(planned: tuple[Result, Any, Measurement]) -> None:
    result, document, _ = planned
    rows = {row["name"]: row for row in document["rows"] if row["failed"] is None}
    assert {"ddp", "fsdp:stage=1", "fsdp:stage=3", "fsdp:stage=3,replicate=2", "tensor:size=2", "diloco:every=100"} <= {
        *rows
    }
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line and line.split()[0] in rows}
    assert set(lines) == set(rows)
    for name, row in rows.items():
        assert row["runs_out_first"] in lines[name]
        assert row["memory_bytes"]["total"]["low"] < 80e9
        seconds = row["step_seconds"]
        assert 0 < seconds["low"] <= seconds["middle"] <= seconds["high"]
    assert "The measured seconds are not used" in " ".join(result.stdout.split())
    assert "but the step ran in fp32: add --precision bf16" in " ".join(result.stdout.split())
    assert re.search(r"deepspeed: not modelled", result.stdout)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp:reducer=native", marks=pytest.mark.full),
        pytest.param("fsdp:stage=1", marks=pytest.mark.full),
        pytest.param("fsdp:stage=3", marks=pytest.mark.conformance),
    ],
)
def test_counted_bytes_of_a_real_run(strategy: str, planned: tuple[Result, Any, Measurement]) -> None:
    """Bytes that the kernel counts on the connections of two processes. The rest is control messages."""
    _, _, found = planned
    length = Length(6, 2, 120.0)
    with Interrupts() as interrupts:
        case = Case(strategy, parse_strategy(strategy), 2)
        records = run_trial(Script(SCRIPT, (), False, {"device": "cpu"}), case, length, interrupts)
    assert isinstance(records, list), records
    sent = max(record["bytes_sent"] for record in records) / (length.steps - length.warmup)
    cluster = Cluster(1, 2, bandwidth=1e9, shares_cores=True)
    predicted = cost_of(parse_strategy(strategy), Job(found, cluster, found.examples)).sent_bytes
    assert sent == pytest.approx(predicted, rel=0.03)


def test_an_earlier_measurement_needs_no_script(earlier: str, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    result = plan("--from", earlier, *GPUS, "--global-batch", "4", "--json", str(again))
    assert result.exit_code == 0
    document = json.loads(again.read_text())
    assert document["global_batch"] == 4
    ddp = next(row for row in document["rows"] if row["name"] == "ddp")
    assert ddp["notes"] == ["the batch of 4 examples is smaller than the number of its shards"]
    assert ddp["used"]["batch"] == 2
    assert plan("--from", str(again), *GPUS).exit_code == 0, "a plan's file has a measurement too"


def test_the_fastest_that_fits_comes_first(earlier: str) -> None:
    result = plan("--from", earlier, "--gpus", "4", "--bandwidth", "1GB/s", "--memory", "150MB")
    names = [line.split()[0] for line in result.stdout.splitlines()[3:5]]
    assert "ddp" not in names, "its 240 MB do not fit"
    assert re.search(r"Does not fit:\n  .*\bddp\b", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a SCRIPT to measure, or --from FILE"),
        (["--from", "EARLIER", SCRIPT], "give a SCRIPT to measure, or --from FILE"),
        (["nothing.py"], "nothing.py"),
        (["--gpus", "2", SCRIPT], "--bandwidth is missing"),
        (["--steps", "1", SCRIPT], "--steps 1: give at least 3"),
        (["--deadline", "0", SCRIPT], "--deadline 0: give a number of seconds"),
        (["--global-batch", "0", SCRIPT], "--global-batch 0: give at least 1"),
        (["--measured-batch", "-1", SCRIPT], "--measured-batch -1: give at least 1"),
        (["--strategies", "shared", SCRIPT], "shared is not modelled"),
        (["--from", "none.json"], "--from none.json: cannot read it"),
        (["--json", "/nowhere/x.json", SCRIPT], "cannot write"),
        (["--from", "EARLIER", "--strategies", "tensor"], "no strategy can run: tensor"),
    ],
)
def test_bad_commands(arguments: list[str], message: str, earlier: str) -> None:
    result = plan(*(earlier if word == "EARLIER" else word for word in arguments))
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.conformance
def test_a_script_that_cannot_be_measured(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("print('no run')\n")
    result = plan(str(other))
    assert result.exit_code == 1
    assert "never called paceline.start" in result.output
    result = plan("--deadline", "1", str(Path(small.__file__)), "hang")
    assert result.exit_code == 1
    assert "could not be measured: not done after 1" in result.output
