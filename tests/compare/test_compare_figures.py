"""From records to figures to a sentence: pure functions, against sums done by hand."""

from __future__ import annotations

import datetime
import math
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.compare import rounds
from paceline.compare.cases import (
    Case,
    CompareOptions,
    baseline_case,
    make_cases,
    read_batches,
    read_precisions,
    read_strategies,
)
from paceline.compare.document import make_document
from paceline.compare.figures import (
    Figures,
    Row,
    communication_shares,
    compute_figures,
    examples_per_second,
    loss_difference,
    mean_losses,
    percentile,
    wire_bytes,
)
from paceline.compare.html_page import render_page
from paceline.compare.loss_causes import cause_of_difference
from paceline.compare.recommendation import recommend, why_none
from paceline.compare.table import render_table
from paceline.config import StrategySpec
from paceline.errors import SettingError
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.strategies import STRATEGIES
from paceline.trials.start import Length, Script
from paceline.trials.trial import one_line_reason


def step(number: int, parts: list[tuple[int, int, int]], *, total: int = 8, **values: Any) -> dict[str, Any]:
    known = {"epoch": 0, "step": number, "total": total, "parts": parts, "timed": number > 0}
    return known | {"seconds": 0.5, "waited": 0.1, "losses": {}} | values


def record(steps: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"rank": 0, "device": "cpu", "start_up_seconds": 2.0, "memory_bytes": 100}
    known |= {"memory_kind": "resident", "bytes_sent": 0, "bytes_received": 0, "parameter_bytes": 40}
    known |= {"communication": {"operations": 0, "seconds": 0.0, "exposed": 0.0}, "profiled_seconds": 1.0}
    return known | {"steps": steps} | values


def printed(rows: list[Row]) -> str:
    options = CompareOptions(Script("x.py", (), False, {}), 1)
    return render_table(make_document(options, 1, Length(3, 1, 9.0), rows)["rows"])


# --- examples, bytes, time


def test_replicas_have_a_shard_each() -> None:
    """4 examples in 0.5 s on one rank, 4 in 1 s on the other. The step that is not timed does not count."""
    fast = record([step(n, [(0, 0, 4)]) for n in range(3)])
    slow = record([step(n, [(1, 0, 4)], seconds=1.0) for n in range(3)])
    assert examples_per_second([fast, slow]) == pytest.approx(8 + 4)


def test_stages_share_a_shard() -> None:
    stages = [record([step(n, [(0, 0, 4), (0, 1, 4)]) for n in range(3)]) for _ in range(2)]
    assert examples_per_second(stages) == pytest.approx(16)


def test_workers_that_are_not_in_step_count_what_they_computed() -> None:
    """Three parts in 0.5 s each on one rank, while the other computes one in 1.5 s."""
    fast = record([step(n, [(0, 0, 4)]) for n in range(4)])
    slow = record([step(n, [(1, 0, 4)], seconds=1.5) for n in range(2)])
    assert examples_per_second([fast, slow, record([])]) == pytest.approx(8 + 4 / 1.5)


def test_bytes_of_a_step() -> None:
    ranks = [record([step(n, []) for n in range(5)], bytes_sent=40, bytes_received=30) for _ in range(2)]
    assert wire_bytes(ranks) == 20  # 80 in four timed steps
    assert wire_bytes([*ranks, record([])]) == 35  # a server sent what they received
    assert wire_bytes([*ranks, record([step(0, [])], bytes_sent=None)]) is None
    assert wire_bytes([dict(rank, device="cuda:0") for rank in ranks]) is None  # NCCL


def test_time_in_communication() -> None:
    talk = {"operations": 5, "seconds": 0.4, "exposed": 0.1}
    ranks = [record([step(1, [(rank, 0, 4)])], communication=talk, profiled_seconds=2.0) for rank in range(2)]
    assert communication_shares([ranks], 1e6) == pytest.approx((0.05, 0.2))
    silent = {"operations": 0, "seconds": 0.0, "exposed": 0.0}
    quiet = [dict(rank, communication=silent) for rank in ranks]
    assert communication_shares([quiet], 1e6) is None  # bytes went, and the profiler saw none of it
    assert communication_shares([quiet], 100.0) == (0.0, 0.0)
    assert communication_shares([[*ranks, dict(ranks[0], communication=None)]], 1e6) is None
    assert (
        communication_shares([[record([step(1, [(0, 0, 4), (1, 0, 4)])])]], 0.0) is None
    )  # two replicas in one process


