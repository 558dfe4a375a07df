"""The event log of one process, and a file of records that is read while it grows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.observe import event_log
from paceline.observe.event_log import EventLog
from paceline.observe.records import RecordFile, RecordReader, read_records
from paceline.observe.script_stack import ScriptStack


def test_the_observers_own_time_and_errors_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(event_log, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    log = EventLog(str(tmp_path / "events.jsonl"), ScriptStack([__file__]))
    seconds[0] = 3.0
    with log.overhead():
        seconds[0] = 5.0
        assert log.clock() == 3.0
        raise KeyError("no such tensor")
    seconds[0] = 6.0
    assert log.clock() == 4.0
    assert [log.few("reads", 2) for _ in range(3)] == [True, True, False]
    log.record("stepped", lr=0.1)
    log.finish()
    trouble, stepped, end = read_records(str(tmp_path / "events.jsonl"))
    assert (trouble["k"], trouble["text"]) == ("trouble", "KeyError: 'no such tensor'")
    assert (stepped["k"], stepped["at"][0], stepped["lr"]) == ("stepped", __file__, 0.1)
    assert (end["k"], end["failed"]) == ("end", False)
    log.stop()
    log.record("late")
    assert len(read_records(str(tmp_path / "events.jsonl"))) == 3


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    reader = RecordReader(path)
    assert reader.read() == []
    file = RecordFile(path, most=2)
    assert file.write({"n": 1}, now=True)
    assert reader.read() == [{"n": 1}]
    with open(path, "a", encoding="utf-8") as other:
        other.write('{"n": ')
    assert reader.read() == []
    with open(path, "a", encoding="utf-8") as other:
        other.write("2}\n")
    assert reader.read() == [{"n": 2}]
    assert [file.write({"n": 3}), file.write({"n": 4})] == [True, False]


@pytest.mark.parametrize("text", ["", "{\n", '{"n": 1}\n{"n"'])
def test_what_a_killed_process_left(text: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(text)
    assert read_records(str(tmp_path / "records.jsonl")) == [{"n": 1}] * text.startswith('{"n": 1}')
