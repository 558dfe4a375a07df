"""Files of records: one JSON object per line, written by one process, and read by others while it writes."""

from __future__ import annotations

import json
from typing import Any

Record = dict[str, Any]


class RecordFile:
    """The file of one process.

    Args:
        path: the file; it starts empty.
        most: write at most this many records, so that a run of days cannot fill the disk. None: no limit.
    """

    def __init__(self, path: str, most: int | None = None) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # open while the process lives
        self._left = most

    def write(self, record: Record, now: bool = False) -> bool:
        """Write a record unless the limit is reached. Returns whether it was written.

        now: flush, because another process waits for this record, or this process may be about to wait forever.
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
        self._offset, self._rest = 0, ""  # position in the file; text of its incomplete last line

    def read(self) -> list[Record]:
        """Return the records since the last call; [] if there is no file. Lines that are not JSON are skipped: a killed
        process may leave an incomplete line, and another process may write after it."""
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
    """All records of a file except an incomplete last one."""
    return RecordReader(path).read()


def append_record(path: str, record: Record) -> None:
    """Add a record to a file that several processes share."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