def test_percentile() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], part) for part in (0.25, 0.5, 0.95)] == [1.0, 2.0, 4.0]


def test_figures_of_two_rounds() -> None:
    def of(seconds: float) -> list[dict[str, Any]]:
        talk = {"operations": 5, "seconds": 0.4, "exposed": 0.2}
        steps = [step(n, [(0, 0, 8)], seconds=seconds, losses={"0": [8.0, 8.0]}) for n in range(3)]
        return [record(steps, communication=talk, memory_bytes=int(100 * seconds))]

    found = compute_figures([of(1.0), of(3.0)])
    assert found.rounds == pytest.approx((8.0, 8 / 3))
    assert found.examples_per_second == pytest.approx((8 + 8 / 3) / 2)
    assert (found.step_seconds, found.p95_seconds, found.mean_seconds) == (2.0, 3.0, 2.0)
    assert found.waiting == pytest.approx(0.1)
    assert found.communicating == pytest.approx(0.2 * 2.0)
    assert found.hidden == pytest.approx(0.2 * 2.0)
    assert found.compute == pytest.approx(2.0 - 0.1 - 0.4)
    assert found.memory == (300,)


# --- losses


def test_losses_are_means_over_the_ranks() -> None:
    """A step of 3 + 5 examples; one whose second call has another count; one of which a part is missing."""
    first = [step(0, [(0, 0, 3)], losses={"0": [3.0, 3]}), step(1, [(0, 0, 4)], losses={"0": [4.0, 4], "1": [6.0, 2]})]
    second = [
        step(0, [(1, 0, 5)], losses={"0": [13.0, 5]}),
        step(1, [(1, 0, 4)], losses={"0": [8.0, 4], "1": [0.0, 0]}),
    ]
    alone = [step(2, [(0, 0, 4)], losses={"0": [4.0, 4]})]
    found = mean_losses([record(first + alone), record(second)])
    assert found == {(0, 0): 2.0, (0, 1): 12 / 8 + 6 / 2}
    assert loss_difference(found, {(0, 0): 1.5, (0, 2): 9.0}) == 0.5
    assert loss_difference(found, {}) is None
    assert math.isnan(loss_difference({(0, 0): math.nan}, found) or 0.0)


def test_the_loss_of_a_batch_that_was_dealt_out_is_that_of_all_its_parts() -> None:
    fast = [
        step(0, [(0, 0, 4)], total=4, losses={"0": [8.0, 4]}),
        step(1, [(1, 0, 3)], total=3, losses={"0": [3.0, 3]}),
    ]
    slow = [step(0, [(1, 0, 3)], total=3, losses={"0": [6.0, 3]})]
    assert mean_losses([record(fast, chunks=2), record(slow, chunks=2), record([], chunks=2)]) == {(0, 0): 2.0}


# --- cases


def test_commas_stand_between_strategies_and_between_options() -> None:
    found = read_strategies("ddp,ddp:bucket_mb=50,static_graph=true,data_parallel:devices=cpu,cpu,pipeline,ddp", 2)
    assert [str(spec) for spec in found] == [
        "single", "ddp", "ddp:bucket_mb=50,static_graph=true", "data_parallel:devices=cpu,cpu", "pipeline",
    ]  # fmt: skip
    everything = [spec.name for spec in read_strategies(None, 4)]
    assert everything[0] == "single"
    assert sorted(set(everything)) == sorted(STRATEGIES)
    more = ["fsdp:replicate=2", "parameter_server:mode=async"]
    assert sorted(str(spec) for spec in read_strategies(None, 4) if spec.options) == more
    assert not {"fsdp:replicate=2", "fsdp+tensor"} & {str(spec) for spec in read_strategies(None, 3)}
    with pytest.raises(SettingError, match="'cpu' is not known"):
        read_strategies("ddp,cpu", 2)


