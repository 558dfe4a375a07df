"""Which runs `paceline verify` makes, in order, and the answer that follows from their differences.

1. A, the subject run. If it fails, makes no step or cannot be compared step by step, the answer follows at once.
2. A's ranks are compared with each other (rank_disagreement.py): do they still agree?
3. C and its repetitions, for the tolerances; B and A0; D, if no single process can compute the same shards.
4. The first differences of A and C (splitting the batch), and of A and B (distributing the shards).
5. If there are differences: further runs for the evidence, then the cause and its line.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paceline.verify.answer import (
    DATA,
    DIFFERENT,
    SAME,
    UNKNOWN,
    Answer,
    Claim,
    answer_different,
    answer_with,
    claim_from,
    claim_without,
    describe,
    run_names,
)
from paceline.verify.cause_rules import find_cause
from paceline.verify.comparison import COMPUTED, NOISE, Comparison
from paceline.verify.differences import differences_before
from paceline.verify.evidence_runs import gather_evidence
from paceline.verify.left_out_updates import answer_for_left_out_update
from paceline.verify.plain_decision import decide_plain
from paceline.verify.rank_disagreement import cause_from_ranks
from paceline.verify.run_level_answers import (
    answer_for_failed_run,
    answer_for_independent_replicas,
    disk_notes,
    no_run,
)
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SUBJECT, Runs
from paceline.verify.tolerances import Difference, norm
from paceline.verify.traced_runs import FaultLocator


def decide(runs: Runs) -> Answer:
    """Make the necessary runs in order, and answer. Each sentence of the answer is bound to the runs that show it."""
    answer = _decided(runs)
    answer.check(runs.recorded)
    return answer


def _decided(runs: Runs) -> Answer:
    """The answer, before its sentences are checked."""
    failed = runs.run("A")
    left_out = answer_for_left_out_update(runs.folder(SUBJECT), runs.start.processes)
    if left_out is not None:
        runs.recorded.add(SUBJECT)
        return left_out
    if failed is not None:
        return answer_for_failed_run(runs, failed)
    ours = runs.load("A", runs.start.processes)
    if ours is None:
        return _could_not_tell(no_run(), without=["A"])
    first = ours.ranks[0]
    runs.plain = first.get("kind") == "plain"
    if runs.plain:
        without_effect = _options_of_paceline(runs)
        if without_effect:
            return _could_not_tell(
                f"the script does not use Paceline, so verify cannot apply {without_effect}. It takes such a script as "
                "it is: leave out settings of Paceline."
            )
        return decide_plain(runs, ours)
    if first["chunks"]:
        return _could_not_tell(
            f"{first['strategy']} gives parts of global batches to processes as they become free, so there are no "
            "steps to compare. It changes the mathematics by design; `paceline compare` shows its losses beside those "
            "of one process.",
            cause="by-design",
        )
    if first.get("ahead"):
        return _could_not_tell(
            "the script fetches its next batch before it finishes the last one, so its steps overlap and cannot be "
            "repeated one by one. Fetch each batch at the top of the loop (`for batch in loader:`) to verify the "
            "script; that does not change the training."
        )
    if not ours.steps:
        return _could_not_tell(
            "the script made no step. Does it iterate over a loader of the run, and call run.step?",
            without=["A"],
        )
    if first["local"]:
        return answer_for_independent_replicas(runs, ours)
    found = cause_from_ranks(ours)
    if found is not None:
        step, quantity, cause = found
        difference = Difference(step, quantity, cause.name, float("nan"), 0.0)
        answer = answer_different([difference], replace(cause, shown_by=(ours,)), ours.steps, [ours])
        return FaultLocator(runs, ours, None, dropout_off=False).locate(answer, [difference])
    return _answer_step_by_step(Comparison(runs, ours))


def _options_of_paceline(runs: Runs) -> str:
    """The options of the command that change the settings of a script with Paceline, as text; "" without any."""
    options = runs.options
    given = {"strategy": options.strategy, "precision": options.precision, **options.script.settings}
    return ", ".join(
        f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else "")
        for name, value in given.items()
        if value is not None and value is not False and name != "device"
    )


def _could_not_tell(why: str, *runs: str, cause: str | None = None, without: Collection[str] = ()) -> Answer:
    """Build an answer "could not tell". runs: the runs that show why. without: the runs that could not be made."""
    return Answer(UNKNOWN, [Claim(f"could not tell: {why}", runs, tuple(without))], cause=cause)


def _answer_step_by_step(c: Comparison) -> Answer:
    """Answer for a subject run that can be compared step by step."""
    steady = c.check_tolerances()
    if c.whole_batches is not None and (other := c.differently_seeded_run(c.whole_batches)) is not None:
        return _with_notes(c, _not_a_function_of_the_seed(c, c.whole_batches, other))
    by_splitting, by_distributing = c.differences_by_splitting(), c.differences_by_distributing()
    if by_distributing and c.subject.gathers and not {d.quantity for d in by_distributing} & DATA:
        c.same_shards, by_distributing = None, []
        c.why_not_shards = (
            "the loss uses values of all processes (run.gather, run.mean), which are available together only if "
            "each process computes its shard"
        )
    if c.same_shards is None:
        by_distributing = c.differences_by_rank_queries(known=bool(by_splitting) and not c.may_be_noise(by_splitting))
    if steady or {d.quantity for d in by_splitting} & DATA:
        answer = _conclude(c, by_splitting, by_distributing)
    else:
        assert c.whole_batches is not None  # C was made: its repetition differs
        answer = _not_deterministic(c, c.whole_batches, "C4")
    return _with_notes(c, answer)


def _conclude(c: Comparison, by_splitting: Sequence[Difference], by_distributing: Sequence[Difference]) -> Answer:
    """Draw the conclusion from the differences."""
    whole, shards, ours, alone = c.whole_batches, c.same_shards, c.subject, c.rank_0_of_1
    if (
        ours.ranks[0]["lossy"]
        and by_splitting
        and by_splitting[0].quantity in COMPUTED
        and whole is not None
        and c.without_dropout
    ):
        text = f"different by design: {ours.ranks[0]['strategy']} uses lossy communication. {describe(by_splitting[0])}"
        return answer_with(DIFFERENT, [claim_from(text, c.without_dropout, whole)], by_splitting, "by-design")
    if whole is not None and c.without_dropout is not None and not by_splitting:
        if not ours.drew and not (by_distributing and shards is None):
            return _the_same(c, whole, by_distributing)
        if ours.drew and (shards or alone) is not None and not by_distributing:
            return _the_same(c, whole, by_distributing)
        if (shards is None and alone is None) or (shards is not None and c.shards_differ_without_dropout()):
            why = "the runs are the same with dropout off, but with dropout on there is no run to compare with."
            return _could_not_tell(why, c.without_dropout.name, whole.name)
    if not by_splitting and not by_distributing:
        return _cutting_not_compared(c)
    quantities = {d.quantity for d in (*by_splitting, *by_distributing)}
    if c.noisy and not by_distributing and quantities <= NOISE and c.without_dropout is not None and whole is not None:
        return _noise_not_comparable(c, c.without_dropout, whole)
    shaky = {d.quantity for d in by_distributing} & COMPUTED and not {d.quantity for d in by_distributing} & DATA
    if shards is not None and shaky and c.shards_differ_from_themselves():
        return _not_deterministic(c, shards, "B2")
    noisy = bool(by_distributing and by_splitting) and c.may_be_noise(by_splitting)
    evidence, locator = gather_evidence(c, [] if noisy else by_splitting, by_distributing)
    evidence = replace(evidence, noisy=noisy)
    by_splitting = evidence.by_splitting
    answer = answer_different(by_splitting or by_distributing, find_cause(evidence), ours.steps, evidence.compared)
    return locator.locate(answer, by_splitting or by_distributing)


def _with_notes(c: Comparison, answer: Answer) -> Answer:
    """Add notes to the answer: comparisons that were not possible, and other observations."""
    answer.steps = c.subject.steps
    answer.notes += c.notes
    answer.notes += disk_notes(c.subject)
    compared = [record for record in (c.subject, c.whole_batches, c.again_whole) if record is not None]
    answer.indeterminate = sorted(c.tolerances.indeterminate)
    if answer.indeterminate:
        answer.notes.append(claim_from(_describe_indeterminate(c), *compared))
    if c.kinks:
        kinks = (
            f"in {c.kinks} of the steps some gradients differ in the second half of their digits, and nothing else "
            "differs: rounding moves a number across a kink (such as a ReLU's)"
        )
        answer.notes.append(claim_from(kinks, *compared))
    if c.order_counts:
        order = "a batch's loss depends on the order of its examples, so the tolerances were measured in that order"
        answer.notes.append(claim_from(order, *compared[1:]))
    if c.same_shards is None:
        why = (c.why_not_shards or "").splitlines()[0]
        made = [name for name in ("B", "B1") if name in c.runs.recorded]
        said = f"B, the same shards in one process, could not be {'compared' if made else 'run'}: {why}"
        answer.notes.append(Claim(said, tuple(made), () if made else ("B",)))
    if c.whole_batches is None:
        answer.notes.append(claim_without(f"C, whole batches in one process, could not be run: {c.why_not_whole}", "C"))
    reached = {name for k in range(c.subject.steps) for name in c.subject.gradients(k, 0)}
    unused = [name for name in c.subject.parameters if name not in reached]
    if unused and c.subject.updates(0) == 1:
        answer.notes.append(claim_from(f"these parameters never get a gradient: {', '.join(unused[:5])}", c.subject))
    return answer


def _describe_indeterminate(c: Comparison) -> str:
    names = ", ".join(sorted(c.tolerances.indeterminate))
    said = f"indeterminate, because their gradients are mostly rounding errors (judged by absolute size): {names}"
    moves = ". Optimizers that scale gradients, such as Adam, turn these into full steps, which are not compared"
    norms = "; in evaluation, the running statistics of a following batch norm reveal them (bias=False avoids this)"
    return said + moves + (norms if c.subject.ranks[0]["norms"] else "")


def _cutting_not_compared(c: Comparison) -> Answer:
    """The answer if nothing differs, but there is no run of whole batches to compare with."""
    found, left = c.same_shards or c.rank_0_of_1, c.runs.recorded
    if found is None:
        missing_runs = [run for run in ("A0", "B", "C", "D") if run not in left]
        return _could_not_tell("there is no run to compare with.", without=missing_runs)
    same = "one process that computes the same shards gives the same result,"
    if c.same_shards is None:
        same = "your run is the same when each process sees rank 0 of 1,"
    missing = "there is no run of whole batches to compare with."
    if "C" in left:
        missing = "your run could not be repeated with dropout off, as the process with whole batches was."
    text = f"could not tell whether splitting the batch changes the model: {same} but {missing}"
    shown = (c.subject.name, found.name, *(["C"] if "C" in left else []))
    return Answer(UNKNOWN, [Claim(text, shown, ("A0",) if "C" in left else ("C",))])


def _noise_not_comparable(c: Comparison, plain: RunRecord, whole: RunRecord) -> Answer:
    """The answer if random draws differ between a whole batch and its parts, and cannot be turned off."""
    text = (
        "could not tell whether splitting the batch changes the model: the script draws random numbers that cannot "
        "be turned off."
    )
    claims = [claim_from(text, plain, whole)]
    if c.same_shards is not None:
        same = "Distribution changes nothing: one process that computes the same shards gives the same result."
        claims.append(claim_from(same, c.subject, c.same_shards))
    elif c.rank_0_of_1 is not None:
        same = "The rank and the world size change nothing: your run is the same when each process sees rank 0 of 1."
        claims.append(claim_from(same, c.subject, c.rank_0_of_1))
    else:
        text = (
            "It is also unknown whether distributing the shards changes it. Write the step as a closure, "
            "run.forward_backward(loss_fn, model, batch): one process can then compute the same shards."
        )
        claims.append(Claim(text))
    return Answer(UNKNOWN, claims)


def _not_a_function_of_the_seed(c: Comparison, whole: RunRecord, other: RunRecord) -> Answer:
    """The answer if two runs of one process start differently."""
    start = [d for d in differences_before(other, whole, c.tolerances, 0) if d.quantity == "initial weights"]
    what = "reads different examples, or reads them in a different order"
    if start:
        what = f"starts with different weights ({start[0].name})"
    answer = _could_not_tell(
        f"one process, run twice, {what}: the program is not a function of its seed. It may seed from a clock, a "
        "process number or the system, draw random numbers before paceline.start, or draw from an unseeded "
        "generator.",
        *run_names((whole, other)),
        cause="not-deterministic",
    )
    answer.quantity, answer.parameter = ("initial weights", start[0].name) if start else ("examples", None)
    answer.step = 0
    return FaultLocator(c.runs, c.subject, None, dropout_off=True).locate_chance(answer, 0)


def _not_deterministic(c: Comparison, first: RunRecord, again: str) -> Answer:
    """The answer if one process gives different results when it runs again.

    again: the name of the run that should repeat `first`. This run may have failed.
    """
    if again not in c.runs.recorded:
        return _could_not_tell(
            "one process differs by more than rounding when its batches come in reverse order, and could not be run "
            "again with the same batches.",
            *run_names(run for run in (first, c.again_whole) if run is not None),
            without=[again],
        )
    answer = _could_not_tell(
        "one process, run twice on the same batches, differs from itself by more than rounding: an operator is not "
        "deterministic, or draws from an unseeded generator. paceline.start(deterministic=True) names operators that "
        "are not deterministic.",
        first.name,
        again,
        cause="not-deterministic",
    )
    return FaultLocator(c.runs, c.subject, None, dropout_off=True).locate_chance(answer, 0)


def _the_same(c: Comparison, whole: RunRecord, by_distributing: Sequence[Difference]) -> Answer:
    """The answer that the models are the same, with the largest difference and its tolerance."""
    assert c.without_dropout is not None
    steps = min(c.without_dropout.steps, whole.steps)
    worst, at, share = (0.0, 0.0, 1.0), "", []
    for step in range(steps):
        first, second = c.without_dropout.gradients(step, 0), whole.gradients(step, 0)
        for name in first.keys() & second.keys():
            error, allowed = norm(first[name] - second[name]), c.tolerances.gradient(name, second)
            if name not in c.tolerances.indeterminate and norm(second[name]):
                share.append(allowed / norm(second[name]))
            if allowed and error / allowed > worst[0] / worst[2]:
                worst, at = (error, norm(second[name]), allowed), f"in the gradient of {name}, step {step + 1}"
    both = (c.without_dropout, whole)
    aside = sorted(c.tolerances.indeterminate)
    text = f"the same, within rounding: {steps} steps" + (f" (except {', '.join(aside[:3])})" if aside else "")
    if at:
        text += f"; the largest difference is {worst[0]:.2g} of {worst[1]:.2g} (allowed: {worst[2]:.2g}), {at}."
    else:
        text += ", bitwise equal."
    answer = Answer(SAME, [claim_from(text, *both)], difference=worst[0], tolerance=worst[2])
    if share:
        typical = sorted(share)[len(share) // 2]
        wrong = f"a gradient error of {typical:.1g} of its norm would have been detected"
        answer.notes.append(claim_from(wrong, *both, *([c.again_whole] if c.again_whole is not None else [])))
    if by_distributing and c.same_shards is not None:
        what = describe(by_distributing[0])
        turns = f"one process that computes the shards in sequence differs, but this does not affect your run: {what}"
        answer.notes.append(claim_from(turns, c.subject, c.same_shards))
    if c.same_shards is None and c.rank_0_of_1 is not None:
        alone = "in place of B: your run is the same when each process sees rank 0 of 1"
        answer.notes.append(claim_from(alone, c.subject, c.rank_0_of_1))
    return answer
