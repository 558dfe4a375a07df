"""Compare the subject run with its reference runs. A Comparison makes the reference runs and finds the differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.config import parse_strategy
from paceline.verify.answer import Claim, claim_from
from paceline.verify.differences import differences, differences_before, differences_computed
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, Runs
from paceline.verify.tolerances import Difference, Tolerances

COMPUTED = {"loss", "gradient"}
NOISE = {*COMPUTED, "buffers"}  # quantities that show random draws


class Comparison:
    """A subject run that can be compared step by step, and its reference runs."""

    def __init__(self, runs: Runs, ours: RunRecord) -> None:
        self.runs, self.subject = runs, ours
        record = ours.ranks[0]
        self.shard_count: int = record["shards"]
        # C, or the reason why it could not be run.
        self.whole_batches, self.why_not_whole = runs.run_single_process(
            "C", SINGLE, dropout_off=True, whole_batches=True
        )
        self.again_whole: RunRecord | None = None  # C2: whole batches in reverse order, with different rounding
        self.notes: list[Claim] = []  # further sentences of the answer
        self.kinks = 0  # the number of steps that show rounding at a kink
        self.order_counts = False  # whether a batch's loss depends on the order of its examples
        self.tolerances = self._tolerances()
        turns = runs.shards_in_sequence(self.shard_count)
        at_once = (
            parse_strategy(f"data_parallel:devices={','.join(runs.devices(self.shard_count))}")
            if self.shard_count > 1
            else turns
        )
        if record["normalised"] and record["batch_norm"] == "global":
            turns = at_once
        self.in_one_process = turns  # the strategy of `same_shards`
        self.same_shards: RunRecord | None = None  # B or B1
        self.why_not_shards: str | None = None
        if ours.updates(0) > 1 and turns != at_once:  # a run in sequence computes all shards before the first update
            self.same_shards, _ = runs.run_single_process("B1", at_once)
            self.in_one_process = turns if self.same_shards is None else at_once
        if self.same_shards is None:
            self.same_shards, self.why_not_shards = runs.run_single_process("B", turns)
        self.rank_0_of_1: RunRecord | None = None  # D
        self.why_not_rank_0_of_1: str | None = None
        self.without_dropout: RunRecord | None = ours  # A0; A if nothing was drawn
        if ours.drew:
            failed = runs.run("A0", dropout_off=True)
            self.without_dropout = runs.load("A0", runs.start.processes) if failed is None else None

    def _tolerances(self) -> Tolerances:
        """Measure the tolerances with C2: whole batches in reverse order, with different rounding."""
        if self.whole_batches is not None:
            how = {"dropout_off": True, "whole_batches": True, "perturbed": True}
            self.again_whole, _ = self.runs.run_single_process("C2", SINGLE, reversed_batches=True, **how)
        return self._tolerances_from(self.again_whole)

    def _tolerances_from(self, other: RunRecord | None) -> Tolerances:
        record = self.subject.ranks[0]
        return Tolerances(self.whole_batches, other, record["precision"], record["tf32"])

    def check_tolerances(self) -> bool:
        """Whether one process gets the same results when it repeats the same batches.

        If C2 differs by more than rounding usually explains, the tolerances are replaced. There are two possible
        reasons. If the order of a batch's examples matters, the tolerances are measured again with the examples in
        order (C3). Otherwise the model amplifies rounding, and the tolerances are enlarged.
        """
        whole = self.whole_batches
        if self.tolerances.rounding_only or whole is None:
            return True
        again, _ = self.runs.run_single_process("C4", SINGLE, dropout_off=True, whole_batches=True)
        exact = self._tolerances_from(None)
        if again is None or self._first_differences(
            lambda k: differences_computed(again, whole, exact, k), again, whole
        ):
            return False
        nudged, _ = self.runs.run_single_process("C3", SINGLE, dropout_off=True, whole_batches=True, perturbed=True)
        in_order = self._tolerances_from(nudged)
        self.order_counts = nudged is not None and in_order.rounding_only
        if self.order_counts:
            self.tolerances = in_order
        else:
            self.tolerances.enlarged = True
            enlarged = (
                "this model amplifies rounding: the last bit of its weights moves most gradients by more than half of "
                "their digits, so smaller faults cannot be detected"
            )
            self.notes.append(
                claim_from(enlarged, *(record for record in (whole, self.again_whole, again) if record is not None))
            )
        return True

    def differences_by_splitting(self) -> list[Difference]:
        """Compare A, with dropout off, with C: does splitting the batch, or anything else, change the result?"""
        plain, whole = self.without_dropout, self.whole_batches
        if plain is None or whole is None:
            return []

        def differences_in(step: int, without: Collection[str] = ()) -> Iterator[Difference]:
            found = differences(plain, whole, self.subject, self.tolerances, step)
            return (d for d in found if d.quantity not in without)

        found = self._first_differences(differences_in, plain, whole)
        if self.noisy and {d.quantity for d in found} <= NOISE:  # these differences would hide later differences
            found = self._first_differences(lambda k: differences_in(k, NOISE), plain, whole) or found
        return [d for d in found if not (self.noisy and d.quantity in NOISE)] or found

    def differences_by_distributing(self) -> list[Difference]:
        """Compare A with B: does distributing the shards change the result?"""
        shards = self.same_shards
        if shards is None:
            return []
        turns = shards.ranks[0]["shards_in_sequence"]  # a run in sequence computes all shards before the first update
        return self._computed(self.subject, shards, lambda k: turns > 0 and self.subject.updates(k) > 1)

    def differences_by_rank_queries(self, known: bool) -> list[Difference]:
        """Compare A with D: does the rank or the world size change the result?

        In D the script sees rank 0 of 1 on every process. D replaces B if no single process can compute the shards.

        known: a difference was found already. Then D is not made, because the FaultLocator makes such a run (LD).
        """
        if known or self.runs.start.processes < 2:
            return []
        self.why_not_rank_0_of_1 = self.runs.run("D", rank_0_of_1=True)
        self.rank_0_of_1 = self.runs.load("D", self.runs.start.processes) if self.why_not_rank_0_of_1 is None else None
        alone = self.rank_0_of_1
        if alone is None or not alone.steps:
            self.rank_0_of_1 = None
            return []
        return self._first_differences(
            lambda k: differences(self.subject, alone, self.subject, self.tolerances, k), self.subject, alone
        )

    @property
    def noisy(self) -> bool:
        """Whether the random numbers of the script depend on how a batch is split, even with dropout off."""
        plain, whole = self.without_dropout, self.whole_batches
        if plain is None or whole is None:
            return False
        steps = range(min(plain.steps, whole.steps))
        return (
            plain.drew
            or whole.drew
            or any(plain.other_generator_states(k) != whole.other_generator_states(k) for k in steps)
        )

    def may_be_noise(self, by_splitting: Sequence[Difference]) -> bool:
        """Whether random draws may explain these differences of A and C."""
        return self.noisy and {d.quantity for d in by_splitting} <= NOISE

    def _first_differences(
        self, differences_in: Callable[[int], Iterator[Difference]], *records: RunRecord
    ) -> list[Difference]:
        """The differences in the first step that has any. Differences at kinks do not count (tolerances.py)."""
        steps = range(min(record.steps for record in records))
        every, kinks = without_kinks([list(differences_in(step)) for step in steps], self.tolerances)
        self.kinks = max(self.kinks, kinks)
        return next((found for found in every if found), [])

    def shards_differ_without_dropout(self) -> bool:
        """Whether one process that computes the same shards differs from A even with dropout off, although C equals A.
        A script that counts batches instead of updates causes this, for example."""
        other, _ = self.runs.run_single_process("B0", self.in_one_process, dropout_off=True)
        return self.without_dropout is None or other is None or bool(self._computed(self.without_dropout, other))

    def _computed(
        self, ours: RunRecord, theirs: RunRecord, first: Callable[[int], bool] = lambda _: False
    ) -> list[Difference]:
        """The differences of computed values, in the first step that has any. first: whether to compare only the first
        update of a step."""
        tolerances = self.tolerances
        return self._first_differences(
            lambda k: differences_computed(ours, theirs, tolerances, k, first=first(k)), ours, theirs
        )

    def differently_seeded_run(self, whole: RunRecord) -> RunRecord | None:
        """A run of one process that starts with different weights than `whole`, or reads different examples; None if
        there is no such run."""
        for other in (self.again_whole, self.same_shards):
            if other is None or other.ranks[0]["rank"] != whole.ranks[0]["rank"]:
                continue
            if any(d.quantity == "initial weights" for d in differences_before(other, whole, self.tolerances, 0)):
                return other
            if other is self.again_whole and any(
                other.example_counts(k, "ids") != whole.example_counts(k, "ids")
                for k in range(min(other.steps, whole.steps))
            ):
                return other
        return None

    def shards_differ_from_themselves(self) -> bool:
        """Whether B differs from its repetition, B2."""
        again, _ = self.runs.run_single_process("B2", self.in_one_process)
        return again is not None and self.same_shards is not None and bool(self._computed(again, self.same_shards))


def without_kinks(every: list[list[Difference]], tolerances: Tolerances) -> tuple[list[list[Difference]], int]:
    """Leave out steps with differences that rounding at a kink may explain.

    Returns (the differences of each remaining step, the number of steps left out). If such steps are half of all steps
    or more, rounding is not the reason, and no step is left out.
    """
    kinks = [bool(found) and tolerances.may_be_kinks(found) for found in every]
    if 2 * sum(kinks) >= len(every):
        return every, 0
    return [found for found, kink in zip(every, kinks, strict=True) if not kink], sum(kinks)
