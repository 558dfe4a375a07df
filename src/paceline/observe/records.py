"""Files of records: one JSON object a line, written by one process, and read by others while it writes."""

from __future__ import annotations

import json
from typing import Any

Record = dict[str, Any]


class RecordFile:
    """The file of one process.

    Args:
        path: The file; it begins empty.
        most: No more records than that are written, so that a run of days fills no disk. None: all are.
    """

    def __init__(self, path: str, most: int | None = None) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
        self._left = most

    def write(self, record: Record, now: bool = False) -> bool:
        """Write a record, if there is room. Returns whether there was.

        now: flush, since another process waits for this record, or this process may be about to wait for ever.
        """
        if self._left is not None:
            if not self._left:
                return False
            self._left -= 1
        self._file.write(json.dumps(record, default=str) + "\n")
        if now:
            self._file.flush()
        return True

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RecordReader:
    """Reads a file that may still grow."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._offset, self._rest = 0, ""  # how far the file has been read; its incomplete last line

    def read(self) -> list[Record]:
        """The records that are new; [] where there is no file. What is no JSON is left out: the end of a process that
        was killed, and that another one has written after."""
        try:
            with open(self.path, encoding="utf-8") as file:
                file.seek(self._offset)
                text = file.read()
                self._offset = file.tell()
        except OSError:
            return []
        *lines, self._rest = (self._rest + text).split("\n")
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def read_records(path: str) -> list[Record]:
    """All records of a file, without an incomplete last one."""
    return RecordReader(path).read()


def append_record(path: str, record: Record) -> None:
    """Add a record to a file that several processes share."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
