"""Compare the collectives of the ranks, also while the script runs: ranks with different calls may never end."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import RecordedRun, file_line, finding_at
from paceline.launcher.report import name_ranks
from paceline.observe.records import RecordReader

STUCK_SECONDS = 10.0  # without progress, while all ranks wait in collectives that others have not reached
LEFT_SECONDS = 3.0  # without progress, after a rank has ended and while the others wait
LEAVE_TOGETHER = (
    "Leave the loop in the same iteration on all ranks: base the decision on a value that is the same on all of "
    "them (all_reduce the loss or the flag, or broadcast rank 0's decision), not by a rank's local value."
)
_NEAR = 64  # look back over this many calls for a reordering
_MISMATCH = re.compile(
    r"preamble|[Mm]ismatch between collectives|nbytes|different (sizes|shapes|dtypes)|unexpected size"
)
_EMPTY = ("barrier", "monitored_barrier")  # collectives without data: their order does not matter
STILL_SECONDS = 300.0  # without an event on any rank, while a rank waits in a collective

# A line of calls-N.jsonl: {"b": number, "op", "g": group, "ranks", "at", "way", "branches", and the fields that must be
# equal on all ranks} when a collective begins, {"e": number} when it has ended.
Entry = dict[str, Any]


@dataclass
class _Rank:
    """The records of one rank that have been read so far."""

    file: RecordReader  # reads its collectives
    events: str  # the path of its event log
    calls: dict[str, list[Entry]] = field(default_factory=lambda: defaultdict(list))  # process group -> its calls
    open: Entry | None = None  # the collective that the rank is in
    moved: float = 0.0  # the time when something new was last read
    size: int = 0  # the size of the event log at the last read
    ended: bool = False  # has the script finished on this rank?

    @property
    def inside(self) -> bool:
        """Is the rank in a collective?"""
        return self.open is not None and not self.ended

    def made_before(self) -> list[Entry]:
        """All calls of the rank except the open one."""
        return [entry for calls in self.calls.values() for entry in calls if entry is not self.open]


class CollectiveChecker:
    """Compares the ranks' collectives: call `poll` while the script runs, and `finding` at its end."""

    def __init__(self, directory: str, processes: int) -> None:
        self._ranks = [
            _Rank(RecordReader(os.path.join(directory, f"calls-{r}.jsonl")), os.path.join(directory, f"rank-{r}.jsonl"))
            for r in range(processes)
        ]
        self._checked: dict[str, int] = defaultdict(int)  # process group -> number of calls that match
        self._found: Finding | None = None
        self.abort_reason = ""  # why the run must be ended
        # (a call of one rank, the call that another rank makes instead; None: that rank has ended). Only calls that the
        # other rank made earlier count.
        self._gone: list[tuple[Entry, Entry | None]] = []

    def poll(self, late: bool = False) -> bool:
        """Read new records. Returns whether the run must be ended.

        late: the deadline has passed, so the run will be ended in any case.
        """
        now = time.monotonic()
        for rank in self._ranks:
            self._read(rank, now)
        still = now - max((r.moved for r in self._ranks), default=now)
        if self._find_mismatch():
            self.abort_reason = "the ranks call different collectives"
        elif self._all_wait_in_vain(still):
            self.abort_reason = "some ranks wait in a collective that the others do not call"
        elif any(r.inside for r in self._ranks) and (still > STILL_SECONDS or (late and still > STUCK_SECONDS)):
            self.abort_reason = f"no rank has made progress for {still:.0f} seconds"
        if self.abort_reason and self._found is None:
            self._find_waiting()
        return bool(self.abort_reason)

    def _all_wait_in_vain(self, still: float) -> bool:
        """Do all remaining ranks wait for ranks that will not come? still: seconds without progress."""
        left = [r for r in self._ranks if not r.ended]
        patience = STUCK_SECONDS if len(left) == len(self._ranks) else LEFT_SECONDS
        return bool(left) and still > patience and all(r.inside and self._waits_in_vain(r) for r in left)

    def _waits_in_vain(self, rank: _Rank) -> bool:
        """Is a member of the group still missing from this rank's collective? (If not, the collective is only slow.)"""
        assert rank.open is not None
        members = rank.open["ranks"]
        if rank.open.get("loose") or any(m >= len(self._ranks) for m in members):
            return False
        group = _group(rank.open)
        return any(len(self._ranks[m].calls[group]) < len(rank.calls[group]) for m in members)

    def finding(self, cut: bool = False) -> Finding | None:
        """Return the finding, or None. Call it when the run is over.

        cut: the run was ended from outside, so a rank may lack calls that it would have made.
        """
        if self._found is None:
            for rank in self._ranks:
                self._read(rank, time.monotonic())
            self._find_mismatch()
        if self._found is None and not cut:
            self._find_missing()
        if self._found is None:
            self._found = next(filter(None, map(_find_reordered, self._groups().values())), None)
        return self._found

    def _groups(self) -> dict[str, dict[int, list[Entry]]]:
        """For each process group with records of all members: rank -> its calls."""
        groups = {g: calls[0]["ranks"] for rank in self._ranks for g, calls in rank.calls.items() if calls}
        return {
            group: {m: self._ranks[m].calls[group] for m in members}
            for group, members in groups.items()
            if all(m < len(self._ranks) for m in members)
        }

    def _read(self, rank: _Rank, now: float) -> None:
        try:
            size = os.path.getsize(rank.events)
        except OSError:
            return
        entries = rank.file.read()
        if size != rank.size or entries:
            rank.moved = now
        if size != rank.size:
            rank.ended = _has_ended(rank.events)
        rank.size = size
        for entry in entries:
            if "b" in entry:
                rank.open = entry
                if not entry.get("loose"):
                    rank.calls[_group(entry)].append(entry)
            elif rank.open is not None and rank.open["b"] == entry["e"]:
                rank.open = None

    def _find_mismatch(self) -> bool:
        for group, calls in self._groups().items():
            for number in range(self._checked[group], min(map(len, calls.values()))):
                entries = {m: calls[m][number] for m in calls}
                if len({_signature(e) for e in entries.values()}) > 1:
                    self._found = _mismatch_finding(entries, number)
                    made = {m: calls[m][:number] for m in calls}
                    self._gone = [(a, b) for a in entries.values() for m, b in entries.items() if _has_made(made[m], a)]
                    return True
                self._checked[group] = number + 1
        return False

    def _find_waiting(self) -> None:
        waiting = [(n, r, r.open) for n, r in enumerate(self._ranks) if r.open is not None]
        for _, _, entry in waiting:
            away = [r for r in self._ranks if r.open is not entry and (r.ended or r.open is not None)]
            self._gone += [(entry, r.open) for r in away if _has_made(r.made_before(), entry)]
        for rank, one, entry in [found for found in waiting if self._waits_in_vain(found[1])][:1]:
            others = [
                f"rank {r} "
                + ("has ended" if o.ended else f"is in {_describe(o.open)}" if o.open else "is not in a collective")
                for r, o in enumerate(self._ranks)
                if r != rank
            ]
            number = len(one.calls[_group(entry)])
            evidence = (
                f"rank {rank} waits in {_describe(entry)} (collective {number} of its group); {', '.join(others)}"
            )
            self._found = finding_at("collectives", entry["at"], evidence)

    def _find_missing(self) -> None:
        for calls in self._groups().values():
            counts = {m: len(entries) for m, entries in calls.items()}
            least, most = min(counts.values()), max(counts.values())
            lacks = [m for m, c in counts.items() if c == least and self._ranks[m].ended]
            if least == most or not lacks:  # a rank that failed might have made the missing calls
                continue
            who = next(m for m, c in counts.items() if c == most)
            entry = calls[who][least]
            self._gone = [(entry, None) for m in lacks if _has_made(calls[m], entry)]
            evidence = (
                f"rank {who} called {most} collectives and rank {lacks[0]} only {least}; the first missing one is "
                f"{_describe(entry)}"
            )
            self._found = finding_at("collectives", entry["at"], evidence)
            return

    def with_exit(self, finding: Finding) -> Finding:
        """Point the finding at the line where a rank left a loop while other ranks still make calls in the loop.

        Without such a line, the finding stays as it is. If an outer loop contains both calls, they may belong to
        different iterations, so the line is only added as `beside`.
        """
        for inside, outside in self._gone:
            line, separate = script_lines.loop_exit(_stack(inside), _stack(outside) if outside is not None else [])
            if line is not None and separate:
                return replace(finding, at=file_line(line), beside=file_line(inside["at"]), fitting=LEAVE_TOGETHER)
            if line is not None:
                return replace(finding, beside=file_line(line))
        return finding


