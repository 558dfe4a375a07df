"""What a metric was computed from, by the numbers in the script's variables; padding of several widths."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.doctor.recorders.loss_graph import mean_sizes
from paceline.doctor.recorders.variable_recorder import VariableRecorder
from paceline.doctor.rules import metric_rules, model_rules
from paceline.doctor.rules.gathered_results import uses_all
from paceline.doctor.rules.padded_rows import equal_but_padding, lengths, unify_padded
from paceline.doctor.rules.recorded_run import Event, RecordedRun
from paceline.observe.digests import padded_rows
from paceline.observe.script_stack import ScriptStack

# --- what a mean is divided by


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [
        (lambda x: x.mean(), [[24, 1]]),
        (lambda x: x.square().sum(1).mean(), [[8, 1]]),
        (lambda x: x.mean(dim=-1).mean(), [[8, 1]]),
        (lambda x: x.mean((0, 1)), [[24, 1]]),
        (lambda x: nn.functional.mse_loss(x, x.detach() + 1) * 0.5, [[24, 0.5]]),
        (lambda x: nn.functional.l1_loss(x, x.detach() + 1) / 4 + 3 * x.mean(), [[24, 0.25], [24, 3]]),
        (lambda x: x.sum() / 8, []),
        (lambda x: nn.functional.cross_entropy(x, torch.zeros(8, dtype=torch.long)), []),  # loss_divisor has it
        (lambda x: (x.mean(1) * torch.arange(8)).sum(), []),
    ],
    ids=["all", "rows", "of means", "dims", "squares", "two terms", "sum", "targets", "weighed rows"],
)
def test_how_many_elements_a_mean_has(loss: Any, sizes: list[list[float]]) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert mean_sizes(loss(x)) == [pytest.approx(size) for size in sizes]


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([[126, 1]], [[166, 1]], True),
        ([[8 * 17 * 30, 1]], [[8 * 18 * 30, 1]], False),  # texts that are padded to the longest of the batch
        ([[126, 1]], [[126, 1]], False),
        ([[126, 126 / 146]], [[166, 166 / 146]], False),  # each mean by its share
        ([[8, 1], [126, 0.1]], [[8, 1], [166, 0.1]], True),  # the second term
        ([[126, 1], [8, 1]], [[166, 1]], True),
        ([], [], False),
    ],
)
def test_means_over_the_elements_of_a_rank(ours: Any, theirs: Any, found: bool) -> None:
    def rank(means: Any) -> list[Event]:
        begin: Event = {"k": "group", "op": "init_process_group", "world": 2, "at": AT}
        backward: Event = {"k": "backward", "mean": "mean", "count": None, "means": means, "at": AT}
        read: Event = {"k": "yield", "loader": "train", "n": 1, "idx": list(range(8)), "rows": None, "at": AT}
        begins = [begin, {"k": "ddp", "ddp": 0, "ranks": [0, 1], "at": AT}, {**read, "k": "pass"}]
        return [*begins, *[read, backward] * 4]

    run = RecordedRun([rank(ours), rank(theirs)])
    assert [f.cause for f in model_rules.findings(run)] == ["loss_mean_of_means"] * found


# --- padding


def collated(rows: list[list[int]], left: bool = False, value: int = 0) -> torch.Tensor:
    width = max(map(len, rows))
    paddings = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, paddings)])


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("features", [False, True], ids=["tokens", "features"])
def test_rows_are_equal_but_for_padding(left: bool, features: bool) -> None:
    batches = [[[5, 3, 9]], [[5, 3, 9], [1, 2, 3, 4, 5]], [[5, 3, 9], [2] * 9], [[5, 3, 9], [7, 7, 7, 8]]]
    found = []
    for rows in batches:
        batch = collated(rows, left)
        found.append(padded_rows(torch.stack([batch, -batch], 2).float() if features else batch))
    same = [rows[0] for rows in found if rows]
    assert len(same) == 4
    assert all(equal_but_padding(a, b) for a in same for b in same)
    others = [row for rows in found if rows for row in rows[1:]]
    assert not any(equal_but_padding(a, b) for a in same for b in others)


def test_rows_that_differ_in_their_last_word_are_others() -> None:
    a, b = padded_rows(torch.tensor([[5, 3, 9], [5, 3, 7]])) or []
    assert not equal_but_padding(a, b)


def test_rows_without_steps_have_no_padding() -> None:
    assert padded_rows(torch.zeros(4)) is None
    assert padded_rows(torch.zeros(4, 3, 8, 8)) is None
    assert padded_rows(torch.zeros(4, 1)) is None


def loaded(indices: list[int], rows: list[list[int]]) -> Event:
    batch = collated(rows)
    digests = [[hash(tuple(row)) for row in batch.tolist()]]
    return {"k": "yield", "loader": "test", "n": 1, "idx": indices, "rows": digests, "padded": [padded_rows(batch)]}


def test_an_example_has_one_digest_on_all_ranks() -> None:
    ours, theirs = loaded([0, 1], [[5, 3, 9], [4] * 6]), loaded([0, 2], [[5, 3, 9], [6, 1]])
    assert ours["rows"][0][0] != theirs["rows"][0][0]
    unify_padded([[ours], [theirs]])
    assert ours["rows"][0][0] == theirs["rows"][0][0]
    assert len({ours["rows"][0][1], *theirs["rows"][0]}) == 3


def test_words_are_counted_without_the_padding() -> None:
    yields = [loaded([0, 1, 2], [[5, 3, 9], [4, 7, 2, 6, 8, 1], [5]]), loaded([3], [[1, 2]])]
    assert [(0, 3), (1, 6), (2, 1), (3, 2)] in list(lengths(yields))


# --- variables


def test_the_numbers_of_a_scripts_variables() -> None:
    class Meter:
        def __init__(self) -> None:
            self.sum, self.count, self.name, self._own = 3.5, 4, "loss", 7

    stack, shared = ScriptStack([__file__]), SimpleNamespace(models=None)
    log = SimpleNamespace(stack=stack, shared=shared, few=lambda *_: True, overhead=contextlib.nullcontext)
    recorder = VariableRecorder(log)  # type: ignore[arg-type]
    assert recorder.numbers() is None  # a model is trained

    def evaluate(recorder: VariableRecorder) -> Any:
        right, ready, text = 57, True, "3"
        total, pair, wide = torch.tensor(2.5), torch.tensor([1.0, 2.0]), torch.zeros(90)
        meters, single = {"loss": Meter()}, np.float32(0.5)
        recorder.pass_ended = True
        return recorder.numbers(), (right, ready, text, total, pair, wide, meters, single)

    found, _ = evaluate(recorder)
    ours = {"right": 57, "total": 2.5, "pair[0]": 1, "pair[1]": 2, "meters.loss.sum": 3.5, "meters.loss.count": 4}
    assert {name: found.get(name) for name in ours} == ours
    assert found["single"] == 0.5
    assert not {"ready", "text", "wide[0]", "meters.loss._own", "meters.loss.name"} & set(found)


# --- evaluations

AT, CALL, SAID = ["train.py", 7], ["train.py", 9], ["train.py", 12]
SIZE = 128


def evaluation(
    rank: int, numbers: dict[str, float], calls: list[Event] = [], said: str = "", own: int = 64  # noqa: B006
) -> list[Event]:  # fmt: skip
    """The events of one rank, which trains, reads its half of 128 examples and has these numbers after it."""
    indices = list(range(rank, SIZE, 2))[:own]
    about = {"k": "loader", "loader": "test", "size": SIZE, "sampler": "distributed", "replicas": 2, "at": AT}
    events: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2, "at": AT},
        {"k": "optimizer", "opt": 0, "lr": [0.1], "at": AT},
        about,
        {"k": "pass", "loader": "test", "n": 1, "at": AT},
        {"k": "yield", "loader": "test", "n": 1, "idx": indices, "rows": [indices], "grad": False, "at": AT},
        {"k": "pass_end", "loader": "test", "n": 1, "vars": numbers, "at": AT},
        *({"k": "coll", "op": "all_reduce", "n": 1, "at": CALL, **call} for call in calls),
    ]
    events += [{"k": "said", "how": "print", "text": said, "at": SAID, "vars": numbers}] if said else []
    return [{**e, "t": float(n)} for n, e in enumerate(events)]


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text("\n" * 10 + text)
    AT[0] = CALL[0] = SAID[0] = str(file)
    return file


@pytest.mark.parametrize(
    ("said", "theirs", "result", "found"),
    [
        ("accuracy 0.4453", 50, None, True),  # 57 / 128
        ("accuracy 44.53%", 50, None, True),
        ("57/128 right", 50, None, True),
        ("accuracy 0.8359", 50, None, False),  # of both ranks
        ("accuracy 0.8906", 50, None, False),  # of its shard: another finding, if any
        ("accuracy 0.4", 50, None, False),  # many numbers would be that
        ("accuracy 0.4453", 57, None, False),  # the same on all ranks: it may be of all of them
        ("accuracy 0.4453", 50, [0.44531], False),  # exchanged
    ],
    ids=["fraction", "percent", "of", "whole", "shard", "short", "same", "reduced"],
)
def test_rank_0s_sum_divided_by_the_whole(said: str, theirs: int, result: Any, found: bool, tmp_path: Path) -> None:
    script(tmp_path, "def accuracy():\n    return right / len(loader.dataset)\n")
    calls = [{"sent": [1.25], "result": result or [2.5]}]
    ranks = [evaluation(0, {"right": 57.0, "size": SIZE}, calls, said), evaluation(1, {"right": theirs}, calls)]
    findings = metric_rules.findings(RecordedRun(ranks))
    assert [(f.cause, f.at.rpartition(":")[2], f.beside.rpartition(":")[2]) for f in findings] == [
        ("local_metric", "12", "12")
    ] * found


def test_the_text_must_divide_by_the_whole_too(tmp_path: Path) -> None:
    script(tmp_path, "def share():\n    return seen / 3\n")
    ranks = [evaluation(0, {"seen": 57.0}, said="0.4453"), evaluation(1, {"seen": 50.0})]
    assert metric_rules.findings(RecordedRun(ranks)) == []


TEXT = "mean = total / words\ndist.all_reduce(mean)\nmean /= dist.get_world_size()\n"


def sums(total: float, words: float, **more: float) -> dict[str, float]:
    return {"total": total, "words": words, **more}


@pytest.mark.parametrize(
    ("ours", "theirs", "sent", "more", "found"),
    [
        (sums(400, 217), sums(500, 226), None, [], True),
        (sums(400, 220), sums(500, 220), None, [], False),  # as many words
        (sums(400, 217), sums(500, 226), (1.5, 2.5), [], False),  # something else was sent
        (sums(400, 217), sums(500, 226), None, [([217.0], [226.0])], False),  # the counts too
        (sums(400, 2.17), sums(500, 2.26), None, [], False),  # no counts: seconds
        (sums(400, 3), sums(500, 4), None, [], False),  # few: of batches
    ],
    ids=["unequal", "equal", "other", "counts", "seconds", "few"],
)
def test_a_mean_of_the_ranks_quotients(
    ours: Any, theirs: Any, sent: Any, more: Any, found: bool, tmp_path: Path
) -> None:
    file = script(tmp_path, TEXT)
    CALL[1] = 12
    ranks = []
    for rank, numbers in enumerate((ours, theirs)):
        value = sent[rank] if sent else numbers["total"] / numbers["words"]
        calls = [{"sent": [value], "vars": numbers, "path": [[str(file), 12]]}]
        calls += [{"sent": pair[rank], "vars": numbers, "path": []} for pair in more]
        ranks.append(evaluation(rank, numbers, calls))
    found_here = metric_rules.findings(RecordedRun(ranks))
    assert [(f.cause, f.at.rpartition(":")[2]) for f in found_here] == [("mean_of_means", "12")] * found
    assert all("217 and 226" in f.evidence and "2.02" in f.evidence for f in found_here)


# --- metrics that gather for themselves


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("metric.update(model(x), y)", True),
        ("metric.update(model(x)[:own], y[:own])", False),
        ("metric.update(model(x)[keep], y[keep])", False),
    ],
)
@pytest.mark.parametrize("library", ["", "lightning"])
def test_what_a_metric_gathers_is_what_it_was_given(line: str, whole: bool, library: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = f"def validation_step(model, x, y):\n    for x, y in loader:\n        {line}\n    return metric.compute()\n"
    file.write_text(text + "train = data[:80]\ntrainer.fit()\n")
    inside = [[f"/env/lib/site-packages/{part}/metric.py", 3] for part in ("torchmetrics", library) if part]
    call = {"at": [str(file), 6 if library else 4], "path": [*inside, [str(file), 6 if library else 4]]}
    assert uses_all(call, [str(file), 6 if library else 2]) is whole
