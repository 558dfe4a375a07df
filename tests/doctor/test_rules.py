"""What is judged, on written records: thresholds, the parts that only a device has, collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from paceline.doctor import doctor_command
from paceline.doctor.recorders.call_context import Choice, choice_at
from paceline.doctor.recorders.loss_graph import loss_divisor, loss_kind
from paceline.doctor.rules import (
    clip_rules,
    collective_rules,
    cost_rules,
    data_rules,
    model_rules,
    replica_rules,
    schedule_rules,
)
from paceline.doctor.rules.collective_rules import CollectiveChecker
from paceline.doctor.rules.evaluation_rules import _metric
from paceline.doctor.rules.gathered_results import uses_all
from paceline.doctor.rules.recorded_run import Event, Pass, RecordedRun
from paceline.observe.expressions import accumulates

AT = ["train.py", 7]


def steps(inside: list[Event], count: int = 14, seconds: float = 1.0, **machine: Any) -> list[Event]:
    """The events of one rank: `inside` in each of its steps."""
    events: list[Event] = [{"k": "optimizer", "opt": 0, "at": AT, "t": 0.0}]
    for number in range(count):
        events += inside
        events.append({"k": "step", "opt": 0, "step": number + 1, "t": number * seconds, "at": AT, "machine": machine})
    return events


def causes(*ranks: list[Event]) -> list[str]:
    return [finding.cause for finding in cost_rules.findings(RecordedRun(ranks))]


def test_a_copy_averages_weights_where_the_script_puts_it_back() -> None:
    copy = {"k": "coll", "op": "all_reduce", "of": "weight", "copy": True, "at": AT}
    before, moved = {"k": "before", "opt": 0, "step": 2}, {"k": "moved", "opt": 0, "step": 1}
    assert RecordedRun([[*steps([], 1), copy, moved, before, *steps([], 1)]]).averages_weights
    assert not RecordedRun([[*steps([], 1), copy, before, *steps([], 1)]]).averages_weights, "its mean is dropped"
    assert not RecordedRun([[*steps([], 1), copy, before, *steps([], 1), moved]]).averages_weights, "after a step"
    assert RecordedRun([[*steps([], 1), {**copy, "copy": None}]]).averages_weights, "the weight itself, in place"


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("processes", [2, 3, 7])
def test_a_length_that_counts_all_the_data_is_known_whatever_was_rounded(processes: int, epochs: int) -> None:
    """Each epoch has ceil(rows / processes / batch) steps; the length in the script rounds down once an epoch."""
    rows, batch = 48 * processes, 16 // processes
    share = epochs * -(-rows // processes // batch)
    assert schedule_rules._is_multiple(share, processes, epochs * (rows // batch), epochs)
    assert not schedule_rules._is_multiple(share, processes, share, epochs)
    assert not schedule_rules._is_multiple(share, processes, share * (processes + 1), epochs)


@pytest.mark.parametrize(("kind", "cause"), [("torch.cuda.empty_cache", "empty_cache"), (".item()", "synchronises")])
def test_waiting_for_the_device(kind: str, cause: str) -> None:
    def wait(seconds: float) -> list[Event]:
        return steps([{"k": "wait", "kind": kind, "seconds": seconds, "at": AT}])

    assert causes(wait(0.06), wait(0.06)) == [cause]
    assert causes(wait(0.04), wait(0.04)) == []  # below 5% of a step
    assert causes(wait(0.06)[:8], wait(0.06)[:8]) == []  # too few steps to say


def test_one_call_in_ten_steps_is_no_habit() -> None:
    rare = steps([])
    rare[5:5] = [{"k": "wait", "kind": ".item()", "seconds": 0.9, "at": AT}]
    assert causes(rare, rare) == []


def test_all_ranks_on_the_first_device() -> None:
    both = [steps([], threads=1, cores=8, queued=0.0, devices=[100, 0]) for _ in range(2)]
    assert causes(*both) == ["one_device"]
    each = [steps([], threads=1, cores=8, queued=0.0, devices=d) for d in ([100, 0], [0, 100])]
    assert causes(*each) == []
    context = [steps([], threads=1, cores=8, queued=0.0, devices=d) for d in ([100, 0], [30, 100])]
    assert causes(*context) == ["one_device"]


def test_threads() -> None:
    def ranks(threads: int, share: float) -> list[list[Event]]:
        events = steps([], threads=threads, cores=8, queued=0.0)
        for e in events[1:]:
            e["machine"] = {"threads": threads, "cores": 8, "queued": share * e["t"]}
        return [events, events]

    assert causes(*ranks(8, 0.2)) == ["threads"]
    assert causes(*ranks(8, 0.01)) == []
    assert causes(*ranks(4, 0.2)) == []  # each its share: the machine is busy with something else


def test_pinned_memory_where_there_is_a_device() -> None:
    inside = [{"k": "yield", "loader": 0, "n": 1, "waited": 0.4, "at": AT}, {"k": "backward", "at": AT}]
    loader = {"k": "loader", "loader": 0, "workers": 4, "pinned": False, "at": AT}
    begin = {"k": "pass", "loader": 0, "n": 1, "at": AT}
    plain = [loader, begin, *steps(inside, threads=1, cores=8, queued=None)]
    assert causes(plain, plain) == ["loader_starves"]
    device = [loader, begin, *steps(inside, threads=1, cores=8, queued=None, devices=[1])]
    assert causes(device, device) == ["loader_starves", "no_pinned_memory"]


NAN = float("nan")


def replica(
    weights: float = 1.0, grads: float = 1.0, after: float = 1.0, backwards: int = 1, **more: Any
) -> list[Event]:
    """One rank's two steps of one optimizer with one weight of two elements, alike but for the first step's values."""
    events: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2, "at": AT},
        {"k": "optimizer", "opt": 0, "lr": [0.1], "at": AT},
    ]
    for step in (0, 1):
        first = step == 0
        values = {
            n: {"w": [2, 2 * abs(v), 2 * v, v, v]}
            for n, v in (("weights", weights if first else after), ("grads", grads if first else 1.0))
        }
        events += [{"k": "backward", "synced": [], "local": [], "mean": "mean", "at": AT}] * backwards
        events += [{"k": "coll", "op": "all_reduce", "of": "grad", "at": ["train.py", 5]}]
        events += [
            {
                "k": "before",
                "opt": 0,
                "step": step,
                "lr": [0.1],
                "without": [],
                "backwards": (step + 1) * backwards,
                "at": AT,
                **values,
                **(more if first else {}),
            }
        ]
        events += [
            {
                "k": "step",
                "opt": 0,
                "step": step + 1,
                "weights": {"w": [2, 2 * abs(after), 2 * after, after, after]},
                "at": AT,
            }
        ]
    return [*events, {"k": "end", "failed": False, "at": []}]


@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [
        ({}, {}, None),
        ({"after": NAN}, {"after": NAN}, None),
        ({}, {"weights": 2.0}, "weights_differ_at_start"),
        ({"after": 2.0}, {"after": NAN}, "weights_differ"),
        ({}, {"after": 2.0, "grads": 2.0}, "gradients_differ"),
        ({}, {"after": 2.0, "settings": [{"lr": "0.2"}]}, "weights_differ"),
        ({"settings": [{"lr": "0.1"}]}, {"after": 2.0, "settings": [{"lr": "0.2"}]}, "optimizer_differs"),
    ],
    ids=["alike", "not finite", "start", "one not finite", "gradients", "settings unknown", "settings"],
)  # fmt: skip
def test_the_first_difference_of_replicas(ours: Any, theirs: Any, cause: str | None) -> None:
    found = replica_rules.findings(RecordedRun([replica(**ours), replica(**theirs)]))
    assert [f.cause for f in found] == ([cause] if cause else [])


@pytest.mark.parametrize("ending", ["complete", "limit", "failed"])
def test_averages_that_a_shortened_run_does_not_show(ending: str) -> None:
    """The ranks may average their weights after the last step that was watched."""
    sent = {"k": "coll", "op": "broadcast", "of": "weight", "at": AT}
    events = [
        [e for e in [one[0], sent, *one[1:]] if e.get("of") != "grad"]
        for one in (replica(), replica(after=2.0, grads=2.0))
    ]
    for own in events:
        if ending == "limit":
            own.insert(-1, {"k": "limit", "at": AT})
        own[-1] = {"k": "end", "failed": ending == "failed", "at": []}
    found = replica_rules.findings(RecordedRun(events))
    assert [f.cause for f in found] == ["not_reduced"]
    _, _, remedy = found[0].evidence.partition("after these 2 steps (local SGD), ")
    expected = {"limit": "give a larger --steps", "failed": "mend the error that ended the script"}
    assert remedy.startswith(expected.get(ending, ""))
    assert bool(remedy) == (ending != "complete")


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_that_reduce_no_more_before_the_script_fails(failed: bool) -> None:
    """Post-local SGD: one step with reduced gradients, then two without, and no average before the end."""
    alike = {"weights": {"w": [2, 2, 2, 1, 1]}}
    events = []
    for own in (replica(), replica(after=2.0)):
        group, optimizer, backward, reduced, before, step, _, _, next_before, next_step, end = own
        first = [group, optimizer, backward, reduced, before, {**step, **alike}]
        second = [backward, {**next_before, **alike}, next_step]
        third = [backward, {**next_before, "step": 2}, {**next_step, "step": 3}]
        events.append([*first, *second, *third, {**end, "failed": failed}])
    found = replica_rules.findings(RecordedRun(events))
    assert bool(found) != failed


def test_a_rank_that_does_not_step() -> None:
    idle = [e for e in replica() if e["k"] not in ("before", "step")]
    found = replica_rules.findings(RecordedRun([replica(), idle]))
    assert [f.cause for f in found] == ["steps_differ"]
    assert "rank 0 made 2 optimizer steps and rank 1 made 0" in found[0].evidence


def write(folder: Path, *ranks: list[dict[str, Any]], ended: bool = True) -> CollectiveChecker:
    for rank, calls in enumerate(ranks):
        entries = [
            {"b": n, "g": "0", "ranks": [0, 1], "at": ["train.py", 10 + rank], **call} for n, call in enumerate(calls)
        ]
        lines = [json.dumps(line) for entry in entries for line in (entry, {"e": entry["b"]})]
        (folder / f"calls-{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"rank-{rank}.jsonl").write_text('{"k": "end", "failed": false}\n' if ended else "{}\n")
    return CollectiveChecker(str(folder), len(ranks))


SUM = {"op": "all_reduce", "n": 4, "d": "float32", "by": "SUM"}


@pytest.mark.parametrize(
    "other",
    [
        {**SUM, "n": 5},
        {**SUM, "d": "float64"},
        {**SUM, "by": "MAX"},
        {"op": "broadcast", "n": 4, "d": "float32", "root": 0},
    ],
)
def test_calls_that_do_not_match(other: dict[str, Any], tmp_path: Path) -> None:
    checker = write(tmp_path, [SUM, SUM], [SUM, other])
    assert checker.poll()
    finding = checker.finding()
    assert finding is not None
    assert "collective 2" in finding.evidence


def test_calls_that_match_and_calls_that_never_come(tmp_path: Path) -> None:
    assert write(tmp_path, [SUM, SUM], [SUM, SUM]).finding() is None
    finding = write(tmp_path, [SUM, SUM], [SUM]).finding()
    assert finding is not None
    assert finding.at == "train.py:10"
    assert write(tmp_path, [SUM, SUM], [SUM], ended=False).finding() is None  # it failed, and might have called it


@pytest.mark.parametrize(("second", "stuck"), [([SUM, SUM], False), ([SUM], True)], ids=["slow", "in vain"])
def test_a_slow_call_is_no_deadlock(second: Any, stuck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are in a call. Where it is the same one it goes on, however long it takes."""
    monkeypatch.setattr(collective_rules, "STUCK_SECONDS", 0.0)
    checker = write(tmp_path, [SUM, SUM], second, ended=False)
    if stuck:
        other = {"b": 1, "op": "barrier", "g": "1", "ranks": [0, 1], "at": ["train.py", 20]}
        with open(tmp_path / "calls-1.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(other) + "\n")
    for rank in (0, 1):
        path = tmp_path / f"calls-{rank}.jsonl"
        if not (stuck and rank == 1):  # the last call has not ended
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    checker.poll()
    assert checker.poll() is stuck
    assert (checker.finding(cut=True) is not None) is stuck


@pytest.mark.parametrize(
    ("text", "told"),
    [("epoch 0 lr 0.0900", False), ("predicted in 3.22s", False), ("epoch 2/10 took 0:00:12", False),
     ("{'epoch': 0, 'lr': 0.09}", False), ("train/lr 1e-05", False), ("acc 0.81", True), ("Epoch 3: 0.81", True),
     ("Accuracy: 37/50 (74%)", True), ("epoch 1 error rate 0.25", True), ("epoch 2/10 time 3.2 76.1", True)],
)  # fmt: skip
def test_a_rate_or_a_time_is_no_metric(text: str, told: bool) -> None:
    assert _metric({"how": "print", "text": text}) is told


def crossing(*ways: dict[str, Any], **call: Any) -> list[dict[str, Any]]:
    return [{**SUM, **call, "way": way} for way in ways]


A, B = {"the line": "train.py:3", "name": "loss"}, {"the line": "train.py:3", "name": "accuracy"}


def test_calls_that_look_alike_and_cross(tmp_path: Path) -> None:
    finding = write(tmp_path, crossing(A, A, B), crossing(A, B, A)).finding()
    assert finding is not None
    assert finding.at == "train.py:11"
    assert "name is 'accuracy' and 'loss'" in finding.evidence or "name is 'loss' and 'accuracy'" in finding.evidence


def test_calls_in_another_order_of_which_no_two_changed_places(tmp_path: Path) -> None:
    """Sets of three or more names: each rank goes through all of them, and no pair of them is the other way round."""
    names = [{"the line": "train.py:3", "name": name} for name in ("loss", "accuracy", "recall")]
    finding = write(tmp_path, crossing(*names), crossing(*names[1:], names[0])).finding()
    assert finding is not None
    assert "'loss', 'accuracy', 'recall' on rank 0, and 'accuracy', 'recall', 'loss' on rank 1" in finding.evidence


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (crossing(A, B, A), crossing(A, B, A)),
        (crossing(A, A, A), crossing(B, B, B)),  # `if rank == 0`, another name on each rank: never crossed
        (crossing(A) + crossing(B, n=9), crossing(B) + crossing(A, n=9)),  # not interchangeable
        (crossing(A, branches={"7": True}) + crossing(B, branches={"7": False}), crossing(B, A)),  # one, or the other
        (crossing(A, B, op="barrier"), crossing(B, A, op="barrier")),  # nothing is sent
    ],
    ids=["equal", "never", "sizes", "turns", "barriers"],
)
def test_calls_that_do_not_cross(first: Any, second: Any, tmp_path: Path) -> None:
    assert write(tmp_path, first, second).finding() is None


