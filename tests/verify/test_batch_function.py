"""The function of a script that makes its batches: found in one run, replaced in another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.observe.script_stack import ScriptStack
from paceline.verify.plain_worker.batch_function import BatchFunctionFinder, BatchFunctionReplacer

HEAD = """
import torch
from types import SimpleNamespace
SIZE = 3

def make(seed):
    return torch.full((SIZE, 2), float(seed))
"""

# How scripts make batches: each `batches()` yields (the model's input, the mask)
STYLES = {
    "a function": """
def get_batch(seed):
    x = make(seed)
    return x, x > 0, SIZE
def batches():
    for seed in range(1, 3):
        x, mask, count = get_batch(seed)
        yield x, mask
""",
    "a generator": """
def stream():
    for seed in range(1, 3):
        x = make(seed)
        yield {"x": x[:, :1], "mask": x > 0}
def batches():
    for batch in stream():
        yield batch["x"], batch["mask"]
""",
    "an object with attributes": """
def rollout(seed):
    x = make(seed)
    return SimpleNamespace(x=x, mask=x > 0)
def batches():
    for seed in range(1, 3):
        found = rollout(seed)
        yield found.x, found.mask
""",
    "a method": """
class Data:
    def __init__(self):
        self.seed = 0
    def next_batch(self):
        self.seed += 1
        x = make(self.seed)
        return [x, x > 0]
data = Data()
def batches():
    for _ in range(2):
        x, mask = data.next_batch()
        yield x, mask
""",
    "a closure": """
def batches():
    offset = 0
    def get(seed):
        x = make(seed + offset)
        return x, x > 0
    for seed in range(1, 3):
        x, mask = get(seed)
        yield x, mask
""",
}


@pytest.fixture(autouse=True)
def no_trace() -> Any:
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def run(path: Path, use: Callable[[Tensor, Tensor], None]) -> None:
    text = path.read_text() + "\nfor x, mask in batches():\n    use(x, mask)\n"
    exec(compile(text, str(path), "exec"), {"use": use, "__name__": "__main__"})


@pytest.mark.parametrize("style", STYLES)
def test_batches_are_recorded_and_replaced_in_every_style(style: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + STYLES[style])
    stack = ScriptStack([str(path)])
    stored: list[list[Any]] = []
    finder = BatchFunctionFinder(lambda: None, stored.append)

    def trace(frame: Any, event: str, value: Any) -> Any:
        if event == "return":
            finder.on_return(frame, value)
        return trace if frame.f_code.co_filename == str(path) else None

    seen: list[float] = []

    def first_run(x: Tensor, mask: Tensor) -> None:
        if finder.searching:
            finder.find((x,))
        seen.append(float(x.sum()))

    sys.settrace(trace)
    run(path, first_run)
    sys.settrace(None)
    assert finder.name is not None
    assert [sum(isinstance(part, Tensor) for part in parts) for parts in stored] == [2, 2]

    # another process: each batch has the rows of two ranks, the masks too
    left = [[torch.cat([part, part]) if isinstance(part, Tensor) else part for part in parts] for parts in stored]
    replaced: list[tuple[Tensor, Tensor]] = []
    BatchFunctionReplacer(finder.name, lambda: left.pop(0), stack, lambda: True)
    run(path, lambda x, mask: replaced.append((x, mask)))
    assert [float(x.sum()) for x, _ in replaced] == [2 * total for total in seen]
    assert all(len(x) == len(mask) == 6 for x, mask in replaced)
    assert not left


def test_a_function_that_does_not_feed_the_model_is_not_taken(tmp_path: Path) -> None:
    stored: list[Any] = []
    finder = BatchFunctionFinder(lambda: None, stored.append)
    path = tmp_path / "train.py"
    path.write_text(HEAD)
    kept: dict[str, Any] = {}

    def trace(frame: Any, event: str, value: Any) -> Any:
        if event == "return":
            finder.on_return(frame, value)
        return trace

    exec(compile(HEAD, str(path), "exec"), kept)
    sys.settrace(trace)
    kept["make"](3)
    sys.settrace(None)
    assert not finder.find((torch.ones(3, 2),))
    assert finder.name is None
    assert stored == []


def test_evaluations_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + STYLES["a function"])
    name = {"file": str(path), "line": HEAD.count("\n") + 2, "name": "get_batch"}
    BatchFunctionReplacer(name, lambda: pytest.fail("replaced"), ScriptStack([str(path)]), lambda: True)
    sizes: list[int] = []
    with torch.no_grad():
        run(path, lambda x, mask: sizes.append(len(x)))
    assert sizes == [3, 3]
