"""Files of spans, and what is made of them: without processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.timeline import span_file
from paceline.timeline.chrome_trace import (
    cannot_trace,
    first_rank,
    join_and_say,
    join_left,
    part_of,
    parts_of,
)
from paceline.timeline.span_file import Phase, Span, SpanWriter, has_ended, read

MS = 10**6  # nanoseconds


def about(rank: int, **more: Any) -> dict[str, Any]:
    known = {"rank": rank, "host": "here", "machine": "a", "monotonic_ns": 0, "wall_ns": 0, "accelerated": False}
    return {**known, "in_step": True, "alike": True, **more}


def write(path: Path, described: dict[str, Any], *spans: tuple[Phase, int, int, int]) -> SpanWriter:
    """spans: (phase, step, start, end), of epoch 0, in milliseconds."""
    writer = SpanWriter(path, described)
    for phase, step, start, end in spans:
        within = Phase.BACKWARD if phase is Phase.COMMUNICATION else phase
        writer.write(phase, within, 0, 0, step, start * MS, end * MS)
    return writer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    parts_of(tmp_path / "trace.json").mkdir()
    return tmp_path / "trace.json"


def part(file: Path, described: dict[str, Any], *spans: tuple[Phase, int, int, int]) -> SpanWriter:
    return write(part_of(file, described["rank"], 1), described, *spans)


def events(file: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def joined(file: Path, ranks: Iterable[int] = range(99)) -> list[str]:
    """What a launcher of these ranks says when they have ended."""
    said: list[str] = []
    join_left(str(file), ranks, said.append)
    assert all(line.startswith("paceline: ") for line in said)
    return [line.removeprefix("paceline: ") for line in said]


def test_what_was_written_is_read_while_the_process_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    writer = SpanWriter(path, {"rank": 3})
    writer.write(Phase.COMMUNICATION, Phase.BACKWARD, 2, 1, 7, 10, 20)
    found = read(path)
    assert found is not None
    assert found.about == {"rank": 3}
    assert found.spans == [Span(Phase.COMMUNICATION, Phase.BACKWARD, 2, 1, 7, 10, 20)]
    assert not found.ended
    assert not has_ended(path)
    writer.describe({"rank": 3, "in_step": True})
    writer.close()
    found = read(path)
    assert found is not None
    assert found.ended
    assert found.about["in_step"] is True
    assert has_ended(path)


def test_the_newest_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_file, "SPANS", 8)
    path = tmp_path / "spans"
    writer = SpanWriter(path, {})
    size = path.stat().st_size
    for step in range(20):
        writer.write(Phase.DATA, Phase.DATA, 0, 0, step, step, step + 1)
    writer.close()
    found = read(path)
    assert found is not None
    assert [span.step for span in found.spans] == list(range(12, 20))
    assert path.stat().st_size == size


def test_what_is_no_file_of_spans(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"PLSPANS1")
    assert read(tmp_path / "short") is None
    assert read(tmp_path / "missing") is None
    assert has_ended(tmp_path / "missing")


def test_steps_hold_their_phases(file: Path) -> None:
    part(file, about(0), (Phase.DATA, 0, 5, 6), (Phase.FORWARD, 0, 6, 8), (Phase.UPDATE, 0, 9, 10)).close()
    lines = joined(file)
    assert lines[0].startswith("trace of 1 rank, 1 step, in ")
    found = [(event["name"], event["ts"], event["dur"]) for event in events(file)]
    assert found == [("step", 0, 5000), ("data", 0, 1000), ("forward", 1000, 2000), ("update", 4000, 1000)]
    assert [path.name for path in file.parent.iterdir()] == ["trace.json"]


def test_of_a_rank_that_is_killed_before_it_has_said_its_lines_the_launcher_says_them(file: Path) -> None:
    part(file, about(0), (Phase.DATA, 0, 5, 6)).close()

    def say(line: str) -> None:
        join_left(str(file), [0], said.append)  # what the launcher does if the rank ends here

    said: list[str] = []
    join_and_say(str(file), say)
    assert said[0].startswith("paceline: trace of 1 rank, 1 step, in ")
    assert joined(file, [0]) == []
    assert [path.name for path in file.parent.iterdir()] == ["trace.json"]


def test_waiting_is_what_an_exchange_took_longer_than_on_the_last_rank(file: Path) -> None:
    part(file, about(0), (Phase.BACKWARD, 0, 0, 2), (Phase.COMMUNICATION, 0, 2, 9)).close()
    part(file, about(1), (Phase.BACKWARD, 0, 0, 8), (Phase.COMMUNICATION, 0, 8, 9)).close()
    joined(file)
    found = [(event["pid"], event["name"], event["dur"]) for event in events(file) if event["name"] != "step"]
    assert found == [
        (0, "backward", 2000),
        (0, "waiting", 6000),
        (0, "communication", 1000),
        (1, "backward", 8000),
        (1, "communication", 1000),
    ]


@pytest.mark.parametrize(
    "described",
    [about(1, alike=False), about(1, in_step=False), {key: about(1)[key] for key in about(1) if key != "alike"}],
    ids=["other parts of a step", "apart", "not told"],
)
def test_waiting_is_not_told_apart_where_ranks_make_other_exchanges(file: Path, described: dict[str, Any]) -> None:
    part(file, about(0), (Phase.COMMUNICATION, 0, 2, 9)).close()
    part(file, described, (Phase.COMMUNICATION, 0, 8, 9)).close()
    joined(file)
    assert "waiting" not in {event["name"] for event in events(file)}


def test_nor_in_a_step_in_which_they_make_another_number(file: Path) -> None:
    both = (Phase.COMMUNICATION, 1, 12, 15)
    part(file, about(0), (Phase.COMMUNICATION, 0, 1, 2), (Phase.COMMUNICATION, 0, 2, 9), both).close()
    part(file, about(1), (Phase.COMMUNICATION, 0, 8, 9), (Phase.COMMUNICATION, 1, 14, 15)).close()
    joined(file)
    assert [event["args"]["step"] for event in events(file) if event["name"] == "waiting"] == [1]


def test_machines_are_placed_by_their_wall_clocks_and_ranks_of_one_by_its_own(file: Path) -> None:
    here = {"machine": "a", "monotonic_ns": 100 * MS, "wall_ns": 5000 * MS}
    started_later = {"machine": "a", "monotonic_ns": 107 * MS, "wall_ns": 5008 * MS}  # its wall clock was set meanwhile
    there = {"machine": "b", "monotonic_ns": 900 * MS, "wall_ns": 5003 * MS}
    part(file, about(0, **here), (Phase.DATA, 0, 110, 111)).close()
    part(file, about(1, **started_later), (Phase.DATA, 0, 110, 111)).close()
    part(file, about(2, **there), (Phase.DATA, 0, 910, 911)).close()
    joined(file)
    assert [event["ts"] for event in events(file) if event["name"] == "data"] == [0, 0, 3000]


def test_a_launcher_joins_what_is_left_of_its_own_ranks(file: Path) -> None:
    part(file, about(2), (Phase.DATA, 0, 0, 1)).close()
    part(file, about(10), (Phase.DATA, 0, 0, 1)).close()
    assert first_rank(file) == 2
    assert joined(file, range(2)) == []
    assert joined(file, range(2, 4))[0].startswith("trace of 2 ranks")
    assert joined(file, range(2, 4)) == []  # done


def test_a_disk_that_takes_nothing_more(file: Path) -> None:
    """The parts stay, and that is said."""
    part(file, about(0), (Phase.DATA, 0, 0, 1)).close()
    file.mkdir()
    (line,) = joined(file, range(1))
    assert "cannot write trace=" in line
    assert "at the end of the run" in line
    assert str(parts_of(file)) in line
    assert first_rank(file) == 0


def test_a_run_without_steps(file: Path) -> None:
    part(file, about(0)).close()
    (line,) = joined(file)
    assert "nothing to write" in line
    assert not file.exists()
    assert not parts_of(file).exists()


def test_where_a_trace_cannot_be_written(tmp_path: Path) -> None:
    assert cannot_trace(None, 0, True) is None
    old = tmp_path / "old.json"
    old.write_text("{}")
    assert cannot_trace(str(old), 0, True) is None
    assert old.read_text() == "{}"  # until the run ends
    assert cannot_trace(str(tmp_path / "new" / "folder" / "trace.json"), 0, True) is None
    for file in ("", str(tmp_path), "/dev/null"):
        assert f"trace={file!r} is not the path of a regular file. Give a file" in str(cannot_trace(file, 0, True))
    told = cannot_trace(str(old / "trace.json"), 3, True)
    assert f"trace={str(old / 'trace.json')!r}: rank 3 cannot write this file: Not a directory. Give a file" in str(
        told
    )


def test_parts_of_an_earlier_run_go_when_the_next_begins(file: Path) -> None:
    part(file, about(7), (Phase.DATA, 0, 0, 1)).close()
    assert cannot_trace(str(file), 1, False) is None
    assert first_rank(file) == 7
    assert cannot_trace(str(file), 0, True) is None
    assert first_rank(file) is None
