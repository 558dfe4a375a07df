"""What looks like a fault and is none, beside the fault that it looks like: on written events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.rules import data_rules, evaluation_rules
from paceline.doctor.rules.recorded_run import Event, RecordedRun

BATCHES = 4


def epoch(number: int, inputs: list[int], **about: Any) -> list[Event]:
    """A loader of its own that is read to its end, and trained on."""
    name = f"line 18 of train.py, {number}"
    told = {"k": "loader", "loader": name, "sampler": "other", "shuffles": True, "at": ["train.py", 18], **about}
    events: list[Event] = [told, {"k": "pass", "loader": name, "n": number, "at": ["train.py", 18]}]
    for value in inputs:
        events.append({"k": "yield", "loader": name, "n": number, "idx": None, "rows": [[value]]})
        events += trained([value])
    return [*events, {"k": "pass_end", "loader": name, "n": number}]


def trained(inputs: list[int]) -> list[Event]:
    pairs = ([{"k": "forward", "digest": [v]}, {"k": "backward", "at": ["train.py", 20]}] for v in inputs)
    return [event for pair in pairs for event in pair]


ORDER = [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("about", "then", "found"),
    [
        ({}, trained(ORDER * 2), True),  # itertools.cycle over a shuffled loader
        ({"sampler": "distributed"}, trained(ORDER * 2), True),
        ({"iterable": True}, [*epoch(2, ORDER), *epoch(3, ORDER)], False),  # a loader for each epoch, of a stream
        ({}, [*epoch(2, ORDER), *epoch(3, ORDER)], False),  # each is read: nothing is kept
        ({"iterable": True}, trained(ORDER * 2), False),  # kept, of a stream that may come in this order again
        ({"sampler": "sequential"}, trained(ORDER * 2), False),  # kept, and not shuffled on purpose
        ({"sampler": "distributed", "shuffles": False}, trained(ORDER * 2), False),
    ],
)
def test_batches_that_come_again(about: dict[str, Any], then: list[Event], found: bool) -> None:
    run = RecordedRun([[*epoch(1, ORDER, **about), *then]] * 2)
    assert [f.cause for f in data_rules._cycled(run)] == ["no_set_epoch"] * found


TEXT = """\
for x, y in train_loader: train(x, y)
for x, y in test_loader: right += count(model(x), y)
dist.all_reduce(right)
accuracy = right / 32
for x, y in test_loader: total = total + loss(model(x), y)
{}
"""
REDUCED, BOTH, LOCAL = 'print("accuracy", accuracy)', "print(accuracy, total)", 'print("loss", total)'
UNKNOWN = 'print("metric", metric)'


@pytest.mark.parametrize(
    ("said", "reduced", "found"),
    [
        (REDUCED, True, False),
        (BOTH, True, True),
        (LOCAL, True, True),
        (UNKNOWN, True, False),  # it may be what was reduced
        (UNKNOWN, False, True),  # nothing was
        (LOCAL, False, True),
        (REDUCED, False, False),  # a number that this evaluation did not make
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_local_pass_beside_a_reduced_metric(
    said: str, reduced: bool, found: bool, alone: bool, tmp_path: Path
) -> None:
    """alone: rank 0 alone makes the second pass, by a sampler that gives it its shard."""
    file = tmp_path / "train.py"
    file.write_text(TEXT.format(said))

    def at(line: int) -> list[Any]:
        return [str(file), line]

    def rank(number: int) -> list[Event]:
        events: list[Event] = [{"k": "group", "op": "init_process_group", "world": 2, "at": []}]
        shard = {"sampler": "distributed", "sampler_name": "DistributedSampler", "replicas": 2, "size": 32}
        events += [{"k": "loader", "loader": name, "at": at(1), **shard} for name in ("train", "test", "probe")]
        second = "probe" if alone else "test"
        for n, (loader, line) in enumerate((("train", 1), ("test", 2), (second, 5)), 1):
            if alone and n == 3 and number:
                continue
            events.append({"k": "pass", "loader": loader, "n": n, "at": at(line)})
            for batch in range(BATCHES):
                rows = list(range(number + 8 * batch, 8 * batch + 8, 2))
                grad = loader == "train"
                read = {"loader": loader, "n": n, "idx": rows, "rows": [[1000 + r for r in rows]], "grad": grad}
                events.append({"k": "yield", **read})
                events += [{"k": "backward", "at": at(1)}] if grad else []
            events.append({"k": "pass_end", "loader": loader, "n": n})
            if n == 2 and reduced:
                events.append({"k": "coll", "op": "all_reduce", "at": at(3), "result": [20.0]})
        events += [{"k": "said", "how": "print", "text": "metric 0.625", "at": at(6)}] if number == 0 else []
        return events

    run = RecordedRun([rank(0), rank(1)])
    causes = [f.cause for f in evaluation_rules.findings(run)]
    assert causes == ["local_metric"] * found


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ([["a", "b"], ["c", "d"]], []),  # ranks that compute the heads of an attention exchange different results
        ([["a", "b"], ["a", "b"]], ["same_examples"]),  # a batch norm by hand: equal examples, equal sums
        ([[], []], ["same_examples"]),
    ],
)
def test_equal_inputs_of_ranks_that_compute_parts_of_a_model(sent: list[list[str]], found: list[str]) -> None:
    begin: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2},
        {"k": "ddp", "ddp": 0, "ranks": [0, 1], "at": ["train.py", 5]},
    ]
    made = [
        [{"k": "coll", "op": "all_reduce", "in_forward": one, "at": ["train.py", 7]} for one in own] for own in sent
    ]
    run = RecordedRun(
        [[*begin, *own, *({**e, "at": ["train.py", 9]} for e in trained(list(range(8))))] for own in made]
    )
    assert [f.cause for f in data_rules.findings(run) if f.cause == "same_examples"] == found


@pytest.mark.parametrize(("values", "found"), [((0.5, 0.4), True), ((0.5, 0.5), False), ((float("nan"), 0.5), False)])
def test_a_decision_by_a_metric_of_one_rank(values: tuple[float, float], found: bool) -> None:
    run = RecordedRun([[{"k": "decides", "who": "EarlyStopping", "by": "loss", "value": one}] for one in values])
    made = list(evaluation_rules._decided_alone(run))
    assert [f.cause for f in made] == ["local_metric"] * found
    assert not found or made[0].evidence == "EarlyStopping decides by 'loss', which is 0.5 on rank 0 and 0.4 on rank 1"
