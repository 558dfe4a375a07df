"""Answers about runs that cannot be compared step by step: a run that failed, and replicas that train apart."""

from __future__ import annotations

import glob
import os
import shlex

from paceline.verify.answer import DIFFERENT, UNKNOWN, Answer, Claim, answer_different, claim_from, claim_without
from paceline.verify.cause_rules import overflow
from paceline.verify.rank_disagreement import cause_from_failed_ranks
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, Runs
from paceline.verify.tolerances import Difference

_ERRORS = {  # words of an error with which a run itself refuses a fault -> the key of the cause
    "UnusedParameterError": "unused-parameters",
    "NonFiniteError": "not-finite",
    "that the prepared models did not have": "registered-late",
    "weights differ between ranks before the first step": "initialisation-by-rank",
    "it picks a part for each rank": "examples-overlap-or-miss",
}


def answer_for_failed_run(runs: Runs, why: str) -> Answer:
    """The answer where the run in question failed."""
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
    if not records:
        why += f". {no_run(runs)}"
    key = next((key for words, key in _ERRORS.items() if words in why), None)
    return Answer(UNKNOWN, [Claim(f"could not tell: the run in question failed: {why}")], cause=key)


def no_run(runs: Runs) -> str:
    """What to say of a script that has left no record."""
    script = runs.options.script
    called = shlex.join([*(["-m"] if script.module else []), script.path, *script.args])
    return (
        "The script never called paceline.start, or ended before it. verify compares runs of scripts that train with "
        f"Paceline; doctor watches any PyTorch script: paceline doctor --nproc {runs.nproc} {called}"
    )


def _of_an_overflow(runs: Runs, why: str) -> Answer | None:
    """The answer where a number was not finite in the run in question, and is finite in one process.

    One process makes the same step from the same state. None where it cannot, or is not finite either.
    """
    begun = len(glob.glob(os.path.join(glob.escape(runs.folder("A")), "state-*.safetensors")))
    whole, _ = runs.run_single_process("C", SINGLE, dropout_off=True, whole_batches=True)
    if whole is None or not begun or whole.steps < begun or whole.not_finite(begun - 1):
        return None
    found = Difference(begun - 1, "gradient", None, float("nan"), 0.0)
    runs.recorded.add("A")
    answer = answer_different([found], overflow("a loss, or a gradient,", whole), begun, [whole])
    answer.notes.append(Claim(f"the run ended with: {why}", ("A",)))
    return answer


def answer_for_independent_replicas(runs: Runs, ours: RunRecord) -> Answer:
    """The answer for replicas that train apart between exchanges. Their steps cannot be compared one by one. What can
    be compared is where both runs are after the last step, from the same start."""
    whole, why = runs.run_single_process("C", SINGLE, dropout_off=True, whole_batches=True)
    name = ours.ranks[0]["strategy"]
    text = (
        f"different by design: {name} changes the mathematics on purpose: its replicas train apart between exchanges."
    )
    answer = Answer(DIFFERENT, [claim_from(text, ours)], cause="by-design", steps=ours.steps)
    answer.remedy = "Take ddp or another strategy that is exact, if the model has to be that of one process."
    if whole is None:
        answer.notes.append(claim_without(f"how far it is from one process is not known: {why}", "C"))
        return answer
    start, mine, theirs = ours.start_state(0), ours.tensors("end"), whole.tensors("end")
    common = [key for key in ours.parameters if key in start and key in mine and key in theirs]
    if common:
        apart = sum(float((mine[k].double() - theirs[k].double()).square().sum()) for k in common) ** 0.5
        moved = sum(float((theirs[k].double() - start[k].double()).square().sum()) for k in common) ** 0.5
        answer.quantity, answer.difference = "weights", apart / moved if moved else float("nan")
        way = (
            f"After {ours.steps} steps from the same weights it is {100 * apart / max(moved, 1e-300):.3g}% of the way "
            "that one process has gone beside it (2-norm of all weights together)."
        )
        answer.claims.append(claim_from(way, ours, whole))
    return answer


def _rank(runs: Runs, rank: int) -> RunRecord | None:
    """The record of one rank of the run in question; None where that rank has left nothing."""
    try:
        return RunRecord(runs.folder("A"), 1, rank)
    except FileNotFoundError:
        return None
