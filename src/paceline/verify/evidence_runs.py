"""Make further runs when something differs, to gather evidence for the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.verify.answer import claim_without
from paceline.verify.comparison import COMPUTED, Comparison
from paceline.verify.differences import differences_computed
from paceline.verify.evidence import Evidence
from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import Difference, norm
from paceline.verify.traced_runs import FaultLocator


def gather_evidence(
    c: Comparison, by_splitting: Sequence[Difference], by_distributing: Sequence[Difference]
) -> tuple[Evidence, FaultLocator]:
    """Gather the evidence for these differences. Also return the FaultLocator, which has made the traced runs."""
    assert c.without_dropout is not None or not by_splitting
    plain, whole, step = c.without_dropout or c.subject, c.whole_batches, (by_splitting or by_distributing)[0].step
    others = (c.same_shards, whole, c.again_whole)
    known = Evidence(c.subject, plain, *others, by_splitting, by_distributing, c.shard_count, rank_0_of_1=c.rank_0_of_1)
    if c.rank_0_of_1 is not None:
        known = replace(known, by_rank_queries=by_distributing)
    dropout_off = bool(by_splitting) and plain is not c.subject
    locator = FaultLocator(c.runs, c.subject, whole if by_splitting else None, dropout_off=dropout_off)
    known = locator.add_rank_0_of_1(known, c.tolerances)
    if whole is None or not by_splitting or by_splitting[0].quantity not in COMPUTED:
        return known, locator
    update = _first_update(c, plain, whole, step)
    gradients = whole.gradients(step, update)
    known = replace(known, update=update, gradient_noise=c.tolerances.noise(gradients, gradients))
    if by_distributing and known.rank_0_of_1 is not None and not known.by_rank_queries:
        # The script read rank or world size before verify replaced the reported values, or it keeps state.
        return _with_rotated_shards(c, known, plain, step), locator
    if by_distributing or known.by_rank_queries:
        return known, locator
    in_sequence = c.in_one_process == c.runs.shards_in_sequence(c.shard_count)
    if update and in_sequence:  # all shards are computed before the first update
        known = replace(known, same_shards=None)
    if c.same_shards is None or not in_sequence or update:
        return _with_part_gradients(c, known, plain, step), locator
    parts, why = (
        c.runs.run_single_process("B0", c.in_one_process, dropout_off=True) if c.subject.drew else (c.same_shards, None)
    )
    if parts is None:
        c.notes.append(claim_without(f"the shards could not be computed in one process with dropout off: {why}", "B0"))
    if parts is None or parts.steps <= step:
        return known, locator
    known = replace(
        known,
        part_gradients=parts.gradients_by_yield(step),
        part_examples=parts.examples_by_yield(step),
        counted=bool(parts.step_records(step)[0]["counted"]),
        part_runs=(parts,),
    )
    return known, locator


def _first_update(c: Comparison, plain: RunRecord, whole: RunRecord, step: int) -> int:
    """The first update of the step with different gradients."""
    for update in range(min(plain.updates(step), whole.updates(step))):
        ours, theirs = plain.gradients(step, update), whole.gradients(step, update)
        for name in ours.keys() & theirs.keys():
            error = norm(ours[name] - theirs[name]) if ours[name].shape == theirs[name].shape else 0.0
            if not error <= c.tolerances.gradient(name, theirs):
                return update
    return 0


def _with_part_gradients(c: Comparison, known: Evidence, plain: RunRecord, step: int) -> Evidence:
    """Add the gradient of each part of the batch to the evidence.

    Used if no single process can compute the shards in sequence. The subject run is repeated once per shard, with only
    this shard's loss. If there is no B, a further run rotates the shards over the ranks.
    """
    parts, processes, steps = [], c.runs.start.processes, step + 1
    part_runs: list[RunRecord] = []
    for shard in range(c.shard_count):
        failed = c.runs.run(f"P{shard}", dropout_off=True, only_shard=shard, only_update=known.update, steps=steps)
        part = c.runs.load(f"P{shard}", processes) if failed is None else None
        if part is None or part.steps <= step:
            return known
        parts.append(part.gradients(step, known.update))
        part_runs.append(part)
    sizes: dict[int, int] = dict.fromkeys(range(c.shard_count), 0)
    for record in plain.step_records(step):
        for _, shard, _, indices in record["ids"]:
            sizes[shard] += len(indices)
    counted = any(record["counted"] for record in plain.step_records(step))
    examples = list(sizes.values())
    known = replace(known, part_gradients=parts, part_examples=examples, counted=counted, part_runs=tuple(part_runs))
    return known if known.same_shards is not None else _with_rotated_shards(c, known, plain, step)


def _with_rotated_shards(c: Comparison, known: Evidence, plain: RunRecord, step: int) -> Evidence:
    """Add a run to the evidence in which each rank computes the next rank's shard.

    State that a process keeps from earlier examples moves with the shard. So any difference comes from the rank.
    """
    if c.runs.run("T", dropout_off=True, rotated_shards=True, steps=step + 1) is not None:
        return known
    rotated = c.runs.load("T", c.runs.start.processes)
    if rotated is None or rotated.steps <= step:
        return known
    found = list(differences_computed(rotated, plain, c.tolerances, step))
    return replace(known, by_rotating=found, rotated_runs=(rotated,))