TEXT = """for turn in range(world):
    if rank == turn:
        all_reduce(mine)
    else:
        all_reduce(
            other)
for name, value in sums.items():
    if value is not None:
        all_reduce(value)
all_reduce(sums[name])
all_reduce(torch.tensor(count))
for name in sums:
    value = sums[name].clone()
    all_reduce(value)
"""


@pytest.mark.parametrize(
    ("line", "sent", "names", "indices", "branches"),
    [
        (3, "mine", {"all_reduce", "mine"}, set(), {2: True}),
        (6, "other", {"all_reduce", "other"}, set(), {2: False}),
        (9, "value", {"all_reduce", "value", "name"}, set(), {8: True}),
        (10, "sums[name]", {"all_reduce", "sums", "name"}, {"name"}, {}),
        (11, "torch.tensor(count)", {"all_reduce", "torch", "count"}, set(), {}),
        (7, "", set(), set(), {}),
        (14, "value", {"all_reduce", "value", "name"}, set(), {}),
    ],
)
def test_what_a_call_is_chosen_by(
    line: int, sent: str, names: Any, indices: Any, branches: Any, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    assert choice_at(str(file), line) == Choice(sent, frozenset(names), frozenset(indices), branches)


def _scaled(loss: torch.Tensor, by: float) -> torch.Tensor:
    return loss * by


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda x, y: cross_entropy(x, y), "mean"),
        (lambda x, y: cross_entropy(x, y) / 2, "divided"),
        (lambda x, y: _scaled(cross_entropy(x, y), 1 / 3), "divided"),
        (lambda x, y: _scaled(cross_entropy(x, y), 0.9), "mean"),
        (lambda x, y: cross_entropy(x, y, label_smoothing=0.1), "mean"),
        (lambda x, y: cross_entropy(x, y, label_smoothing=0.1) / 2, "divided"),
        (lambda x, y: cross_entropy(x, y, reduction="sum") / len(y), "mean"),
        (lambda x, y: cross_entropy(x, y, reduction="sum") / (2 * len(y)), "divided"),
        (lambda x, y: cross_entropy(x, y, reduction="none").sum() / len(y), "mean"),
        (lambda x, y: (cross_entropy(x, y, reduction="none") / 2).mean(), "divided"),
        (lambda x, y: cross_entropy(x, y) + 0.1 * x.square().mean(), "mean"),
        (lambda x, y: cross_entropy(x, y) / 2 + 0.1 * x.square().mean() / 2, "divided"),
        (lambda x, y: (cross_entropy(x, y) + 0.1 * x.square().mean()) / 2, "divided"),
        (lambda x, y: 1024.0 * (cross_entropy(x, y) / 2), "divided"),
        (lambda x, y: 1 - x.softmax(1).mean(), "mean"),
        (lambda x, y: x.sum(), "other"),
    ],
    ids=range(16),
)
def test_what_a_loss_is(loss: Any, kind: str) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert loss_kind(loss(x, torch.arange(8) % 4)) == kind