def test_every_strategy_with_every_precision_and_batch() -> None:
    specs, places = read_strategies("ddp,data_parallel", 2), ["cpu", "cpu"]
    cases = make_cases(specs, read_precisions("fp32,bf16"), read_batches("64"), 2, places)
    assert [case.name for case in cases] == [
        "single fp32", "single bf16", "ddp fp32", "ddp bf16", "data_parallel fp32", "data_parallel bf16",
    ]  # fmt: skip
    assert [case.processes for case in cases] == [1, 1, 2, 2, 1, 1]
    assert str(cases[4].spec) == "data_parallel:devices=cpu,cpu"
    assert {case.global_batch for case in cases} == {64}
    assert all(baseline_case(case, cases).name == "single fp32" for case in cases)
    with pytest.raises(SettingError, match="0"):
        read_batches("0")


def test_servers_come_on_top_of_the_replicas() -> None:
    specs = read_strategies("ddp,parameter_server,parameter_server:servers=2,parameter_server:servers=x", 3)
    cases = make_cases(specs, [None], [None], 3, ["cpu"] * 3)
    assert [(case.processes, case.servers) for case in cases] == [(1, 0), (3, 0), (4, 1), (5, 2), (3, 0)]


def test_strategies_on_one_process_are_rows_that_say_what_they_are() -> None:
    asked = "ddp,data_parallel,fsdp,tensor,pipeline,shared,parameter_server,fsdp+tensor"
    cases = make_cases(read_strategies(asked, 1), [None], [None], 1, ["cpu"])
    rounds.check_cases(Script(__file__, (), False, {}), cases, Length(3, 1, 9.0), named=True)  # none is refused
    as_single = [case.name for case in cases if case.as_single]
    assert as_single == ["data_parallel", "tensor", "pipeline", "shared"]
    rows = [replace(row(case.name, 100.0 + number, 0.0), case=case) for number, case in enumerate(cases)]
    table = printed(rows)
    assert "\nStrategy tensor trains like 'single', since this run has one process.\n" in table
    assert "\nStrategy fsdp shards nothing here, since this run has one process.\n" in table
    assert "Strategy parameter_server" not in table  # its server is a process beside the replica
    chosen = recommend([line for line in rows if line.case.name in ("single", *as_single)])
    assert chosen is not None
    assert chosen[0].case.name == "single"
    assert "equally fast within" not in chosen[1]


def tried(trial: Any, patch: pytest.MonkeyPatch) -> list[Row]:
    """The rows of three rounds of a, b and c. trial: the case and the number of the trial -> what the trial gives."""
    asked = [Case(name, StrategySpec("single"), 1) for name in "abc"]
    count = iter(range(99))
    patch.setattr(rounds, "run_trial", lambda script, case, *_: trial(case.name, next(count)))
    options = CompareOptions(Script("x.py", (), False, {}), 1, rounds=3)
    return rounds.run_rounds(options, asked, Length(3, 1, 9.0), Interrupts())


def measured(seconds: float = 0.5) -> Any:
    return [record([step(n, [(0, 0, 8)], seconds=seconds) for n in range(3)])]


def test_rounds_begin_with_another_case_and_leave_out_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def trial(name: str, number: int) -> Any:
        order.append(name)
        return "it broke" if name == "b" else measured()

    rows = tried(trial, monkeypatch)
    assert "".join(order) == "abc" + "ca" + "ca"
    assert [(row.case.name, row.failed) for row in rows] == [("a", None), ("b", "it broke"), ("c", None)]


def test_what_was_measured_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tried(lambda name, number: "it broke" if (name, number) == ("b", 3) else measured(), monkeypatch)
    assert [row.figures is not None and len(row.figures.rounds) for row in rows] == [3, 1, 3]
    assert [row.failed for row in rows] == [None, "in round 2: it broke", None]
    assert "Failed after the rounds shown in the table:\n  b: in round 2: it broke\n" in printed(rows)
    entry = make_document(CompareOptions(Script("x.py", (), False, {}), 1), 1, Length(3, 1, 9.0), rows)["rows"][1]
    assert entry["failed"] == "in round 2: it broke"
    assert entry["examples_per_second_by_round"] == [16.0]


