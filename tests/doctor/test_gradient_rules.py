"""Which gradients are dropped by mistake, on written records."""

from __future__ import annotations

from typing import Any

from paceline.doctor.rules import gradient_rules
from paceline.doctor.rules.recorded_run import Event, RecordedRun

ZERO, BACKWARD, STEP = ["train.py", 5], ["no such file", 7], ["train.py", 9]


def accumulate(
    steps: int, passes: int = 4, keep: int = 1, form: str = "divided", batches: bool = True, lines: bool = False,
    **before: Any,
) -> list[Event]:  # fmt: skip
    """Steps of `passes` backward passes, of which the gradients of the last `keep` are left.

    batches: does each pass read one? lines: has each pass a line of its own?
    """
    events: list[Event] = []
    number = 0
    for step in range(steps):
        events += [] if batches else [{"k": "yield", "at": []}]
        for place in range(passes):
            number += 1
            events += [{"k": "yield", "at": []}] if batches else []
            at = [BACKWARD[0], 7 + place] if lines else BACKWARD
            events.append({"k": "backward", "at": at, "local": [], "synced": [0], "mean": form, "form": form})
            if place < passes - keep:
                events.append({"k": "dropped", "opt": 0, "passes": [number], "at": ZERO})
        used = list(range(number - keep + 1, number + 1))
        events.append({"k": "before", "opt": 0, "step": step, "uses": used, "at": STEP, **before})
    return events


def found(events: list[Event]) -> list[str]:
    return [f"{f.cause} at {f.at}" for f in gradient_rules.findings(RecordedRun([events, events]))]


def sample(scale: float) -> dict[str, list[float]]:
    return {"w": [3, 6 * scale, 2 * scale, 3 * scale, -2 * scale, scale]}


def test_the_last_micro_batch_alone_is_left() -> None:
    assert found(accumulate(5)) == ["gradients_dropped at train.py:5"]
    assert found(accumulate(2)) == []
    assert found(accumulate(5, keep=4)) == []
    assert found(accumulate(5, form="mean")) == ["gradients_dropped at train.py:5"]  # as many at every step
    assert found(accumulate(5, own=sample(1.0), grads=sample(0.2))) == ["gradients_dropped at train.py:5"]  # clipped


def test_steps_that_are_skipped_now_and_then() -> None:
    uneven = [accumulate(1, passes=n, form="mean") for n in (2, 1, 3, 1, 1, 2, 4)]
    events: list[Event] = []
    for part in uneven:
        made = sum(e["k"] == "backward" for e in events)
        for e in part:
            numbers = {key: [n + made for n in e[key]] for key in ("passes", "uses") if key in e}
            events.append({**e, **numbers})
    assert found(events) == []


def test_gradients_that_are_used_otherwise() -> None:
    assert found(accumulate(5, passes=2, batches=False, lines=True)) == []  # two losses of a batch
    assert found(accumulate(5, passes=2, batches=False)) == []  # two passes over a batch, as SAM makes
    other = {"w": [3, 6.0, -1.0, 0.5, 2.0, 3.0]}
    assert found(accumulate(5, own=sample(1.0), grads=other)) == []  # kept by the script, as DP-SGD does
    gan = accumulate(5, passes=2)
    for place, e in reversed(list(enumerate(gan))):
        if e["k"] == "dropped":  # the other model's optimizer has used them
            gan.insert(place, {"k": "before", "opt": 1, "step": 0, "uses": e["passes"], "at": STEP})
    assert found(gan) == []
