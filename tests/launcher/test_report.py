"""Which rank is named as the cause, and what a worker writes down about its exception."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.config import resolve
from paceline.errors import printable
from paceline.launcher import worker
from paceline.launcher.output import say
from paceline.launcher.report import Ending, Error, cause, describe, exit_code, read_error
from paceline.launcher.stacks import in_collective, place_of_crash
from paceline.launcher.supervise import Outcome
from paceline.world import ERROR_FILE, from_env

CLOSED = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:12345"


def error(time: float, *chain: str, shown: bool = False) -> Error:
    return Error(time, chain[0], f"Traceback of {chain[0]}\n", chain, shown)


REAL = Ending(0, 1, 9.0, error(2.0, "ValueError: bad"))
LATER = Ending(3, 1, 4.0, error(3.0, "KeyError: 'x'"))
VICTIM = Ending(1, 1, 1.0, error(1.0, CLOSED))
NAMED = "UsageError: rank 1 is in run.save, at train.py, line 3"
WRAPPED = Ending(4, 1, 1.0, error(0.5, "TrainingFailed: step 3", CLOSED))
KILLED = Ending(2, -9, 5.0)
EXITED = Ending(5, 3, 0.5)
REFUSED, REFUSED_FIRST = Ending(0, 2, 2.0), Ending(1, 2, 1.5)
FINE = Ending(6, 0, 0.1, place="by sys.exit() at train.py, line 5")


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        ([REAL, LATER], REAL),  # by the time of the error, not of the exit
        ([LATER, REAL], REAL),
        ([VICTIM, REAL], REAL),
        ([VICTIM, WRAPPED, LATER], LATER),
        ([VICTIM, KILLED], KILLED),
        ([KILLED, REAL], REAL),
        ([KILLED, EXITED], EXITED),
        ([VICTIM, WRAPPED], WRAPPED),  # victims only: the first
        ([FINE, VICTIM], VICTIM),
        ([REFUSED_FIRST, REFUSED], REFUSED),  # all print the same, and the lowest rank's is shown
        ([REFUSED_FIRST, EXITED, REFUSED], EXITED),
    ],
)
def test_cause(endings: list[Ending], first: Ending) -> None:
    assert cause(endings) is first


@pytest.mark.parametrize(
    ("message", "consequence"),
    [
        (CLOSED, True),
        ("RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("DistNetworkError: failed to recv, got 0 bytes", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
        ("HTTPError: Connection reset by peer", False),  # a download of the script's own
    ],
)
def test_consequence(message: str, consequence: bool) -> None:
    assert error(0.0, message).consequence is consequence


@pytest.mark.parametrize(
    ("endings", "text"),
    [
        ([REAL], "rank 0 failed: ValueError: bad\nTraceback of ValueError: bad\n"),
        ([VICTIM, REAL, LATER], "rank 0 failed: ValueError: bad\nTraceback of ValueError: bad\nrank 3 failed too.\n"),
        (
            [REAL, LATER, KILLED],
            "rank 0 failed: ValueError: bad\nTraceback of ValueError: bad\nranks 2, 3 failed too.\n",
        ),
        ([VICTIM, KILLED], "rank 2 was killed by SIGKILL (perhaps out of memory)\n"),
        ([Ending(1, -15, 0.0)], "rank 1 was killed by SIGTERM\n"),
        ([Ending(1, -40, 0.0)], "rank 1 was killed by signal 40\n"),
        ([EXITED, FINE], "rank 5 ended with exit code 3\n"),
        ([REFUSED_FIRST, REFUSED], "rank 0 ended with exit code 2\nrank 1 failed in the same way.\n"),
        ([Ending(0, 1, 0.0, error(0.0, "E: x", shown=True))], "rank 0 failed: E: x (shown above)\n"),
        ([Ending(0, None, 0.0, error(0.0, "E: x\ny"))], "rank 0 failed: E: x\nTraceback of E: x\ny\n"),
        (
            [FINE, VICTIM],
            "rank 6 ended early, with exit code 0, by sys.exit() at train.py, line 5, while others still needed it: do "
            f"all ranks take the same number of steps?\nrank 1 failed: {CLOSED}\nTraceback of {CLOSED}\n",
        ),
        (  # it says itself which call is missing on rank 6
            [FINE, Ending(1, 1, 1.0, error(1.0, NAMED, CLOSED))],
            "rank 6 ended early, with exit code 0, by sys.exit() at train.py, line 5, while others still needed it.\n"
            f"rank 1 failed: {NAMED}\nTraceback of {NAMED}\n",
        ),
        (  # which a rank that was killed did not come to either
            [KILLED, Ending(1, 1, 1.0, error(1.0, NAMED, CLOSED))],
            "rank 2 was killed by SIGKILL (perhaps out of memory)\n",
        ),
    ],
)
def test_text(endings: list[Ending], text: str) -> None:
    assert describe(endings) == text


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (REAL, 1),
        (KILLED, 137),
        (EXITED, 3),
        (Ending(0, None, 0.0, REAL.error), 1),
        (Ending(0, -6, 0.0, REAL.error), 1),  # native code that gave up while the script's error was on its way out
    ],
)
def test_exit_code(ending: Ending, code: int) -> None:
    assert exit_code(ending) == code


@pytest.mark.parametrize("content", ["", "{", "[]", '{"time": "x"}', '{"time": 1}'])
def test_damaged_record_is_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert read_error(str(tmp_path / "error.json")) is None
    assert read_error(str(tmp_path / "none.json")) is None


def fail(kind: type[BaseException], cause: BaseException | None = None) -> NoReturn:
    raise kind("why") from cause


def test_record_of_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    hook = worker._ExceptHook()
    monkeypatch.setattr(sys, "excepthook", hook)
    try:
        fail(ValueError, KeyError("inner"))
    except ValueError as caught:
        worker.report(caught, hook)
    found = read_error(str(tmp_path / "error.json"))
    assert found is not None
    assert found.summary == "ValueError: why"
    assert found.chain == ("ValueError: why", "KeyError: 'inner'")
    assert "in fail" in found.traceback
    assert found.traceback.endswith("ValueError: why\n")
    assert not found.shown
    assert capfd.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("chained", [True, False])
def test_hooks_of_the_script_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], chained: bool
) -> None:
    """One that calls the hook before it, as experiment trackers do, and one that prints by itself, as rich does."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    before = worker._ExceptHook()

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if chained:
            before(kind, error, None)
        print("hook", error, file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    worker.report(ValueError("why"), before)
    assert capfd.readouterr().err == "hook why\n"
    assert json.loads((tmp_path / "error.json").read_text())["shown"] is not chained


def test_a_broken_hook_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: 1 / 0)
    worker.report(ValueError("why"), worker._ExceptHook())
    found = read_error(str(tmp_path / "error.json"))
    assert found is not None
    assert (found.summary, found.shown) == ("ValueError: why", False)


