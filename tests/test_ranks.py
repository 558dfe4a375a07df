"""Teams of ranks: what a target does ends with it, and one that fails, dies or hangs is told as what it did. The same
of tests that are marked `ranks`, of which each is reported for itself."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import ranks
from tests.ranks import run_ranks


def leave_traces() -> list[object]:
    found = [str(torch.get_default_dtype()), os.environ.get("PACELINE_TRACE"), dist.get_world_size()]
    torch.set_default_dtype(torch.float64)
    os.environ["PACELINE_TRACE"] = "left"
    return found


def draw() -> list[float]:
    return [random.random(), float(np.random.rand())]


def one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def one_ends_badly() -> None:
    import atexit

    if dist.get_rank() == 1:
        atexit.register(os._exit, 7)


def test_a_target_leaves_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("PACELINE_TRACE", value)
        assert run_ranks(2, "tests.test_ranks:leave_traces") == [["torch.float32", value, 2]] * 2
    monkeypatch.delenv("PACELINE_TRACE")
    assert run_ranks(2, "tests.test_ranks:leave_traces") == [["torch.float32", None, 2]] * 2


def test_ranks_differ_where_processes_do() -> None:
    """In what Python and NumPy draw unseeded: code that takes it for alike on all ranks fails."""
    one, two = run_ranks(2, "tests.test_ranks:draw")
    assert all(a != b for a, b in zip(one, two))


@pytest.mark.parametrize(
    ("target", "deadline", "told"),
    [
        ("one_dies", 60, r"(?s)rank 1 \(exit code -9\)"),
        ("one_hangs", 6, r"(?s)rank 1 \(not done at the deadline\):.*in one_hangs"),
        ("one_ends_badly", 60, r"(?s)rank 1 \(exit code 7\)"),
    ],
)
def test_what_a_rank_did_is_told(target: str, deadline: float, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        run_ranks(2, f"tests.test_ranks:{target}", deadline=deadline)


# --- tests that are marked `ranks`


@pytest.mark.ranks(1, 2, full=3)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_marked_test_runs_on_every_rank(factor: int, request_size: int) -> None:
    if request_size == 1:
        assert not dist.is_initialized()
        return
    assert dist.get_world_size() == request_size
    total = torch.tensor([factor])
    dist.all_reduce(total)
    assert total.item() == factor * request_size


@pytest.fixture
def request_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that the id of the test names."""
    return int(request.node.callspec.id[0])


class Shape:
    """Of this module, and so pickled by its name."""

    def __init__(self, sides: int) -> None:
        self.sides = sides


@pytest.fixture
def square() -> Shape:
    return Shape(4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("double", [lambda x: 2 * x])
def test_fixtures_reach_the_ranks_by_value(tmp_path: Path, square: Shape, double: object) -> None:
    assert isinstance(square, Shape)
    assert double(square.sides) == 8  # type: ignore[operator]
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(2)
def test_what_torch_draws_does_not_depend_on_the_tests_before() -> None:
    assert torch.initial_seed() == torch.random.default_generator.initial_seed()
    drawn = torch.rand(1).item()
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(torch.initial_seed())).item()


STORY = """
import atexit, os, signal, sys, time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

def process(): print(f"process {dist.get_rank()} {os.getpid()}\\n", end="")  # one write: both ranks print

def test_first(): process()

def test_in_the_same_processes(): process()

def test_fails_on_one_rank():
    process()
    assert dist.get_rank() != 1, "what was wrong"

def test_in_new_processes(): process()

def test_waits_for_one_that_failed():
    assert dist.get_rank() == 0
    dist.barrier()

def test_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.timeout(20)
def test_hangs():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()

def test_raises_nothing():
    with pytest.raises(ValueError):
        pass

def test_leaves_a_dtype(): torch.set_default_dtype(torch.float64)

def test_is_skipped(): pytest.skip("not today")

def test_is_skipped_by_one():
    if dist.get_rank() == 0:
        pytest.skip("not here")

def test_exits(): sys.exit(0)

def test_after_which_a_rank_ends_badly():
    if dist.get_rank() == 0:
        atexit.register(os._exit, 7)
"""


class Story(NamedTuple):
    """What pytest says of a module."""

    outcomes: dict[str, int]
    text: str

    def of(self, test: str) -> str:
        found = re.search(rf"(?ms)^_+ test_{test}\[2ranks\] _+$(.*?)^(_+|=+) ", self.text)
        assert found is not None, self.text
        return found[1]


