"""The answer of `paceline verify` about a script that does not use Paceline, and the runs that it follows from.

A    the script as it is, on n ranks
C    the script in one process: each batch has the examples of all ranks. Each update starts from the state of A.
S    instead of C, if an update of one process takes n times the batches: the batches of the ranks one by one
C2   C with the examples in reverse order and with different rounding, for the tolerances (tolerances.py)
C3   C with different rounding only. C4: C again
Pr   the script in one process, with the examples of rank r only, up to the first update that differs. Made only if A
     does not show what each rank adds to the gradients, as with FSDP.

If gradients differ, the kind of the difference follows from A, C and all Pr (hypotheses.py). The line in the script and
the remedy come from `paceline doctor`, if it finds a fault in the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from paceline.doctor.rules import DIVERGENCE, METRICS
from paceline.verify.answer import DIFFERENT, SAME, UNKNOWN, Answer, Claim, answer_with, claim_from, describe
from paceline.verify.comparison import without_kinks
from paceline.verify.differences import differences
from paceline.verify.hypotheses import Explanation, explain, is_multiple, total
from paceline.verify.plain_location import locate
from paceline.verify.plain_reference import PlainReference
from paceline.verify.plain_subject import (
    SubjectRun,
    between_updates,
    by_backward,
)
from paceline.verify.run_level_answers import answer_by_doctor, disk_notes
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import Runs
from paceline.verify.tolerances import Difference, Tolerances, norm

# causes of paceline doctor that one process, or a comparison of updates from the same examples, does not show
_NOT_COMPARED = {
    *("examples_missed", "same_in_workers", "same_batch", "no_set_epoch", "same_random_numbers", "same_augmentations"),
    *("same_noise", "padded_evaluation", "local_metric", "mean_of_means", "scheduler_steps", "schedule_length"),
    *("lr_scaled_alone", "gradients_dropped", "left_over", "accumulation", "clip_before_unscale"),
}

# Further causes of paceline doctor that count if the updates are the same: it watches more than the updates.
_BESIDE = {
    *("same_examples", "weights_differ_at_start", "collectives", "lr_differs", "buffers_differ"),
    *_NOT_COMPARED.union(DIVERGENCE),
}

_VAGUE = (None, "unknown", "batch-level", "forward-differs")  # paceline doctor may know more about the cause
_COMPARABLE = 0.1  # the largest difference of a gradient, in parts of its norm, that "the same" allows


def decide_plain(runs: Runs, ours: RunRecord) -> Answer:
    """Make the runs of one process, and answer. ours: the record of the subject run."""
    return _PlainComparison(runs, ours).answer()


def _unknown(why: str, *runs: str) -> Answer:
    return Answer(UNKNOWN, [Claim(f"could not tell: {why}", runs)])


def _repeats(whole: RunRecord, tolerances: Tolerances, step: int) -> bool:
    """Whether one process repeats most of its gradients in a step. If it does not, it draws random numbers that verify
    cannot repeat: by chance, a single gradient may be almost the same again."""
    theirs = {name: value for name, value in whole.gradients(step, 0).items() if norm(value)}
    loose = [name for name, value in theirs.items() if tolerances.gradient(name, theirs) > _COMPARABLE * norm(value)]
    return not loose or 2 * len(loose) < len(theirs)


class _PlainComparison:
    """The subject run and its runs of one process."""

    def __init__(self, runs: Runs, ours: RunRecord) -> None:
        self._runs, self._processes = runs, len(ours.ranks)
        self._reference = PlainReference(runs, ours)

    @property
    def _ours(self) -> RunRecord:
        return self._reference.ours

    @property
    def _subject(self) -> SubjectRun:
        return self._reference.subject

    def answer(self) -> Answer:
        answer = self._answer()
        answer.steps = answer.steps or self._ours.steps
        answer.notes += [*self._reference.notes, *disk_notes(self._ours)]
        return answer

    def _answer(self) -> Answer:
        ours = self._ours
        problem = next((record["problem"] for record in ours.ranks if record["problem"]), "")
        if problem:
            return _unknown(f"{problem}.", "A")
        if not ours.steps:
            return _unknown("the script made no update with an optimizer of torch.optim.")
        yields = any(step["yields"] for record in ours.ranks for step in record["steps"])
        if not yields or not all(record["complete"] for record in ours.ranks):
            return self._by_ranks(
                "the script's batches come from no torch DataLoader, and verify sees no inputs of its model with their "
                "targets. So it cannot give one process the examples of all ranks. Iterate over a DataLoader, or call "
                "the model as model(inputs, targets)."
            )
        whole, why = self._reference.whole()
        ours = self._ours  # it may have been made again
        if whole is None:
            return self._by_ranks(why)
        if self._divides_otherwise(whole):
            return self._by_ranks(
                "the ranks divide a batch that they all have, and one process computes only a part of it. The script "
                "divides it by a number other than the number of processes."
            )
        found = self._subject.ranks_differ_at_start() or self._subject.same_examples()
        if found is None and self._reference.skipped is not None:
            if self._subject.averages_weights():
                return self._local_sgd()
            found = self._updates_differ(whole, self._reference.skipped)
        if found is not None:
            return self._located(found)
        tolerances = self._reference.tolerances(whole)
        if tolerances is None:
            return _unknown(
                "one process, run twice on the same batches, differs from itself by more than rounding: an operator is "
                "not deterministic, or draws random numbers that verify cannot repeat.",
                whole.name,
                "C4",
            )
        scaled_twice = self._note_rates(whole)
        every = [
            [d for d in differences(ours, whole, ours, tolerances, step) if d.quantity != "initial weights"]
            if _repeats(whole, tolerances, step)
            else []
            for step in range(min(ours.steps, whole.steps))
        ]
        every, kinks = without_kinks(every, tolerances)
        if kinks:
            text = f"in {kinks} of the updates some gradients differ by more than rounding does, as at a ReLU's kink"
            self._reference.notes.append(claim_from(text, ours, whole))
        differing = next((found for found in every if found), [])
        if not differing:
            found = self._subject.ranks_differ_later()
            if found is not None and self._may_train_alone(found.step):
                return self._local_sgd()
            found = found or scaled_twice or self._subject.overlap()
            return self._located(found) if found is not None else self._beyond(self._same(whole, tolerances))
        return self._different(whole, tolerances, differing)

    # --- the subject run without a run of one process

    def _skips_evenly(self, step: int, whole: RunRecord, tolerances: Tolerances) -> bool:
        """Whether ranks have skipped backwards in an update, and all other backwards have the same weight."""
        pieces = self._subject.local_gradients(step)
        made = [sum(any(map(norm, one.values())) for one in rank) for rank in pieces or ()]
        if pieces is None or len(set(made)) == 1:
            return False
        mine, sums = self._ours.gradients(step, 0), total([one for rank in pieces for one in rank])
        theirs = whole.gradients(step, 0)
        return all(
            is_multiple(mine[name], sums[name], tolerances.gradient(name, theirs))
            for name in mine.keys() & sums.keys() & theirs.keys()
        )

    def _divides_otherwise(self, whole: RunRecord) -> bool:
        """Whether ranks that divide a common batch compute other elements together than one process."""
        if not self._subject.share_batches or not whole.steps:
            return False
        records = self._ours.step_records(0)
        divided = any(record.get("inputs") != records[0].get("inputs") for record in records)
        together = sum(record.get("elements", 0) for record in records)
        return divided and together != whole.step_records(0)[0].get("elements", 0)

    def _by_ranks(self, why: str) -> Answer:
        """The answer if there is no run of one process: whether the ranks' gradients are combined evenly.

        Parameters that start with different values on the ranks may be parts of a larger model. They are compared only
        if their gradients are combined.

        why: the reason why there is no run of one process.
        """
        ours, uneven, compared = self._ours, False, 0
        for step in range(ours.steps):
            pieces = self._subject.local_gradients(step)
            if pieces is None:
                continue
            compared += 1
            mine, sums = ours.gradients(step, 0), total([one for rank in pieces for one in rank])
            names = [name for name in mine if name in sums]

            def allowed(name: str, mine: dict[str, Tensor] = mine) -> float:
                return 1e-4 * norm(mine[name])

            wrong = [name for name in names if not is_multiple(mine[name], sums[name], allowed(name))]
            shared = [name for name in names if name not in wrong and len(pieces) > 1]
            found = self._subject.ranks_differ_at_start(shared)
            if found is not None:
                return self._located(found)
            wrong = [name for name in wrong if name not in self._subject.different_at_start]
            if not wrong:
                continue
            before = ours.gradients(step - 1, 0) if step else {}
            even = {name: value / self._processes for name, value in sums.items()}
            cause = explain(wrong, mine, even, pieces, before, allowed)
            if cause is None or not cause.accused:
                uneven = True
                continue
            if self._may_be_local_sgd(cause, step):
                return self._local_sgd()
            text = (
                f"different. In update {step + 1}, the ranks' gradients are not combined evenly. In {len(wrong)} of "
                f"{len(ours.parameters)} parameters, the gradient is {cause.sentence}."
            )
            answer = Answer(DIFFERENT, [claim_from(text, ours)], step, "gradient", wrong[0], cause.key)
            return self._located(answer)
        if not self._subject.different_at_start:
            found = self._subject.same_examples()
            if found is not None:
                return self._located(found)
            found = self._subject.ranks_differ_later()
            if found is not None:
                return self._local_sgd() if self._may_train_alone(found.step) else self._located(found)
        if self._fault is not None:
            return self._located(Answer(DIFFERENT, [claim_from("different, by the rules of paceline doctor.", ours)]))
        why = why if why.endswith(".") else f"{why}."
        if compared == ours.steps and not uneven and not self._subject.different_at_start:
            why += " The ranks' gradients are combined evenly; the scale of the losses is not compared."
        return _unknown(why, "A")

    def _updates_differ(self, whole: RunRecord, step: int) -> Answer:
        mine, theirs = between_updates(self._ours)[step], between_updates(whole)[step]
        text = (
            f"different. Your run makes update {step + 1} from {mine} batches of each rank, and one process makes it "
            f"from {theirs}: a decision of the script, such as leaving out a batch, differs.\n"
            "Remedy: reduce the value that decides over all ranks, before the decision."
        )
        return Answer(DIFFERENT, [claim_from(text, self._ours, whole)], step, "updates", None, "steps_differ")

    def _note_rates(self, whole: RunRecord) -> Answer | None:
        """Note learning rates that one process would not use. An answer if they are n * n times too large."""
        for step in range(min(self._ours.steps, whole.steps)):
            rates = zip(self._ours.ranks[0]["rates"][step], whole.ranks[0]["rates"][step], strict=False)
            pairs = [(a, b) for a, b in rates if abs(a - b) > 1e-9 * max(abs(a), abs(b))]
            if not pairs:
                continue
            mine, theirs = pairs[0]
            text = f"in update {step + 1} the learning rate is {mine:g}, and one process would use {theirs:g}"
            if theirs and abs(mine / theirs - self._processes**2) < 1e-6:
                text = (
                    f"different. {text[0].upper()}{text[1:]}. The factor is {self._processes} * {self._processes}, as "
                    "if the script multiplied it by the number of processes twice.\n"
                    "Remedy: scale the learning rate once, by the global batch."
                )
                claims = [claim_from(text, self._ours, whole)]
                return Answer(DIFFERENT, claims, step, "learning rate", None, "lr_scaled_twice")
            text += (
                ": the script derives it from the number of processes or of batches. The updates were compared with "
                "the learning rate of your run"
            )
            self._reference.notes.append(claim_from(text, self._ours, whole))
            return None
        return None

    # --- answers

    def _same(self, whole: RunRecord, tolerances: Tolerances) -> Answer:
        ours = self._ours
        steps, worst = min(ours.steps, whole.steps), (0.0, 0.0, "")
        for step in range(steps):
            mine, theirs = ours.gradients(step, 0), whole.gradients(step, 0)
            for name in mine.keys() & theirs.keys():
                size = norm(theirs[name])
                if size and name not in tolerances.indeterminate:
                    worst = max(
                        worst, (norm(mine[name] - theirs[name]) / size, tolerances.gradient(name, theirs) / size, name)
                    )
        if not worst[2]:
            return _unknown(
                f"in all {steps} updates every gradient is zero, or is decided by rounding, in your run and in one "
                "process. So nothing was compared. Give a larger --steps, or other data.",
                ours.name,
                whole.name,
            )
        if worst[0] > _COMPARABLE:
            return _unknown(
                f"a gradient of your run differs by {worst[0]:.2g} of its norm ({worst[2]}), and two runs of one "
                f"process allow {worst[1]:.2g}. So the script draws random numbers that verify cannot repeat, or "
                "amplifies rounding.",
                ours.name,
                whole.name,
            )
        text = (
            f"the same. {steps} updates of {self._processes} processes are those of one process that computes the same "
            f"examples."
        )
        share, explained, name = worst
        text += f" The largest difference of a gradient is {share:.2g} of its norm"
        text += f" ({name}; rounding explains {explained:.2g})."
        answer = Answer(SAME, [claim_from(text, ours, whole)], steps=steps)
        if ours.ranks[0]["normalised"] and "separate_batches" not in self._reference.how:
            answer.notes.append(
                claim_from(
                    "batch norm uses the examples of each rank separately, in your run and in the run of one process. "
                    "SyncBatchNorm uses the whole batch",
                    whole,
                )
            )
        return answer

    def _different(self, whole: RunRecord, tolerances: Tolerances, found: Sequence[Difference]) -> Answer:
        first, ours = found[0], self._ours
        unmatched = sorted({name for r in ours.step_records(first.step) for name in r["unmatched"]})
        cause = self._explained(whole, tolerances, found) if first.quantity == "gradient" else None
        if cause is None and unmatched:
            return _unknown(
                f"the script mixes the examples of a batch at random ({', '.join(unmatched)}), and verify cannot give "
                "one process the same mixture.",
                ours.name,
                whole.name,
            )
        if cause is not None and self._may_be_local_sgd(cause, first.step):
            return self._local_sgd()
        if first.quantity == "gradient" and self._skips_evenly(first.step, whole, tolerances):
            return _unknown(
                f"in update {first.step + 1} the ranks make different numbers of backwards, and one process decides "
                "for the examples of all ranks at once. The ranks' gradients are combined evenly.",
                ours.name,
                whole.name,
            )
        if self._subject.exchanges and not self._subject.share_batches and not self._subject.divide_model:
            return _unknown(
                "the script exchanges tensors between the ranks in a model's forward (context or expert parallelism), "
                "and the ranks get different batches. So verify does not know how their examples make one batch.",
                ours.name,
                whole.name,
            )
        whole_batches = self._subject.divide_model and self._subject.share_batches and self._subject.equal_inputs
        losses = self._reference.losses_differ(whole, first.step) if whole_batches else None
        if losses is not None and (cause is None or not cause.accused):
            text = (
                f"\nThe loss differs too: {losses[0]:.6g} in your run, {losses[1]:.6g} in one process. So the ranks' "
                "parts of the forward do not add up to that of the whole model."
            )
            claims = [claim_from(f"different. {describe(first)}", ours, whole), claim_from(text, ours, whole)]
            return self._located(answer_with(DIFFERENT, claims, found, "forward-differs"))
        if cause is not None and not cause.accused and self._subject.share_batches:
            text = (
                "\nThe ranks divide a batch, or a model, that they all have, and their gradients are combined. One "
                "process has further terms: a gradient that should flow between the ranks is lost or scaled."
            )
            claims = [claim_from(f"different. {describe(first)}", ours, whole), claim_from(text, ours, whole)]
            key = "backward-lost" if self._fault is None else "unknown"  # then doctor knows the cause
            return self._located(answer_with(DIFFERENT, claims, found, key))
        if cause is not None and not cause.accused and whole.step_records(first.step)[0].get("gradient_in_gather"):
            text = (
                "\nThe script gathers tensors that have gradients, and the gathered tensors have none. In one "
                "process the gradients pass.\n"
                "Remedy: gather with torch.distributed.nn.functional.all_gather."
            )
            claims = [claim_from(f"different. {describe(first)}", ours, whole), claim_from(text, ours, whole)]
            return self._located(answer_with(DIFFERENT, claims, found, "backward-lost"))
        if cause is not None and not cause.accused and self._fault is None:
            text = (
                f"the same up to the loss of a batch. The gradients of your run are {cause.sentence} (in-batch "
                "negatives, batch statistics). Each rank computes this loss on its own examples, as data parallelism "
                "does."
            )
            same = Answer(SAME, [claim_from(text, ours, whole)], steps=min(ours.steps, whole.steps), cause=cause.key)
            return self._beyond(same)
        claims = [claim_from(f"different. {describe(first)}", ours, whole)]
        if cause is not None:
            share = f"In {len(cause.names)} of {len(ours.parameters)} parameters, the gradient is {cause.sentence}."
            if self._subject.divide_model and cause.key == "not-reduced":
                share = (
                    f"In {len(cause.names)} parameters that all ranks hold, such as {cause.names[0]}, the gradient "
                    "comes from rank 0's part of the model alone: a backward between the ranks lacks an all-reduce."
                )
            claims.append(claim_from(f"\n{share}", ours, whole))
        key = cause.key if cause is not None else "update" if first.quantity == "weights" else "unknown"
        answer = answer_with(DIFFERENT, claims, found, key)
        return self._located(answer)

    def _explained(self, whole: RunRecord, tolerances: Tolerances, found: Sequence[Difference]) -> Explanation | None:
        """The kind of the difference, from one run for each rank's examples."""
        step = found[0].step
        pieces = self._subject.local_gradients(step)
        if pieces is None:
            pieces = []
            for rank in range(self._processes):
                part = self._reference.run(f"P{rank}", only_shard=rank, separate_batches=False, steps=step + 1)
                if part is None or part.steps <= step:
                    return None
                pieces.append(by_backward(part, step))
        names = [d.name for d in found if d.quantity == "gradient" and d.name is not None]
        theirs = whole.gradients(step, 0)
        before = self._ours.gradients(step - 1, 0) if step else {}
        mine = self._ours.gradients(step, 0)
        return explain(names, mine, theirs, pieces, before, lambda name: tolerances.gradient(name, theirs))

    def _may_be_local_sgd(self, cause: Explanation, step: int) -> bool:
        """Whether ranks that train alone average their weights, or may do so after the last step.

        Doctor watches more steps, and finds replicas that part for good.
        """
        if cause.key != "not-reduced":
            return False
        if self._subject.averages_weights():
            return True
        return len(cause.names) == len(self._ours.parameters) and self._may_train_alone(step)

    def _may_train_alone(self, step: int | None) -> bool:
        """Whether ranks with different weights average them, or may do so after the last step.

        step: the update after which the weights part.
        """
        if self._subject.averages_weights():
            return True
        made, updates = self._ours.ranks[0]["made"], self._ours.ranks[0]["steps"]
        asked = "comm_hook" in made or any("no_sync" in update.get("lines", ()) for update in updates)
        if "wrapper" in made and not asked:  # DistributedDataParallel is there to average gradients
            return False
        return self._fault is None and not (step is not None and self._combined(step))

    def _combined(self, step: int) -> bool:
        """Whether the gradients of an update are combined over the ranks, as far as the runs show."""
        pieces = self._subject.local_gradients(step)
        if pieces is None:
            return False
        mine, sums, own = (
            self._ours.gradients(step, 0),
            total([one for rank in pieces for one in rank]),
            total(pieces[0]),
        )
        names = [name for name in mine if name in own and norm(mine[name])]

        def multiple(of: dict[str, Tensor]) -> bool:
            return all(is_multiple(mine[name], of[name], 1e-4 * norm(mine[name])) for name in names)

        return multiple(sums) and not multiple(own)

    def _local_sgd(self) -> Answer:
        if not self._subject.averages_weights():
            return _unknown(
                f"each rank trains alone in these {self._ours.steps} updates. paceline doctor watched more of them and "
                "found no fault, so the ranks may average their weights later (local SGD). Give a larger --steps.",
                self._ours.name,
            )
        return _unknown(
            "each rank trains alone, and the ranks average their weights now and then (local SGD). This changes the "
            "training by design, so there is no process to compare with.",
            self._ours.name,
        )

    @cached_property
    def _faults(self) -> list[dict[str, Any]]:
        """The faults that `paceline doctor` finds in the script."""
        return self._runs.find_faults()

    @property
    def _fault(self) -> dict[str, Any] | None:
        """The first of them that changes the updates which were compared; None if there is none."""
        known = (*_NOT_COMPARED, "no_gradient")  # a parameter without a gradient has none in one process either
        return next((fault for fault in self._faults if fault["cause"] not in known), None)

    def _beyond(self, same: Answer) -> Answer:
        """The answer if the updates are the same: a fault beyond the updates, or `same`.

        Doctor watches more updates. If the ranks' weights part, they do so after the compared ones.
        """
        counted = _BESIDE - ({"weights_differ_at_start"} if self._subject.divide_model else set())  # parts differ
        faults = [fault for fault in self._faults if fault["cause"] in counted]
        fault = min(faults, key=lambda fault: fault["cause"] in METRICS, default=None)  # the model comes first
        if fault is None:
            return same
        answer = answer_by_doctor(fault, f"The updates are {same.claims[0].text}", same.claims[0].runs)
        answer.steps, answer.notes = same.steps, same.notes
        return answer

    def _located(self, answer: Answer) -> Answer:
        """Add the line of the fault."""
        fault = self._fault
        steps = self._ours.step_records(answer.step or 0)
        record = self._ours.ranks[0]
        found = locate(answer.cause, steps, record["made"], record["loss_nodes"], self._subject.divide_model)
        beside = found and (found.at if fault is not None else found.beside)
        answer.beside = f"{beside[0]}:{beside[1]}" if beside else None
        if fault is not None:
            answer.remedy, answer.file, answer.line = fault["remedy"], fault["file"], fault["line"]
            if answer.cause != "same-examples" or answer.beside is None:
                answer.beside = fault["beside"] or answer.beside
            answer.cause = answer.cause if answer.cause not in _VAGUE else fault["cause"]
            where = f"{fault['file']}:{fault['line']}: " if fault["file"] else ""
            answer.claims.append(
                Claim(
                    f"\nCause, by paceline doctor: {where}{fault['title']}. {fault['evidence']}.\n"
                    f"Remedy: {fault['remedy']}"
                )
            )
            return answer
        at = steps[0].get("lines", {}).get("backward") if steps else None
        if found is not None:
            answer.file, answer.line = found.at
            answer.claims.append(claim_from(f"\n{found.sentence}", self._ours))
        elif at:
            answer.file, answer.line = at
            answer.claims.append(claim_from(f"\nThe gradients come from the backward at {at[0]}:{at[1]}.", self._ours))
        return answer