IGNORED = torch.tensor([0, 1, -100, 3, -100, 1, 2, 0])


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x, y: cross_entropy(x, y), [6, 1]),
        (lambda x, y: cross_entropy(x, y) / 4, [6, 0.25]),
        (lambda x, y: cross_entropy(x, y, reduction="sum") / (y >= 0).sum(), [6, 1]),
        (lambda x, y: cross_entropy(x, y, weight=torch.tensor([1.0, 2, 3, 4])), [13, 1]),
        (lambda x, y: cross_entropy(x, y) * 3 + 0.1 * x.square().mean(), [6, 3]),
        (lambda x, y: x.square().mean(), None),
        (lambda x, y: cross_entropy(x, y, reduction="sum"), None),
    ],
    ids=["ignored", "divided", "summed", "classes", "added", "mean", "sum"],
)
def test_what_a_loss_is_divided_by(loss: Any, count: list[float] | None) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert loss_divisor(loss(x, IGNORED)) == (None if count is None else pytest.approx(count))


def losses(counts: list[float], factors: list[float]) -> list[Event]:
    """The events of one rank: backward passes of losses that are divided so, and then multiplied."""
    passes = [{"k": "backward", "mean": "mean", "count": list(c), "at": AT} for c in zip(counts, factors)]
    begin = {"k": "group", "op": "init_process_group", "world": 2, "at": AT}
    return [begin, {"k": "ddp", "ddp": 0, "ranks": [0, 1], "at": AT}, *passes]