def story(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str) -> Story:
    """Of STORY, in this process and on the ranks that there are. The ranks import tests by their place in the
    repository, so the module lies there while it runs."""
    monkeypatch.setattr(ranks, "FOLLOW_SECONDS", 0.5)
    path = Path(__file__).with_name(f"test_story_{os.getpid()}_{next(NUMBERS)}.py")
    path.write_text(STORY)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "200")
            plugins = ["-p", "tests.ranks_marker", "-p", "no:cacheprovider", "--noconftest"]
            done = pytester.runpytest_inprocess(*plugins, "-rA", *options, str(path))
    finally:
        path.unlink()
    return Story(done.parseoutcomes(), done.stdout.str())


NUMBERS = itertools.count()


def test_a_failure_is_of_its_test_alone_and_the_next_has_new_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = story(pytester, monkeypatch, "-k", "first or same_processes or fails_on_one_rank or in_new_processes")
    assert found.outcomes.pop("deselected") > 0
    assert found.outcomes.pop("passed") == 3, found.text
    assert found.outcomes.pop("failed") == 1, found.text
    failed = found.of("fails_on_one_rank")
    assert re.search(r"(?s)rank 0 passed.*rank 1 failed: Traceback.*AssertionError: what was wrong", failed)
    assert " - Failed: AssertionError: what was wrong" in found.text.split("short test summary info")[1]
    # the summary repeats a failure where CI is set: only what stands before it is counted
    processes = re.findall(r"process 0 (\d+)", found.text.split("short test summary info")[0])
    assert len(processes) == 4, found.text
    assert len(set(processes)) == 2


@pytest.mark.conformance
def test_what_each_rank_did_is_told_of_a_marked_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = story(pytester, monkeypatch)
    for test, told in {
        "waits_for_one_that_failed": r"rank 0 \(still in it when .*in test_waits.*rank 1 failed: .*AssertionError",
        "dies": r"rank 1 \(exit code -9\)",
        "hangs": r"rank 0 \(not done at .*in test_hangs.*rank 1 \(not done at the deadline\):.*in test_hangs",
        "raises_nothing": r"rank 0 failed:.*DID NOT RAISE.*rank 1 failed:.*DID NOT RAISE",
        "leaves_a_dtype": r"rank 0 failed: the test left behind: torch global default_dtype: torch.float64",
        "is_skipped_by_one": r"rank 0 skipped it: not here.*rank 1 passed",
        "exits": r"rank 0 failed:.*SystemExit",
    }.items():
        assert re.search(f"(?s){told}", found.of(test)), found.of(test)
    assert "SKIPPED" in found.text
    assert "not today" in found.text
    assert re.search(r"(?s)ERROR at teardown of test_after_which\w*\[2ranks\] .*rank 0: exit code 7", found.text)
    assert found.outcomes == {"failed": 8, "passed": 4, "skipped": 1, "errors": 1}, found.text


def test_a_function_that_runs_ranks_of_its_own_ends_the_session_of_a_module() -> None:
    """One job at a time: it does not wait for the tests above."""
    assert run_ranks(2, "tests.test_ranks:leave_traces", deadline=20) == [["torch.float32", None, 2]] * 2


@pytest.mark.parametrize(
    ("marker", "arguments", "told"),
    [
        ("ranks(2)", "monkeypatch", "the fixture 'monkeypatch' acts on pytest's process"),
        ("ranks()", "", "ranks needs different numbers of processes"),
        ("ranks(2, full=2)", "", "ranks needs different numbers of processes"),
        ("ranks(2, nightly=3)", "", r"ranks\(nightly=...\): give 'conformance', 'full' or 'campaign'"),
    ],
)
def test_a_marker_that_cannot_be_is_told(marker: str, arguments: str, told: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it({arguments}): pass\n")
    done = pytester.runpytest_inprocess("-p", "tests.ranks_marker", "--collect-only")
    assert re.search(told, done.stdout.str() + done.stderr.str()), done.stdout.str()


def test_no_check_hides_behind_the_name_of_another_test() -> None:
    """pytest finds functions that are named test_...: one named check_... in their modules would never run, or run
    where no report names it."""
    here = Path(__file__).parent
    files = [path for path in here.rglob("*.py") if path.name.startswith("test_") or path.stem.endswith("checks")]
    assert len(files) > 100
    found = [
        f"{path.relative_to(here)}: {name}"
        for path in files
        for name in re.findall(r"^def (check_\w+|run_all)\(", path.read_text(), re.M)
    ]
    assert not found, "name them test_..., and mark them @pytest.mark.ranks(...) where they need several processes"