@pytest.mark.parametrize(
    "failure",
    [SettingError("no such library"), ModuleNotFoundError("No module named 'zmq'"), OSError(28, "No space left"), {}],
)
def test_no_failure_of_one_case_ends_the_others(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trial raises, and records that hold no timed step."""

    def trial(name: str, number: int) -> Any:
        if name != "b":
            return measured()
        if isinstance(failure, Exception):
            raise failure
        return [record([step(0, [(0, 0, 8)])])]

    rows = tried(trial, monkeypatch)
    assert [row.figures is not None for row in rows] == [True, False, True]
    assert str(failure) in (rows[1].failed or "") or not isinstance(failure, Exception)
    assert rows[1].failed


def test_a_signal_ends_the_rounds_and_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(name: str, number: int) -> Any:
        if number == 4:
            raise Stopped(2)
        return measured()

    rows = tried(trial, monkeypatch)
    assert [row.figures is not None and len(row.figures.rounds) for row in rows] == [1, 2, 1]
    assert [row.failed for row in rows] == [None, None, None]
    rows = tried(lambda name, number: trial(name, 4 if number else 0), monkeypatch)
    assert [row.failed for row in rows] == [None, *["not tried: the command was stopped first"] * 2]


def refuse(spec: StrategySpec | None, size: int | None, reproducible: int | None = None) -> int:
    """A machine that has no DeepSpeed and no pyzmq, and where fsdp has one option."""
    assert spec is not None
    if spec.name == "deepspeed":
        raise SettingError("strategy deepspeed needs DeepSpeed, which is not installed")
    if spec.name == "parameter_server":
        raise ModuleNotFoundError("No module named 'zmq'", name="zmq")
    if spec.name == "fsdp" and spec.options:
        raise SettingError("strategy fsdp has no option 'no_such'")
    return 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (None, None),
        ("ddp,deepspeed,deepspeed:stage=3,parameter_server", None),
        ("deepspeed", "DeepSpeed, which is not installed"),
        ("deepspeed,parameter_server", "DeepSpeed, which is not installed"),
        ("parameter_server", "the package 'zmq' cannot be imported here"),
        ("ddp,fsdp:no_such=1", "no option 'no_such'"),
    ],
)
def test_what_cannot_run_here_is_a_row(asked: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless nothing else was named, or an option is wrong."""
    monkeypatch.setattr("paceline.strategies.check", refuse)
    script, length = Script(__file__, (), False, {}), Length(3, 1, 9.0)
    cases = make_cases(read_strategies(asked, 2), [None], [None], 2, ["cpu"] * 2)
    if message is not None:
        with pytest.raises(SettingError, match=message):
            rounds.check_cases(script, cases, length, named=asked is not None)
        return
    rounds.check_cases(script, cases, length, named=asked is not None)
    for case in cases:
        if case.spec.name in ("deepspeed", "parameter_server"):
            found = rounds.run_trial(script, case, length, Interrupts())  # starts no process
            assert isinstance(found, str)
            assert "not installed" in found or "'zmq' cannot be imported here" in found


@pytest.mark.parametrize(
    ("story", "line"),
    [
        ("rank 1 failed: ValueError: no data\nTraceback ...\n", "ValueError: no data"),
        ("rank 0 failed: paceline.errors.UsageError: Not so. Do this:\n  code\n", "UsageError: Not so."),
        ("rank 3 was killed by SIGKILL (perhaps out of memory)\n", "was killed by SIGKILL (perhaps out of memory)"),
        ("rank 0 ended with exit code 2\nIts last output:\n  usage\n  error: --x\n",
         "ended with exit code 2; last line printed: error: --x"),
        ("not done after 5 s\nrank 0 is at a.py, line 3\nrank 1 runs\n",
         "not done after 5 s (rank 0 is at a.py, line 3; rank 1 runs)"),
    ],
)  # fmt: skip
def test_a_failure_in_one_line(story: str, line: str) -> None:
    assert one_line_reason(story) == line


# --- which one


def row(
    name: str, speed: float, difference: float | None = 1e-7, memory: int = 100, rounds: float = 0.01, **known: Any
) -> Row:
    speeds = (speed * (1 - rounds), speed, speed * (1 + rounds))[: known.get("made", 3)]
    losses, traits = {(0, 0): 2.0}, frozenset(known.get("traits", ()))
    made = Figures(
        speed, speeds, 1.0, 1.0, 1.0, 0.5, 0.3, 0.2, 0.1, (memory,), "resident", 0.0, 2.0, 40, losses, traits
    )
    case = Case(name, StrategySpec(name), 2, known.get("precision"))
    single = Case("single", StrategySpec("single"), 1, "fp32" if "precision" in known else None)
    found = Row(case, made, known.get("failed"), difference)
    base = replace(made, traits=frozenset(known.get("base", ())))
    return replace(found, cause=None if name == "single" else cause_of_difference(found, single, base))


@pytest.mark.parametrize(
    ("rows", "chosen", "words"),
    [
        ([row("single", 100, 0.0), row("ddp", 190)], "ddp", "1.90 times the 100 of single; its losses match"),
        ([row("single", 100, 0.0), row("ddp", 60)], "single", "no strategy that trains the same model is faster"),
        ([row("single", 100, 0.0), row("ddp", 190), row("mirrored", 192)], "ddp", "(mirrored is equally fast within"),
        ([row("single", 100, 0.0), row("ddp", 150), row("mirrored", 192)], "mirrored", "192 examples/s"),
        ([row("single", 100, 0.0), row("ddp", 190), row("local_sgd", 300, 0.5, traits=["not-in-step"])], "ddp",
         "local_sgd is 1.58 times as fast, but its losses differ by 5.0e-01 (it changes the training by design"),
        ([row("single", 100, 0.0), row("ddp", 190, memory=100), row("fsdp", 120, memory=40)], "ddp",
         "fsdp needs 40% of the memory, at 63% of the speed"),
        ([row("single", 100, 0.0, traits=["draws"]), row("ddp", 190, 0.3), row("fsdp", 210, 0.4, base=["draws"])],
         "fsdp", "differ from those of single by 4.0e-01 (the model or the loss draws random numbers (such as dropout"),
        ([row("single", 100, 0.0), row("ddp", 190, 0.3), row("fsdp", 210, 0.4)], "single",
         "fsdp is 2.10 times as fast, but its losses differ by 4.0e-01 (unknown; paceline verify --strategy fsdp"),
        ([row("single", 100, 0.0), row("ddp", 190, failed="in round 2: no"), row("fsdp", 150)], "fsdp", "1.50 times"),
        ([row("single", 100, 0.0, failed="in round 3: no"), row("ddp", 190)], "ddp", "1.90 times the 100 of single"),
        ([row("single", 100, 0.0), row("ddp", 190, math.nan)], "single", "could not be compared"),
        ([row("single", 100, 0.0), row("ddp", 150, rounds=0.3), row("mirrored", 170)], "ddp", "within the noise"),
        ([row("single", 100, 0.0, rounds=0.6), row("ddp", 190, rounds=0.6)], "ddp", "1.90 times"),  # a noisy machine
        ([Row(Case("single", StrategySpec("single"), 1), failed="x"), row("ddp", 9, None)], "ddp", "it is the fastest"),
    ],
)  # fmt: skip
def test_which_one(rows: list[Row], chosen: str, words: str) -> None:
    found = recommend(rows)
    assert found is not None
    assert found[0].case.name == chosen
    assert words in found[1]
    assert found[1].count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    "rows",
    [
        [row("single", 100, 0.0, made=1), row("ddp", 375, made=1)],
        [row("single", 100, 0.0, made=2), row("ddp", 375, made=1)],  # Ctrl-C in the second round
    ],
)
def test_one_round_is_no_recommendation(rows: list[Row]) -> None:
    assert recommend(rows) is None
    assert "one round does not show" in (why_none(rows) or "")
    options = CompareOptions(Script("x.py", (), False, {}), 1, rounds=1)
    document = make_document(options, 1, Length(30, 5, 9.0), rows)
    assert document["verdict"] is None
    page = render_page(document)
    assert "times the " not in page
    assert why_none(rows) in page