@pytest.mark.parametrize(
    ("counts", "factors", "found"),
    [
        ([9, 6, 7, 5], [1, 1, 1, 1], ["loss_mean_of_means"]),
        ([8, 8, 8, 8], [1, 1, 1, 1], []),
        ([8, 8, 8, 5], [1, 1, 1, 1], []),  # a last batch
        ([8, 8, 8, 8], [0.3, 0.4, 0.9, 0.6], []),  # the ranks' own mixtures
        ([9, 6, 7, 5], [9 / 8, 6 / 8, 7 / 8, 5 / 8], []),  # each mean by its share of all
    ],
    ids=["unequal", "equal", "last", "mixed", "weighed"],
)
def test_losses_that_are_means_over_unequal_numbers(counts: Any, factors: Any, found: list[str]) -> None:
    run = RecordedRun([losses([8, 8, 8, 8], [1, 1, 1, 1]), losses(counts, factors)])
    assert [f.cause for f in model_rules.findings(run)] == found


GATHER = """def gather(x):
    return all_gather(x)
def evaluate(model, loader):
    out = []
    for i, x in loader:
        out += zip(i, model(x))
    return gather(out)
def main():
    train = data[:80]
    parts = evaluate(model, loader)
    score(parts)
def score(parts):
"""


@pytest.mark.parametrize(
    ("rest", "whole"),
    [
        ("    return sum(r for p in parts for _, r in p)\n", True),
        ("    table = [0] * 9\n    for p in parts:\n        for i, r in p:\n            table[i] = r\n", False),
        ("    return flat(parts)[:9]\n", False),
        ("    return flat(parts)[:, :9]\n", True),  # columns
        ("    return {i: r for p in parts for i, r in p}\n", False),
        ("    return {c: rate(parts, c) for c in range(3)}\n", True),
    ],
    ids=["summed", "placed", "cut", "columns", "by name", "classes"],
)
def test_what_is_done_with_what_was_gathered(rest: str, whole: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(GATHER + rest)
    call = {"at": [str(file), 2], "path": [[str(file), 2], [str(file), 7], [str(file), 10]]}
    assert uses_all(call, [str(file), 5]) is whole


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("right += (model(x) == y).sum()", True),
        ("right += ((model(x) == y) & (place + i < len(loader.dataset))).sum()", False),
        ("right += (model(x) == y)[:own].sum()", False),
        ("right += (model(x) == y)[real].sum()", False),
        ("right += (model(x, attention_mask) > 0.5).sum()", True),
    ],
)
def test_what_is_summed(line: str, whole: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"def evaluate():\n    for x, y in loader:\n        {line}\n    all_reduce(right)\n")
    assert uses_all({"at": [str(file), 4], "path": [[str(file), 4]]}, [str(file), 2], sums=True) is whole


