"""Answers about runs that cannot be compared step by step: failed runs, and runs with independent replicas."""

from __future__ import annotations

import glob
import os
from typing import Any

from paceline.doctor.rules import DIVERGENCE
from paceline.observe.update_order import read_order
from paceline.verify.answer import DIFFERENT, UNKNOWN, Answer, Claim, answer_different, claim_from, claim_without
from paceline.verify.cause_rules import overflow
from paceline.verify.rank_disagreement import cause_from_failed_ranks
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, SUBJECT, Runs
from paceline.verify.tolerances import Difference

_ERRORS = {  # words of an error that Paceline raises for a fault -> the key of the cause
    "UnusedParameterError": "unused-parameters",
    "NonFiniteError": "not-finite",
    "that the prepared models did not have": "registered-late",
    "weights differ between ranks before the first step": "initialisation-by-rank",
    "it picks a part for each rank": "examples-overlap-or-miss",
}


def disk_notes(subject: RunRecord) -> list[Claim]:
    """A note if the disk could not hold the states of more steps."""
    if not subject.ranks[0]["full"]:
        return []
    text = (
        f"only {subject.steps} steps were compared: the disk for temporary files cannot hold the states of more. Point "
        "TMPDIR to a larger disk"
    )
    return [claim_from(text, subject)]


def answer_for_failed_run(runs: Runs, why: str) -> Answer:
    """The answer if the subject run failed."""
    records = [record for rank in range(runs.start.processes) if (record := _rank(runs, rank)) is not None]
    cause = cause_from_failed_ranks([rank for record in records for rank in record.ranks])
    if cause is not None:
        step = records[0].steps
        runs.recorded.add("A")
        answer = answer_different(
            [Difference(step, "gradient", cause.name, float("nan"), 0.0)], cause, step, records[:1]
        )
        answer.notes.append(claim_from(f"the run ended with: {why}", records[0]))
        return answer
    if "NonFiniteError" in why and (overflown := _of_an_overflow(runs, why)) is not None:
        return overflown
    folder = runs.folder(SUBJECT)
    if any(read_order(folder, rank) for rank in range(runs.start.processes)):  # a script for torchrun, that trained
        fault = next((one for one in runs.find_faults() if one["cause"] in (*DIVERGENCE, "collectives")), None)
        if fault is not None:
            runs.recorded.add(SUBJECT)
            return answer_by_doctor(fault, f"Your run failed: {why}", (SUBJECT,))
    elif not records:
        why = f"{why.rstrip('.')}. {no_run()}"
    key = next((key for words, key in _ERRORS.items() if words in why), None)
    return Answer(UNKNOWN, [Claim(f"could not tell: your run failed: {why}")], cause=key)


def answer_by_doctor(fault: dict[str, Any], before: str, runs: tuple[str, ...]) -> Answer:
    """The answer for a fault that `paceline doctor` has found. before: a sentence of verify about its runs."""
    where = f"{fault['file']}:{fault['line']}: " if fault["file"] else ""
    text = (
        f"different, by a rule of paceline doctor. {before}\n"
        f"Cause, by paceline doctor: {where}{fault['title']}. {fault['evidence']}.\nRemedy: {fault['remedy']}"
    )
    answer = Answer(DIFFERENT, [Claim(text, runs)], cause=fault["cause"])
    answer.remedy, answer.file, answer.line = fault["remedy"], fault["file"], fault["line"]
    answer.beside = fault["beside"]
    return answer


def no_run() -> str:
    """Explain why a script left no record."""
    return (
        "The script never imported torch, or ended without Python's exit functions (os._exit). Give verify the "
        "training script, with its arguments, as you would start it with torchrun."
    )


def _of_an_overflow(runs: Runs, why: str) -> Answer | None:
    """The answer if a number was not finite in the subject run, but is finite in one process.

    One process (C) repeats the step from the same state. None if C fails, or if its numbers are not finite either.
    """
    begun = len(glob.glob(os.path.join(glob.escape(runs.folder("A")), "state-*.safetensors")))
    whole, _ = runs.run_single_process("C", SINGLE, dropout_off=True, whole_batches=True)
    if whole is None or not begun or whole.steps < begun or whole.not_finite(begun - 1):
        return None
    found = Difference(begun - 1, "gradient", None, float("nan"), 0.0)
    runs.recorded.add("A")
    answer = answer_different([found], overflow("a loss or a gradient", whole), begun, [whole])
    answer.notes.append(Claim(f"the run ended with: {why}", ("A",)))
    return answer


def answer_for_independent_replicas(runs: Runs, ours: RunRecord) -> Answer:
    """The answer for a run with independent replicas.

    Its steps cannot be compared one by one. Instead, its weights after the last step are compared with those of one
    process that starts from the same weights.
    """
    whole, why = runs.run_single_process("C", SINGLE, dropout_off=True, whole_batches=True)
    name = ours.ranks[0]["strategy"]
    text = (
        f"different by design: the replicas of {name} are independent between averagings, which changes the "
        "mathematics on purpose."
    )
    answer = Answer(DIFFERENT, [claim_from(text, ours)], cause="by-design", steps=ours.steps)
    answer.remedy = "Use ddp or another exact strategy if the model must equal that of one process."
    if whole is None:
        answer.notes.append(claim_without(f"the distance from the weights of one process is unknown: {why}", "C"))
        return answer
    start, mine, theirs = ours.start_state(0), ours.tensors("end"), whole.tensors("end")
    common = [key for key in ours.parameters if key in start and key in mine and key in theirs]
    if common:
        error = sum(float((mine[k].double() - theirs[k].double()).square().sum()) for k in common) ** 0.5
        moved = sum(float((theirs[k].double() - start[k].double()).square().sum()) for k in common) ** 0.5
        answer.quantity, answer.difference = "weights", error / moved if moved else float("nan")
        way = (
            f"After {ours.steps} steps from the same weights, the distance of its weights from those of one process "
            f"is {100 * error / max(moved, 1e-300):.3g}% of the distance that one process's weights have moved "
            "(2-norm over all weights)."
        )
        answer.claims.append(claim_from(way, ours, whole))
    return answer


def _rank(runs: Runs, rank: int) -> RunRecord | None:
    """The record of one rank of the subject run; None if that rank left none."""
    try:
        return RunRecord(runs.folder("A"), 1, rank)
    except FileNotFoundError:
        return None