def test_nothing_trains_the_same_model_and_single_failed_later() -> None:
    rows = [row("single", 100, 0.0, failed="in round 2: x"), row("local_sgd", 300, 0.5, traits=["not-in-step"])]
    assert recommend(rows) is None
    assert why_none(rows) == "No recommendation: no strategy ran in every round and trained the same model as single."
    assert why_none([Row(Case("single", StrategySpec("single"), 1), failed="x")]) is None


@pytest.mark.parametrize(("rounds", "shown"), [(1, "1 round of 1 step each"), (2, "2 rounds of 30 steps each")])
def test_the_page_counts_rounds_in_words(rounds: int, shown: str) -> None:
    options = CompareOptions(Script("x.py", (), False, {}), 1, rounds=rounds)
    rows = [row("single", 100, 0.0, made=rounds), row("ddp", 190, 0.5, made=rounds, failed="in round 2: <no>")]
    page = render_page(make_document(options, 1, Length(1 if rounds == 1 else 30, 5, 9.0), rows))
    assert shown in page
    assert "1 replica;" in page
    assert '[["Why losses differ","Failed in a later round"],["ddp","ddp"],["unknown; paceline' in page
    assert '"in round 2: &lt;no&gt;"' in page


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({"base": ["draws"]}, "the model or the loss draws random numbers"),
        ({"base": ["draws"], "traits": ["not-in-step"]}, "it changes the training by design"),
        ({"precision": "bf16"}, "it computes in bf16, and single in fp32"),
        ({"traits": ["batch-norm-per-shard"]}, "batch_norm=shard: each shard is normalised by its local statistics"),
        ({}, "unknown; paceline verify --strategy ddp finds the cause"),
    ],
)
def test_why_losses_differ(known: dict[str, Any], cause: str) -> None:
    differs, alike = row("ddp", 190, 0.4, **known), row("ddp", 190, 1e-7, **known)
    assert (differs.cause or "").startswith(cause)
    assert alike.cause is None
    assert (row("ddp", 190, math.nan, **known).cause or "").startswith(cause)
    table = " ".join(printed([row("single", 100, 0.0), differs]).split())
    assert f"Why losses differ: ddp: {cause}" in table
    assert "Why losses differ" not in printed([row("single", 100, 0.0), alike])