@pytest.mark.parametrize(
    ("line", "told"),
    [(1, False), (2, False), (4, True), (6, True)],
    ids=["nowhere", "batches", "micro-batches", "chunks"],
)
def test_a_loop_over_micro_batches(line: int, told: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = ("x = 1", "for batch in loader: loss.backward()", "for micro_step in range(k):", "    loss.backward()",
            "for part in x.chunk(4):", "    loss.backward()")  # fmt: skip
    file.write_text("\n".join(text) + "\n")
    assert accumulates(str(file), line) is told


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        (range(32, 96), True),  # shards that each rank shuffled for itself: half of what it reads is read there too
        (range(64, 128), False),  # its own
        ([*range(44, 76)] * 2, False),  # drawn with replacement
    ],
)
def test_streams_that_share_a_part(theirs: Any, found: bool) -> None:
    def whole(rows: Any) -> Pass:
        yields = [
            {"rows": [[100 + row for row in sorted(rows, key=lambda r: r * 37 % 101)[i : i + 8]]]}
            for i in range(0, 64, 8)
        ]
        return Pass("loader", 0, [], yields=yields, complete=True)

    assert bool(data_rules._same_rows(whole(range(64)), whole(list(theirs)), "ranks 0 and 1")) == found


def test_clipping_under_no_sync() -> None:
    local, reduces = ({"k": "backward", "local": [0], "synced": []}, {"k": "backward", "local": [], "synced": [0]})
    clip = {"k": "clip", "at": AT, "changed": True}
    assert len(clip_rules._clipped_early(RecordedRun([[local, clip, reduces, clip, {"k": "before"}] * 3]))) == 3
    assert clip_rules._clipped_early(RecordedRun([[local, reduces, clip, {"k": "before"}] * 3])) == []
    assert (
        clip_rules._clipped_early(RecordedRun([[local, clip, {"k": "before"}] * 3])) == []
    )  # nothing reduces: another finding


