"""The run in question beside the other runs of a question, and how they differ. A Comparison makes these runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.config import parse_strategy
from paceline.verify.answer import Claim, claim_from
from paceline.verify.differences import differences, differences_before, differences_computed
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, Runs
from paceline.verify.tolerances import Difference, Tolerances

COMPUTED = {"loss", "gradient"}
NOISE = {*COMPUTED, "buffers"}  # quantities in which numbers that are drawn show


class Comparison:
    """A run in question that can be compared step by step, and the runs beside it."""

    def __init__(self, runs: Runs, ours: RunRecord) -> None:
        self.runs, self.subject = runs, ours
        record = ours.ranks[0]
        self.shard_count: int = record["shards"]
        # C, or why there is none.
        self.whole_batches, self.why_not_whole = runs.run_single_process(
            "C", SINGLE, dropout_off=True, whole_batches=True
        )
        self.again_whole: RunRecord | None = None  # C2: in reverse order, and rounded elsewhere
        self.notes: list[Claim] = []  # further sentences of the answer
        self.kinks = 0  # the number of steps in which rounding at a kink shows
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
        if ours.updates(0) > 1 and turns != at_once:  # in sequence, all shards have passed before the first one
            self.same_shards, _ = runs.run_single_process("B1", at_once)
            self.in_one_process = turns if self.same_shards is None else at_once
        if self.same_shards is None:
            self.same_shards, self.why_not_shards = runs.run_single_process("B", turns)
        self.told_alone: RunRecord | None = None  # D
        self.why_not_told: str | None = None
        self.without_dropout: RunRecord | None = ours  # A0, or A where nothing was drawn
        if ours.drew:
            failed = runs.run("A0", dropout_off=True)
            self.without_dropout = runs.load("A0", runs.start.processes) if failed is None else None

    def _tolerances(self) -> Tolerances:
        """Measured with C2: whole batches in reverse order, with other roundings."""
        if self.whole_batches is not None:
            how = {"dropout_off": True, "whole_batches": True, "perturbed": True}
            self.again_whole, _ = self.runs.run_single_process("C2", SINGLE, reversed_batches=True, **how)
        return self._tolerances_from(self.again_whole)

    def _tolerances_from(self, other: RunRecord | None) -> Tolerances:
        record = self.subject.ranks[0]
        return Tolerances(self.whole_batches, other, record["precision"], record["tf32"])

    def check_tolerances(self) -> bool:
        """Whether one process makes the same of the same batches twice.

        Where C2 differs by more than rounding usually makes, the tolerances are replaced, for one of two reasons. The
        order of a batch's examples may count: then they are measured with the examples in order (C3). Or the model
        enlarges rounding: then they are as large as that.
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
                "this model enlarges rounding: a last bit of its weights moves most gradients by more than half of "
                "their digits, and no finer fault can be seen"
            )
            self.notes.append(
                claim_from(enlarged, *(record for record in (whole, self.again_whole, again) if record is not None))
            )
        return True

    def differences_by_cutting(self) -> list[Difference]:
        """A against C: has cutting the batch, or anything else, changed something?"""
        plain, whole = self.without_dropout, self.whole_batches
        if plain is None or whole is None:
            return []

        def differences_in(step: int, without: Collection[str] = ()) -> Iterator[Difference]:
            found = differences(plain, whole, self.subject, self.tolerances, step)
            return (d for d in found if d.quantity not in without)

        found = self._first_differences(differences_in, plain, whole)
        if self.noisy and {d.quantity for d in found} <= NOISE:  # these differences would hide later ones
            found = self._first_differences(lambda k: differences_in(k, NOISE), plain, whole) or found
        return [d for d in found if not (self.noisy and d.quantity in NOISE)] or found

    def differences_by_distributing(self) -> list[Difference]:
        """A against B: has distributing the shards changed something?"""
        shards = self.same_shards
        if shards is None:
            return []
        turns = shards.ranks[0]["turns"]  # where there are turns, all shards have passed before the first update
        return self._computed(self.subject, shards, lambda k: turns > 0 and self.subject.updates(k) > 1)

    def differences_by_asking(self, known: bool) -> list[Difference]:
        """A against D, where no process can compute the shards: does asking for the rank change anything?

        In D each process of the run in question is told that it is the only one.

        known: a difference is known already. Then the locator makes such a run.
        """
        if known or self.runs.start.processes < 2:
            return []
        self.why_not_told = self.runs.run("D", told_alone=True)
        self.told_alone = self.runs.load("D", self.runs.start.processes) if self.why_not_told is None else None
        told = self.told_alone
        if told is None or not told.steps:
            self.told_alone = None
            return []
        return self._first_differences(
            lambda k: differences(self.subject, told, self.subject, self.tolerances, k), self.subject, told
        )

    @property
    def noisy(self) -> bool:
        """Whether the script draws other numbers where the batch is cut otherwise, although dropout is off."""
        plain, whole = self.without_dropout, self.whole_batches
        if plain is None or whole is None:
            return False
        steps = range(min(plain.steps, whole.steps))
        return (
            plain.drew
            or whole.drew
            or any(plain.other_generator_states(k) != whole.other_generator_states(k) for k in steps)
        )

    def may_be_noise(self, by_cutting: Sequence[Difference]) -> bool:
        """Whether the differences from the whole batch may be what the script draws."""
        return self.noisy and {d.quantity for d in by_cutting} <= NOISE

    def _first_differences(
        self, differences_in: Callable[[int], Iterator[Difference]], *records: RunRecord
    ) -> list[Difference]:
        """The differences in the first step that has any, apart from kinks (tolerances.py)."""
        steps = range(min(record.steps for record in records))
        every, kinks = without_kinks([list(differences_in(step)) for step in steps], self.tolerances)
        self.kinks = max(self.kinks, kinks)
        return next((found for found in every if found), [])

    def shards_differ_without_dropout(self) -> bool:
        """Whether one process that computes the shards in turn differs from A with dropout off too, although C is the
        same. So it is with a script that counts batches and not updates, for example."""
        other, _ = self.runs.run_single_process("B0", self.in_one_process, dropout_off=True)
        return self.without_dropout is None or other is None or bool(self._computed(self.without_dropout, other))

    def _computed(
        self, ours: RunRecord, theirs: RunRecord, first: Callable[[int], bool] = lambda _: False
    ) -> list[Difference]:
        """What two runs computed otherwise, in the first step with a difference. first: compare only what belongs to
        the first update of this step?"""
        tolerances = self.tolerances
        return self._first_differences(
            lambda k: differences_computed(ours, theirs, tolerances, k, first=first(k)), ours, theirs
        )

    def differently_seeded_run(self, whole: RunRecord) -> RunRecord | None:
        """Another run of one process that begins with other weights, or takes other examples; None where there is no
        such run."""
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
        """Whether one process that computes the shards differs from itself when it is run again."""
        again, _ = self.runs.run_single_process("B2", self.in_one_process)
        return again is not None and self.same_shards is not None and bool(self._computed(again, self.same_shards))


def without_kinks(every: list[list[Difference]], tolerances: Tolerances) -> tuple[list[list[Difference]], int]:
    """(the steps' differences without steps in which rounding at a kink may have made them, the number of these steps).

    Where they are half of all steps or more, it was not rounding, and nothing is left out.
    """
    kinks = [bool(found) and tolerances.may_be_kinks(found) for found in every]
    if 2 * sum(kinks) >= len(every):
        return every, 0
    return [found for found, kink in zip(every, kinks, strict=True) if not kink], sum(kinks)
