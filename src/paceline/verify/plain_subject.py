"""The record of the subject run by itself: its ranks' weights, examples and gradients.

The answers of this file need no run of one process. plain_decision.py makes those runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor

from paceline.observe.write_tracer import EXCHANGE
from paceline.verify.answer import DIFFERENT, Answer, claim_from
from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import norm

_ROUNDING = 1e-3  # the largest difference of equal gradients on two ranks, in parts of their norm
_MIN_OVERLAP = 4  # examples that two ranks have in common; padding repeats fewer


class SubjectRun:
    """The subject run. ours: its record."""

    def __init__(self, ours: RunRecord) -> None:
        self._ours = ours
        self._processes = len(ours.ranks)

    @cached_property
    def different_at_start(self) -> list[str]:
        """The parameters that the ranks start with different values of."""
        starts = [record["steps"][0]["start"] for record in self._ours.ranks]
        return [n for n in self._ours.parameters if len({start.get(n) for start in starts if n in start}) > 1]

    def ranks_differ_at_start(self, among: Collection[str] | None = None) -> Answer | None:
        """An answer if the ranks start from different weights. among: look only at these parameters; None: at all."""
        names = [n for n in self.different_at_start if among is None or n in among]
        if not names:
            return None
        text = (
            f"different. The ranks start from different weights: {listed(names)}.\n"
            "Cause: each rank initialises its own model, and nothing sends the weights of one rank to the others.\n"
            "Remedy: wrap the model in DistributedDataParallel, broadcast its parameters from rank 0 before the first "
            "step, or seed all ranks equally before the model is built."
        )
        answer = Answer(DIFFERENT, [claim_from(text, self._ours)], 0, "initial weights", names[0], "ranks-start-apart")
        return answer

    def same_examples(self) -> Answer | None:
        """An answer if all ranks compute the same examples in each step."""
        steps = range(self._ours.steps)
        by_step = []
        for step in steps:
            keys = [
                sorted(key for _, batch in record["keys"] for key in batch) for record in self._ours.step_records(step)
            ]
            by_step.append(keys)
        filled = [keys for keys in by_step if any(keys)]
        if len(filled) < 2 or any(keys[0] != other for keys in filled for other in keys[1:]):
            return None
        if len({tuple(keys[0]) for keys in filled}) == 1:  # one batch again and again: a test of the script
            return None
        if not self.equal_inputs or self.different_at_start or self.divide_model:
            return None  # the ranks divide a batch, or a model, that they all have
        text = (
            f"different. In each of the {len(filled)} steps, all ranks compute the same examples, so "
            f"{self._processes} processes make the updates of one.\n"
            "Cause: the script does not divide its data between the ranks.\n"
            "Remedy: give the DataLoader a DistributedSampler; let an IterableDataset yield each rank its own share."
        )
        return Answer(DIFFERENT, [claim_from(text, self._ours)], 0, "examples", None, "same-examples")

    @cached_property
    def exchanges(self) -> bool:
        """Whether the script calls collectives in a model's forward."""
        return any(
            entry[0] == EXCHANGE
            for record in self._ours.ranks
            for step in record["steps"]
            for entry in step.get("writes", ())
        )

    def overlap(self) -> Answer | None:
        """An answer if ranks compute the same examples in a pass over a loader, and no rank computes one twice."""
        if self._ours.in_parts:
            return None
        passes: dict[tuple[int, int], list[list[int]]] = {}
        for rank, record in enumerate(self._ours.ranks):
            for loader, one_pass, keys in record["examples"]:
                found = passes.setdefault((loader, one_pass), [[] for _ in self._ours.ranks])
                found[rank] += keys
        for ranks in passes.values():
            first, second = set(ranks[0]), set(ranks[1])
            both = len(first & second)
            distinct = len(first) == len(ranks[0]) and len(second) == len(ranks[1])
            if distinct and both >= _MIN_OVERLAP and both * 10 >= len(first):
                text = (
                    f"different. In a pass over the data, {both} of the {len(first)} examples of rank 0 are also "
                    "examples of rank 1, and neither computes an example twice: the ranks divide the data in different "
                    "orders, so some examples are used several times and others not at all.\n"
                    "Remedy: give all ranks the same seed of the order, and each rank its own share of it."
                )
                return Answer(DIFFERENT, [claim_from(text, self._ours)], 0, "examples", None, "same-examples")
        return None

    @cached_property
    def are_dispatched(self) -> bool:
        """Whether rank 0 reads a batch for each rank and sends it, as Accelerate does for an IterableDataset."""
        first, *others = (
            sum(batches for loader, _, batches, _ in record["passes"] if loader >= 0) for record in self._ours.ranks
        )
        return first > 0 and not any(others)

    @cached_property
    def _equal_keys(self) -> bool:
        """Whether all ranks have the same examples."""
        keys = [[step["keys"] for step in record["steps"]] for record in self._ours.ranks]
        return all(other == keys[0] for other in keys)

    @cached_property
    def equal_inputs(self) -> bool:
        """Whether the models of all ranks get the same inputs: no part of a batch for each rank."""
        inputs = [[step.get("inputs") for step in record["steps"]] for record in self._ours.ranks]
        return all(other == inputs[0] for other in inputs)

    @cached_property
    def divide_model(self) -> bool:
        """Whether each rank computes a part of the model, as under tensor parallelism.

        Either each rank holds parts of some parameters, or torch shards them. Or all ranks hold all weights and have
        the same examples, exchange tensors in the forward, and each has other gradients before they are reduced.
        """
        if self._ours.in_parts or any(record["computes_sharded"] for record in self._ours.ranks):
            return True
        local = self.local_gradients(0) if self.exchanges and self._equal_keys else None
        return local is not None and any(_differ(local[0], other) for other in local[1:])

    @cached_property
    def share_batches(self) -> bool:
        """Whether the ranks divide batches that they all have, or a model."""
        by_function = self._ours.ranks[0].get("batch_function") is not None
        return (by_function or self.divide_model) and self._equal_keys

    def ranks_differ_later(self) -> Answer | None:
        """An answer if the ranks hold different weights after an update."""
        for step in range(self._ours.steps):
            records = self._ours.step_records(step)
            names = [
                n for n in self._ours.parameters if len({r["after"].get(n) for r in records if n in r["after"]}) > 1
            ]
            if names:
                text = f"different. After update {step + 1} the ranks hold different weights: {listed(names)}."
                claim = claim_from(text, self._ours)
                return Answer(DIFFERENT, [claim], step, "weights", names[0], "ranks-drift-apart")
        return None

    def local_gradients(self, step: int) -> list[list[dict[str, Tensor]]] | None:
        """What each backward of an update has added on each rank; None if a rank has not recorded it."""
        found: list[list[dict[str, Tensor]]] = []
        for record in self._ours.ranks:
            added: list[dict[str, Tensor]] = []
            while tensors := self._ours.tensors(f"local-{step}-{len(added)}-r{record['rank']}"):
                added.append({name: value.double() for name, value in tensors.items()})
            found.append(added)
        return found if all(found) else None

    def averages_weights(self) -> bool:
        """Whether a weight that differed between the ranks after an update is equal before a later update of it."""
        apart: set[str] = set()
        for step in range(self._ours.steps):
            records = self._ours.step_records(step)
            if any(_alike(records, "before", name) for name in apart & records[0]["before"].keys()):
                return True
            apart = {name for name in records[0]["after"] if not _alike(records, "after", name)}
        return False


