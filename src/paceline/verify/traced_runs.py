"""After a fault was found, make further runs with the script's lines traced, to find its line and correct its cause.

L repeats the subject run. LD is L with rank 0 of 1 reported to each process. LC is one process with whole batches.
If L and LD differ, the script uses its rank or world size. If they do not differ, a script that reads its rank or world
size does no harm with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.observe.source import line_text
from paceline.verify.answer import Answer, Claim, claim_without, run_names
from paceline.verify.cause_rules import STATE, STATE_REMEDY
from paceline.verify.differences import differences
from paceline.verify.evidence import Evidence
from paceline.verify.fault_location import HOOKS_ON_GRADIENTS, Fault, FaultLine, chance_line, find_line, state_line
from paceline.verify.rank_disagreement import cause_from_ranks
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, Runs
from paceline.verify.tolerances import ROUNDOFF, Difference, Tolerances
from paceline.verify.trace_diff import RANDOM, batch_parts, load_traces, place_of

# Causes that are found by comparing the gradients of the parts with the gradient of the whole batch.
_CAUSES_BY_PARTS = {
    "mean-of-means",
    "in-batch-loss",
    "sum-for-mean",
    "mean-for-sum",
    "depends-on-shard-size",
    "unknown",
}
# Causes without a line.
_WITHOUT_LINE = {"by-design", "unused-parameters", "not-finite"}


class FaultLocator:
    """Finds the line of a fault.

    Args:
        ours: A, the subject run.
        whole: C, if the difference is between A and C.
        dropout_off: whether the traced runs have dropout off.
    """

    def __init__(self, runs: Runs, ours: RunRecord, whole: RunRecord | None, *, dropout_off: bool) -> None:
        self._runs, self._subject, self._whole_batches, self._dropout_off = runs, ours, whole, dropout_off
        self._traced: RunRecord | None = None  # L
        self._traced_alone: RunRecord | None = None  # LD
        self._depends_on_rank = False  # whether the fault is missing in LD
        self._made = False  # whether L and LD have been made
        self._why_not_traced: str | None = None  # the error of L

    def _make_traced_runs(self, step: int) -> None:
        """Make L and LD, once."""
        if self._made or not self._runs.may_trace:
            return
        self._made = True
        processes = self._runs.start.processes
        how: dict[str, Any] = {"trace_from": step, "steps": step + 1, "dropout_off": self._dropout_off}
        self._why_not_traced = self._runs.run("L", **how)  # L may end with the same error as the subject run
        self._traced = self._runs.load("L", processes)
        if processes > 1:
            self._runs.run("LD", rank_0_of_1=True, **how)
            self._traced_alone = self._runs.load("LD", processes)
        # If ranks differ before the first step, the run has traces but no steps.
        made = (run for run in (self._traced, self._traced_alone) if run is not None)
        self._runs.recorded |= {run.name for run in made if load_traces(run)}

    def add_rank_0_of_1(self, known: Evidence, tolerances: Tolerances) -> Evidence:
        """Add LD to the evidence: it shows whether the difference comes from the rank or the world size."""
        step = known.step
        self._make_traced_runs(step)
        lines, alone = self._traced, self._traced_alone
        if lines is None or alone is None or min(lines.steps, alone.steps) <= step:
            return known
        reference = known.without_dropout if self._dropout_off else known.subject
        again, changed = (
            [d for k in range(step + 1) for d in differences(reference, run, known.subject, tolerances, k)]
            for run in (lines, alone)
        )
        same = {(d.step, d.quantity) for d in again}
        changed = [d for d in changed if (d.step, d.quantity) not in same]
        self._depends_on_rank = bool(changed)
        if changed and known.same_shards is None and known.rank_0_of_1 is None and not known.by_splitting:
            known = replace(known, by_distributing=changed)
        return replace(known, rank_0_of_1=alone, by_rank_queries=changed)

    def locate(self, answer: Answer, found: Sequence[Difference]) -> Answer:
        """Add the line to the answer, and correct the cause if the line shows a different cause."""
        first = found[0]
        if answer.cause in _WITHOUT_LINE:
            return answer
        self._make_traced_runs(first.step)
        lines = self._traced
        if lines is None:
            if self._why_not_traced is not None:
                why = f"the script's lines could not be traced: {self._why_not_traced}"
                answer.notes.append(claim_without(why, "L"))
            return answer
        if self._traced_alone is not None and cause_from_ranks(self._subject) is not None:
            self._depends_on_rank = cause_from_ranks(self._traced_alone) is None
        if (hooked := self._locate_hook(answer, found, lines)) is not None:
            return hooked
        fault = Fault(answer.cause or "unknown", first.quantity, first.name, first.step)
        alone = load_traces(self._traced_alone) if self._traced_alone is not None and self._depends_on_rank else []
        parts, of_parts = [], None
        cut = self._whole_batches is not None and first.quantity in ("loss", "gradient", "buffers", "data")
        if cut and not self._depends_on_rank:
            how = {"trace_from": first.step, "steps": first.step + 1}
            of_parts, _ = self._runs.run_single_process("LC", SINGLE, dropout_off=True, whole_batches=True, **how)
            if of_parts is not None:
                precision = lines.ranks[0]["precision"]
                within = 64 * ROUNDOFF[precision] ** (1 if precision == "fp32" else 0.8)
                parts = list(batch_parts(lines, of_parts, first.step, within))
        where = find_line(fault, load_traces(lines), alone, parts)
        if where is None and answer.cause == "state-outside":
            where = state_line(first.step, load_traces(lines))
        if where is None:
            return answer
        runs = [lines, *([self._traced_alone] if alone and self._traced_alone is not None else [])]
        runs += [of_parts] if of_parts is not None else []
        self._correct_cause(answer, where, runs)
        if answer.cause == "state-outside" and (state := state_line(first.step, load_traces(lines))) is not None:
            where = FaultLine(state.place, state.beside or (where.place if where.place != state.place else None))
        return _add_line(answer, where, runs)

    def _locate_hook(self, answer: Answer, found: Sequence[Difference], lines: RunRecord) -> Answer | None:
        """The answer if losses agree, gradients do not, and the script has registered a hook on a gradient."""
        # A hook gets a part's gradient, times the part's weight. So its effect looks like one of these causes.
        may_be = {*_CAUSES_BY_PARTS, "state-outside", "control-by-rank"}
        hooks = [e for trace in load_traces(lines) for e in trace.events_of("hook") if e["name"] in HOOKS_ON_GRADIENTS]
        hooks = [e for e in hooks if e["step"] <= found[0].step]
        like_a_hook = found[0].quantity == "gradient" and answer.cause in may_be and answer.line is None
        if not hooks or not like_a_hook or self._depends_on_rank:
            return None
        where = FaultLine(place_of(hooks[-1]))
        sentence = (
            "the losses are equal but the gradients are not, and the script has a hook on a gradient: the hook acts on "
            "the gradient of each part of the batch before these are combined"
        )
        remedy = "Change gradients after the last backward of a global batch: .grad is then the mean over it."
        _set_cause(answer, "clipped-early", sentence, remedy, [lines])
        return _add_line(answer, where, [lines])

    def locate_chance(self, answer: Answer, step: int) -> Answer:
        """Add the line of the first difference of two equal runs to an answer about a program that is not
        deterministic."""
        if not self._runs.may_trace:
            return answer
        how = {"dropout_off": True, "whole_batches": True, "trace_from": step, "steps": step + 1}
        first, _ = self._runs.run_single_process("LC", SINGLE, **how)
        second, _ = self._runs.run_single_process("LC2", SINGLE, **how)
        if first is None or second is None:
            return answer
        where = chance_line(load_traces(first), load_traces(second), step)
        if where is None:
            fault = Fault("not-deterministic", answer.quantity or "loss", answer.parameter, step)
            where = find_line(fault, load_traces(first), [], [])
        return answer if where is None else _add_line(answer, where, [first, second])

    def _correct_cause(self, answer: Answer, where: FaultLine, runs: Sequence[RunRecord]) -> None:
        """Replace the cause if the event at the line shows a different cause."""
        found = where.found
        if found is None:
            return
        kind, name = found.event["k"], found.event["name"]
        drawn = kind == "seed" or (kind == "op" and name in RANDOM and found.how == "values")
        if where.asks and answer.cause == "control-by-rank" and drawn and answer.quantity in ("data", "loss"):
            sentence = "random draws depend on the rank or on the number of processes"
            remedy = (
                "Draw from torch's default generator without seeding it: Paceline seeds it for each shard and example."
            )
            _set_cause(answer, "other-random-numbers", sentence, remedy, runs)
        elif where.asks and answer.cause in ("other-random-numbers", *_CAUSES_BY_PARTS) and not drawn:
            sentence = "a setting or a number of the script depends on the rank or on the number of processes"
            _set_cause(answer, "control-by-rank", sentence, "Use the same value on every rank and world size.", runs)
        elif not where.asks and answer.cause in (*_CAUSES_BY_PARTS, "control-by-rank") and found.how == "state":
            _set_cause(answer, "state-outside", STATE, STATE_REMEDY, runs)
        elif not where.asks and answer.cause in _CAUSES_BY_PARTS and found.how == "numbers":
            given, whole = found.numbers
            sentence = (
                f"an operation gets {_numbers(given)} for a part of the batch and {_numbers(whole)} for the whole: the "
                "script uses the size of its input, or the number of parts"
            )
            remedy = (
                "Count updates instead, and do not use the size of the input: Paceline weights each part by its number "
                "of examples."
            )
            _set_cause(answer, "depends-on-shard-size", sentence, remedy, runs)


def _set_cause(answer: Answer, cause: str, sentence: str, remedy: str, runs: Sequence[RunRecord]) -> None:
    answer.cause, answer.remedy = cause, remedy
    kept = [claim for claim in answer.claims if not claim.text.startswith(("\nCause:", "\nRemedy:"))]
    answer.claims = [*kept, Claim(f"\nCause: {sentence}.", run_names(runs)), Claim(f"\nRemedy: {remedy}")]


def _numbers(given: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in given[:3]) or "nothing"


def _add_line(answer: Answer, where: FaultLine, runs: Sequence[RunRecord]) -> Answer:
    file, answer.line = where.place
    answer.file, answer.source = _short(file), line_text(where.place)
    said = f"\nAt {answer.file}:{answer.line}: {answer.source}"
    if where.beside is not None and where.beside != where.place:
        answer.beside = f"{_short(where.beside[0])}:{where.beside[1]}"
        said += f"\n  with {answer.beside}: {line_text(where.beside)}"
    at = next((i for i, claim in enumerate(answer.claims) if claim.text.startswith("\nRemedy:")), len(answer.claims))
    answer.claims.insert(at, Claim(said, run_names(runs)))
    return answer


def _short(file: str) -> str:
    """The path relative to the current directory, if the file is below it."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near