def test_reductions_that_nobody_waits_for() -> None:
    left = {"unwaited": [2, ["train.py", 5]]}
    found = replica_rules.findings(RecordedRun([replica(**left), replica(after=2.0, grads=2.0, **left)]))
    assert [(f.cause, f.at, f.beside) for f in found] == [("gradients_differ", "train.py:5", "train.py:7")]


def test_a_script_without_torch_is_told_what_doctor_takes() -> None:
    why = doctor_command._unwatched(RecordedRun([[], []]), failed=False)
    assert why == "the script never imported torch. Give doctor the training script that you would start with torchrun."


def test_a_script_that_combines_gradients_itself_has_no_averaged_passes() -> None:
    """FSDP's set_gradient_divide_factor, or the script's own communication hook of DDP."""
    ddp = {"k": "ddp", "at": AT, "ranks": [0, 1]}
    backward = {"k": "backward", "at": AT, "mean": "mean", "form": "mean"}
    assert len(model_rules.averaged_passes(RecordedRun([[ddp, backward]] * 2))) == 1
    assert model_rules.averaged_passes(RecordedRun([[ddp, {"k": "own_reduction", "at": AT}, backward]] * 2)) == []


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), 0.0, None])
def test_gradients_without_a_finite_norm_say_nothing_about_clipping(norm: float | None) -> None:
    own = {"w": [2, 3.0, 3.0, 1.0, 2.0]}
    before = {"k": "before", "at": AT, "opt": 0, "step": 0, "own": own, "grads": own, "own_norm": norm}
    assert clip_rules._sampled(RecordedRun([[before]] * 2)) == []
    assert len(clip_rules._sampled(RecordedRun([[before | {"own_norm": 2.2}]] * 2))) == 1