def refused_call(run: RecordedRun) -> Finding | None:
    """A call that the backend refused because it does not match the calls of other ranks."""
    refused = ((rank, e) for rank in range(run.processes) for e in run.events(rank, "refused"))
    rank, e = next(((rank, e) for rank, e in refused if _MISMATCH.search(e["text"])), (0, None))
    if e is None:
        return None
    evidence = f"rank {rank}'s {e['op']} was refused: {e['text'].splitlines()[0][:200]}"
    return finding_at("collectives", e["at"], evidence)


def uneven_loop(run: RecordedRun) -> str:
    """The line of a training loop with different numbers of batches on the ranks, which makes their calls differ."""
    for loader in sorted(run.training_loaders):
        passes = [[p for p in theirs if p.loader == loader] for theirs in run.passes]
        for per_rank in zip(*passes):
            least = min(per_rank, key=lambda p: len(p.yields))
            if least.complete and len({len(p.yields) for p in per_rank}) > 1:
                return file_line(least.at)
    return ""


def _has_made(calls: list[Entry], entry: Entry) -> bool:
    """Do these calls include one from the line of `entry`? Then no condition restricts the line to some ranks."""
    return bool(entry["at"]) and any(e["at"] == entry["at"] for e in calls)


def _stack(entry: Entry) -> list[list[Any]]:
    """[file, line] of the script's frames that lead to a call, innermost first. Assumes that all files are in the
    folder of the innermost frame."""
    folder = os.path.dirname(entry["at"][0]) if entry["at"] else ""
    lines = (part.rpartition(":") for part in entry.get("way", {}).get("the line", "").split(" < ") if part)
    return [[os.path.join(folder, name), int(number)] for name, _, number in lines] or [entry["at"]] * bool(entry["at"])


