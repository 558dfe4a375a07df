"""Join all ranks' spans into one file in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

While the run is open, each rank writes a file (span_file.py) into the folder FILE.parts. Rank 0 joins these files when
it closes the run. If rank 0 does not, the launcher of its machine joins the files. If machines share no folder, there
is one trace per machine, and the lowest rank of the machine joins its files.

Clocks: the ranks of one machine read the same monotonic clock, so their spans are exactly aligned. The spans of
different machines are aligned by the machines' wall clocks at the start of the run, with the error of these clocks.

The format: "Trace Event Format", Google 2016. X events are complete spans, with ts and dur in microseconds; M events
name a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.timeline.span_file import Phase, RankSpans, Span, read
from paceline.timeline.stragglers import Ranks, StepKey, report

_IN_A_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD_AND_BACKWARD, Phase.UPDATE)
_ROW = 1  # the only row of each rank; Perfetto reserves 0 for the idle thread of a machine
_REMEDY = "Give a file in a directory that the run may write to, such as trace='trace.json' (--trace trace.json)."


def parts_of(file: str | Path) -> Path:
    """The folder for the ranks' files of a run with trace=`file`."""
    return Path(f"{file}.parts")


def cannot_trace(file: str | None, rank: int, clear: bool) -> str | None:
    """Return the message of an error if this rank cannot write the trace `file`; None if it can.

    clear: remove the files that an earlier run left in the folder of parts. No rank may write into this folder before
    all ranks have called this function.
    """
    if file is None:
        return None
    path = Path(file)
    if not file or (path.exists() and not path.is_file()):
        return f"trace={file!r} is not the path of a regular file. {_REMEDY}"
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return cannot_write(file, rank, error)
    if clear:
        shutil.rmtree(parts_of(file), ignore_errors=True)
    return None


def cannot_write(file: str, rank: int, error: OSError) -> str:
    return f"trace={file!r}: rank {rank} cannot write this file: {error.strerror or error}. {_REMEDY}"


def part_of(file: str | Path, rank: int, pid: int) -> Path:
    """The file for the spans of this process. Its name contains the process id, so that a restarted rank does not
    overwrite the file of the killed process."""
    return parts_of(file) / f"rank-{rank}-{pid}.spans"


def part_files(file: str | Path) -> list[Path]:
    """The ranks' files, in order of rank."""
    return sorted(parts_of(file).glob("rank-*-*.spans"), key=_rank)


def _rank(part: Path) -> int:
    return int(part.name.split("-")[1])


def first_rank(file: str | Path) -> int | None:
    """The lowest rank with a file; None if there is nothing to join."""
    return next(map(_rank, part_files(file)), None)


def join_and_say(file: str, say: Callable[[str], None]) -> None:
    """Join the parts into `file`, report to the user with `say`, and remove the parts. If `file` cannot be written, the
    parts stay.

    The parts are removed last: if a rank is killed before it has printed its lines, the launcher takes over, because
    the parts still exist.
    """
    with contextlib.suppress(BrokenPipeError):
        try:
            lines = _write(file)
        except OSError as error:
            say(
                f"paceline: cannot write trace={file!r} at the end of the run: {error.strerror or error}. The ranks' "
                f"records are in {parts_of(file)}."
            )
            return
        try:
            for line in lines:
                say(f"paceline: {line}")
        finally:
            with contextlib.suppress(OSError):
                _remove_parts(file)


def join_left(file: str, ranks: Iterable[int], say: Callable[[str], None]) -> None:
    """Join the parts in a launcher after its ranks have ended, if no rank has joined them. Does nothing if the lowest
    rank is on another machine, which then joins them."""
    if first_rank(file) in set(ranks):
        join_and_say(file, say)


def _write(file: str | Path) -> list[str]:
    found = map(read, part_files(file))
    parts = [part for part in found if part is not None and part.spans]
    if not parts:
        return [f"trace={str(file)!r}: the run made no step, so there is nothing to write."]
    partial = parts_of(file) / "joined"
    with open(partial, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events(parts)):
            out.write(("\n" if number == 0 else ",\n") + json.dumps(event))
        out.write("\n]}\n")
    os.replace(partial, file)
    steps = steps_of(parts)
    most = max(map(len, steps.values()), default=0)
    ranks = "1 rank" if len(steps) == 1 else f"{len(steps)} ranks"
    head = f"trace of {ranks}, {most} step{'' if most == 1 else 's'}, in {file}: open it at https://ui.perfetto.dev"
    return [head, *report(_compared(parts, steps))]


def _remove_parts(file: str | Path) -> None:
    # Move the folder away first: while it is being emptied, another rank might join the remaining files.
    done = Path(tempfile.mkdtemp(prefix=parts_of(file).name, dir=Path(file).parent)) / "done"
    try:
        os.rename(parts_of(file), done)
    finally:
        shutil.rmtree(done.parent, ignore_errors=True)