def _alike(records: Sequence[dict[str, Any]], when: str, name: str) -> bool:
    return all(record[when].get(name) == records[0][when][name] for record in records)


def _differ(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    """Whether the backwards of two ranks add different gradients, by more than rounding."""
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=False) for name in a.keys() & b.keys()]
    return any(norm(a - b) > _ROUNDING * norm(a) for a, b in pairs)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def by_backward(record: RunRecord, step: int) -> list[dict[str, Tensor]]:
    """The gradient of each backward of a step, for a run of one process."""
    sums: list[dict[str, Tensor]] = []
    while found := record.tensors(f"part-{step}-{len(sums) + 1}"):
        sums.append({name: grad.double() for name, grad in found.items()})
    pieces: list[dict[str, Tensor]] = []
    before: dict[str, Tensor] = {}
    for added in [*sums, record.gradients(step, 0)]:
        pieces.append({name: grad - before[name] if name in before else grad for name, grad in added.items()})
        before = added
    return pieces


def between_updates(record: RunRecord) -> list[int]:
    """The number of batches of a rank before each update."""
    yields = [0, *(step["yields"] for step in record.ranks[0]["steps"])]
    return [after - before for before, after in pairwise(yields)]


def batches_per_update(record: RunRecord, ahead: float = 0) -> float:
    """The number of batches of a rank between two updates, in the last steps. ahead: batches fetched ahead."""
    yields = [step["yields"] for step in record.ranks[0]["steps"]]
    if len(yields) == 1:
        return float(yields[0] - ahead)
    return (yields[-1] - yields[0]) / (len(yields) - 1)


def batches_ahead(record: RunRecord) -> float:
    """The number of batches that the script has fetched ahead of an update. 0 if one update does not show it."""
    yields = [step["yields"] for step in record.ranks[0]["steps"]]
    return yields[0] - batches_per_update(record) if len(yields) > 1 else 0.0