def _group(entry: Entry) -> str:
    return f"{entry['g']} of {entry['ranks']}"


def _signature(entry: Entry) -> tuple[Any, ...]:
    """The fields that must be equal on all ranks."""
    return (entry["op"], entry.get("n"), entry.get("d"), entry.get("by"), entry.get("root"))


def _describe(entry: Entry) -> str:
    about = [str(entry[k]) for k in ("by", "d") if k in entry]
    about += [f"{entry['n']} elements"] if "n" in entry else []
    about += [f"root {entry['root']}"] if "root" in entry else []
    where = file_line(entry["at"])
    return entry["op"] + (f" ({', '.join(about)})" if about else "") + (f" at {where}" if where else "")


def _mismatch_finding(entries: dict[int, Entry], number: int) -> Finding:
    """A finding at the line of the ranks in the minority. A call of the script is preferred to a call of DDP."""
    by: dict[Any, list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        by[_signature(entry)].append(rank)
    ranked = sorted(by.values(), key=lambda ranks: (entries[ranks[0]]["op"].startswith("DDP"), len(ranks)))
    text = "; ".join(f"{name_ranks(r)} {'call' if len(r) > 1 else 'calls'} {_describe(entries[r[0]])}" for r in ranked)
    evidence = f"at the group's collective {number + 1}, {text}"
    return finding_at("collectives", entries[ranked[0][0]]["at"], evidence)


def _find_reordered(calls: dict[int, list[Entry]]) -> Finding | None:
    """Find collectives that match in type and size, but are called in a different order on two ranks.

    The ranks' nth calls come from different lines (or are for different names or parameters). Within _NEAR calls, both
    ranks use the same lines, in a different order.
    """
    first = min(calls)
    for rank in sorted(calls)[1:]:
        pairs = list(zip(calls[first], calls[rank]))
        differing: dict[str, list[int]] = defaultdict(list)  # kind of label -> positions where the ranks' labels differ
        for place, (a, b) in enumerate(pairs):
            ours, theirs = (e.get("way", {}) if e["op"] not in _EMPTY else {} for e in (a, b))
            for way in (way for way in ours if None not in (ours[way], theirs.get(way)) and ours[way] != theirs[way]):
                ring = _cycle(pairs, differing[way][-_NEAR:], place, way)
                if ring:
                    evidence = _describe_cycle(pairs, ring, way, (first, rank))
                    names, at = [pairs[place][0]["way"][way] for place in ring], pairs[ring[0]][1]["at"]
                    return finding_at("collectives", script_lines.call_that_names(at, names) or at, evidence)
                differing[way].append(place)
    return None


def _cycle(pairs: list[tuple[Entry, Entry]], near: list[int], last: int, way: str) -> list[int]:
    """The fewest positions, including `last`, with the same values on both ranks in a different order; or []."""
    a, b = pairs[last]
    leading: dict[tuple[Any, Any], int] = {}  # (value on one rank, on the other rank) -> first position
    for one in near:
        ours, theirs = pairs[one]
        if _signature(ours) == _signature(a) and not (_exclusive(ours, a) or _exclusive(theirs, b)):
            leading.setdefault((ours["way"].get(way), theirs["way"].get(way)), one)
    begin, end = b["way"][way], a["way"][way]
    ways: list[tuple[Any, list[int]]] = [(begin, [])]
    seen = {begin}
    for value, path in ways:  # breadth-first: the list grows while it is read, and the shortest cycle comes first
        if value == end:
            return sorted([*path, last])
        for (ours, theirs), one in leading.items():
            if ours == value and theirs not in seen:
                seen.add(theirs)
                ways.append((theirs, [*path, one]))
    return []


def _describe_cycle(pairs: list[tuple[Entry, Entry]], ring: list[int], way: str, ranks: tuple[int, int]) -> str:
    one, other = pairs[ring[0]]
    text = f"at the group's collective {ring[0] + 1}, rank {ranks[0]} calls {_describe(one)} and rank {ranks[1]} "
    text += _describe(other)
    values = [(ours["way"][way], theirs["way"][way]) for ours, theirs in (pairs[place] for place in ring)]
    if len(ring) == 2:
        (ours, theirs), _ = values
        text += f", and at {ring[1] + 1} in the opposite order: "
        text += f"{way} is {ours!r} and {theirs!r}, then {theirs!r} and {ours!r}"
    else:
        mine, yours = (", ".join(repr(pair[n]) for pair in values) for n in (0, 1))
        numbers = ", ".join(str(place + 1) for place in ring)
        text += f": at {numbers}, {way} is {mine} on rank {ranks[0]}, and {yours} on rank {ranks[1]}"
    return f"{text}. The calls have the same type and size, so the backend pairs them in the order they are made"


def _exclusive(one: Entry, other: Entry) -> bool:
    """Are two calls of one rank in opposite branches of an `if`? Then one call replaces the other: the ranks take
    turns, or contribute zeros."""
    mine = other.get("branches", {})
    return any(mine.get(line, taken) != taken for line, taken in one.get("branches", {}).items())


def _has_ended(path: str) -> bool:
    """Has the rank's script finished without an error?"""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 400))
            tail = file.read()
        return b'{"k": "end"' in tail and b'"failed": true' not in tail
    except OSError:
        return False