# --- the events


def events(parts: Sequence[RankSpans]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of these ranks. Time 0 is the start of the earliest span."""
    offsets = _offsets(parts)
    first = min(part.spans[0].start + offset for part, offset in zip(parts, offsets, strict=True))
    shortest = _shortest_exchanges(parts)
    named = set()
    for part, offset in zip(parts, offsets, strict=True):
        rank = int(part.about["rank"])
        if rank not in named:
            named.add(rank)
            title = {"name": f"rank {rank} ({part.about['host']})"}
            yield {"name": "process_name", "ph": "M", "pid": rank, "tid": _ROW, "args": title}
            yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": _ROW, "args": {"sort_index": rank}}
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": _ROW, "args": {"name": "steps"}}
        for name, start, end, args in _named_spans(part.spans, shortest):
            yield {
                "name": name,
                "ph": "X",
                "ts": (start + offset - first) / 1e3,
                "dur": (end - start) / 1e3,
                "pid": rank,
                "tid": _ROW,
                "args": args,
            }


def _offsets(parts: Sequence[RankSpans]) -> list[int]:
    """For each part: nanoseconds from the machine's monotonic clock to its wall clock. Equal for parts of a machine."""
    machines: dict[str, int] = {}
    for part in parts:
        machines.setdefault(part.about["machine"], int(part.about["wall_ns"]) - int(part.about["monotonic_ns"]))
    return [machines[part.about["machine"]] for part in parts]


def _named_spans(
    spans: Sequence[Span], shortest: Mapping[tuple[StepKey, int], int]
) -> Iterator[tuple[str, int, int, dict[str, int]]]:
    """Yield (name, start, end, args) of each step, from its first span to its last, and of each span."""
    extents: dict[StepKey, tuple[int, int]] = {}
    for span in spans:
        if span.within in _IN_A_STEP:
            key = span.epoch, span.step
            extents[key] = extents.get(key, (span.start, 0))[0], span.end
    for (epoch, step), (start, end) in extents.items():
        yield "step", start, end, {"epoch": epoch, "step": step}
    exchanges: dict[StepKey, int] = defaultdict(int)
    for span in spans:
        key = span.epoch, span.step
        args = {"epoch": span.epoch, "step": span.step, "micro_batch": span.micro_batch} if span.epoch >= 0 else {}
        begin = span.start
        if span.phase is Phase.COMMUNICATION:
            least = shortest.get((key, exchanges[key]))
            exchanges[key] += 1
            if least is not None and span.end - least > begin:
                yield "waiting", begin, span.end - least, args
                begin = span.end - least
        yield span.phase.label, begin, span.end, args


def _shortest_exchanges(parts: Sequence[RankSpans]) -> dict[tuple[StepKey, int], int]:
    """(step, number of the exchange in the step) -> the shortest time that a rank spent in this exchange, in ns.

    The rank with the shortest time came last and did not wait. The extra time on other ranks is waiting. Empty unless
    all ranks make the same exchanges. Steps in which ranks made different numbers of exchanges are left out.
    """
    if len(parts) < 2 or not all(part.about.get("alike") and part.about.get("in_step") for part in parts):
        return {}
    each: list[dict[StepKey, list[int]]] = []
    for part in parts:
        lengths: dict[StepKey, list[int]] = defaultdict(list)
        for span in part.spans:
            if span.phase is Phase.COMMUNICATION:
                lengths[span.epoch, span.step].append(span.end - span.start)
        each.append(lengths)
    shortest = {}
    for key, own in each[0].items():
        rows = [lengths.get(key, []) for lengths in each]
        if all(len(row) == len(own) for row in rows):
            shortest.update({(key, number): min(column) for number, column in enumerate(zip(*rows, strict=True))})
    return shortest


# --- for the report


def steps_of(parts: Sequence[RankSpans]) -> dict[int, dict[StepKey, dict[Phase, float]]]:
    """rank -> step -> phase -> milliseconds."""
    ranks: dict[int, dict[StepKey, dict[Phase, float]]] = {}
    for part in parts:
        steps = ranks.setdefault(int(part.about["rank"]), {})
        for span in part.spans:
            if span.epoch >= 0:
                phases = steps.setdefault((span.epoch, span.step), dict.fromkeys(Phase, 0.0))
                phases[span.phase] += (span.end - span.start) / 1e6
    return {rank: steps for rank, steps in ranks.items() if steps}


def _compared(parts: Sequence[RankSpans], steps: dict[int, dict[StepKey, dict[Phase, float]]]) -> Ranks:
    return Ranks(
        steps,
        in_step=all(part.about.get("in_step", False) for part in parts),
        alike=all(part.about.get("alike", False) for part in parts),
        on_host=any(part.about.get("accelerated", False) for part in parts),
    )