def test_the_report_says_by_which_command_and_on_what_it_was_measured() -> None:
    script = Script("my train.py", ("--lr", "0.1"), False, {"seed": 3})
    document = make_document(CompareOptions(script, "2", "ddp,fsdp:stage=2", rounds=2), 2, Length(30, 5, 9.0), [])
    assert document["command"] == (
        "paceline compare --nproc=2 --strategies=ddp,fsdp:stage=2 --rounds=2 --seed=3 'my train.py' --lr 0.1"
    )
    machine = document["machine"]
    assert machine["processor"] in Path("/proc/cpuinfo").read_text() + platform.processor() + platform.machine()
    assert len(machine["processor"]) > 2
    assert machine["cores"] >= 1
    assert {machine["torch"], machine["python"]} == {str(torch.__version__), platform.python_version()}
    assert datetime.datetime.fromisoformat(document["time"]).tzinfo is not None


def test_nothing_ran() -> None:
    failed = [Row(Case("single", StrategySpec("single"), 1), failed="<b>no</b> & " + "words " * 60)]
    assert recommend(failed) is None
    assert max(map(len, printed(failed).splitlines())) <= 118
    options = CompareOptions(Script("<x>.py", ("a b",), False, {}), 1)
    document = make_document(options, 1, Length(30, 5, 9.0), failed)
    assert document["verdict"] is None
    text = render_page(document).rpartition("Plotly.newPlot(")[2]
    assert "<b>" not in text
    assert "&lt;b&gt;no&lt;\\u002fb&gt; &amp; words" in text
    assert "&lt;x&gt;.py" in text


def test_a_script_that_starts_no_run_is_told_what_compare_takes(tmp_path: Path) -> None:
    told = rounds._read_records(str(tmp_path), 1, Length(3, 1, 60.0))
    assert isinstance(told, str)
    assert told.startswith("rank 0 never called paceline.start")
    assert "`paceline doctor` watches other scripts" in told