def test_without_a_launcher_the_traceback_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    hook = worker._ExceptHook()
    monkeypatch.setattr(sys, "excepthook", hook)
    worker.report(ValueError("why"), hook)
    assert capfd.readouterr().err == "ValueError: why\n"


def test_errors_of_paceline_show_only_the_script() -> None:
    try:
        from_env({"RANK": "x"})
    except Exception as caught:
        text = str(worker.describe(caught)["traceback"])
    assert 'from_env({"RANK": "x"})' in text
    assert "world.py" not in text
    assert text.splitlines()[-1].startswith("paceline.errors.WorldError: RANK='x'")


def test_a_syntax_error_is_summed_up_by_what_is_wrong() -> None:
    try:
        compile("x = (1,\n", "train.py", "exec")
    except SyntaxError as caught:
        record = worker.describe(caught)
    assert record["summary"] == "SyntaxError: '(' was never closed (train.py, line 1)"
    assert "    x = (1," in str(record["traceback"])


def test_frames_without_a_file_and_causes_inside_paceline_are_left_out_too() -> None:
    try:
        resolve(("here", {"precision": "fp8"}))  # raised in the __init__ that dataclasses make
    except Exception as caught:
        text = str(worker.describe(caught)["traceback"])
    assert 'resolve(("here", {"precision": "fp8"}))' in text
    assert text.count("  File ") == 1


def test_other_errors_show_the_frames_inside_paceline() -> None:
    try:
        from_env(None)  # type: ignore[arg-type]
    except Exception as caught:
        text = str(worker.describe(caught)["traceback"])
    assert "world.py" in text


def test_a_note_of_a_hook_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("exceptions have notes from Python 3.11 on")
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    before = worker._ExceptHook()

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        error.add_note("paceline: because the shard is empty")
        before(kind, error, None)

    monkeypatch.setattr(sys, "excepthook", hook)
    worker.report(ValueError("why"), before)
    record = read_error(str(path))
    assert record is not None
    assert record.traceback.endswith("ValueError: why\npaceline: because the shard is empty\n")
    assert not record.shown


def test_an_abort_by_gloo_says_that_ranks_made_other_calls() -> None:
    gloo = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    text = describe([Ending(1, -6, 3.0)], [gloo])
    assert "rank 1 was killed by SIGABRT" in text
    assert "Do only some ranks make a call that all must make, such as under `if run.main`" in text
    assert "run.main" not in describe([Ending(1, -6, 3.0)], ["free(): invalid pointer"])
    assert "run.main" not in describe([Ending(1, -9, 3.0)], [gloo])


def test_ranks_that_abort_at_one_place_are_not_said_to_be_in_different_calls() -> None:
    place = "train.py, line 7, in all_reduce()"
    alike = [Ending(rank, -6, 3.0, place=place, in_collective=True) for rank in (0, 1)]
    text = describe(alike)
    assert "different" not in text
    assert "same sizes and dtypes" in text
    other = Ending(1, -6, 3.0, place="train.py, line 9, in broadcast()", in_collective=True)
    assert "Ranks were in different collective operations" in describe([alike[0], other])


def test_an_abort_while_a_group_is_made_tells_nothing_of_collective_calls(tmp_path: Path) -> None:
    library = "/site-packages/torch/distributed/distributed_c10d.py"
    for function, expected in (("init_process_group", False), ("new_group", False), ("all_reduce", True)):
        (tmp_path / "error.crash").write_text(
            "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
            f'  File "{library}", line 1 in {function}\n  File "train.py", line 3 in <module>\n'
        )
        crash = place_of_crash(str(tmp_path / "error"))
        assert crash is not None
        assert in_collective(crash) == expected


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\rall is well\x9b1m \u202egnp.exe \ud800"
CALM = r"\x1b]0;owned\x07\x1b[2Jred\rall is well\x9b1m \u202egnp.exe \ud800"


def test_control_characters_are_spelt_out() -> None:
    assert printable(HOSTILE) == CALM
    plain = "ends\twith a tab, Ärger, 漢字 and \U0001f600\n"
    assert printable(plain) == plain


def test_escape_sequences_of_ranks_and_other_machines_do_not_reach_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of an exception, of the last lines of a rank's output, of a place in the script, and of another machine."""
    path = tmp_path / "error.json"
    error = worker.describe(ValueError(HOSTILE))
    path.write_text(json.dumps(error))
    record = read_error(str(path))
    assert record is not None
    stories = [
        describe([Ending(0, 1, 3.0, record)]),
        describe([Ending(1, 3, 3.0)], [HOSTILE]),
        describe([Ending(0, 0, 1.0, place=HOSTILE), Ending(1, -9, 3.0, role=HOSTILE)]),
        f"node 1 ({HOSTILE}): {HOSTILE}\n",
    ]
    for story in stories:
        assert Outcome(1, story).report.count(CALM) >= 1
        say(story)
    for text in capfd.readouterr():
        assert not set(text) & set("\x1b\x07\x9b\r\u202e")
