"""Find the cause of a difference between runs of `paceline verify`, from their records alone. Pure.

A is the subject run, B is one process that computes the same shards, C is one process that computes whole batches.

Each rule detects one cause. One difference leads to the next: different data give a different loss, and a different
loss gives a different gradient. So only the first step with a difference counts, and only the rules for the first
quantity that differs are tried. The first rule that finds a cause gives the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.verify.evidence import ERRORS, MEAN, PARALLEL, Cause, Evidence, linear_combination, scalar_multiple
from paceline.verify.rank_disagreement import different_layers
from paceline.verify.run_record import RunRecord

STATE = (
    "the script keeps state outside the model, its buffers and the optimizer (a counter, a running mean, earlier "
    "examples) that differs between processes and affects training"
)
STATE_REMEDY = (
    "Compute it from the values of all processes (run.mean, run.gather), count updates instead of batches, and keep it "
    "in a buffer."
)


def find_cause(e: Evidence) -> Cause | None:
    """Find the cause; None if no known cause leaves such records."""
    computed: tuple[Callable[[Evidence], Cause | None], ...] = (
        _overflow, _not_in_the_model, _clipped_early, _scaled_gradients, _control_by_rank, _behaves_by_rank,
        _depends_on_the_rank, _batch_norm_per_shard, _no_mean_of_parts, _gathered_examples, _randomness,
    )  # fmt: skip
    rules: dict[str, tuple[Callable[[Evidence], Cause | None], ...]] = {
        "initial weights": (_initialisation,),
        "examples": (_other_data,),
        "data": (_examples_from_elsewhere, _behaves_by_rank, _other_data),
        "loss": computed,
        "gradient": computed,
        "learning rate": (_learning_rate,),
        "weights": (_changed_outside, _optimizer_settings, _behaves_by_rank),
        "buffers": (_buffers,),
    }
    return next((cause for rule in rules[e.quantity] if (cause := rule(e)) is not None), None)


def _first_name(e: Evidence, quantity: str) -> str | None:
    """The name of the first tensor of this kind that differs."""
    return next(
        (d.name for d in (*e.by_splitting, *e.by_distributing) if d.quantity == quantity and d.step == e.step), None
    )


def _other_data(e: Evidence) -> Cause:
    reference = e.reference
    if e.quantity == "data" and (drawn := _evidence_of_drawing(e)) is not None:
        return Cause(
            "other-random-numbers",
            f"the same examples have different values ({drawn}). The data set, or its augmentation, draws from a "
            "generator that is not keyed by the example",
            "Draw from the global generators of torch, NumPy or Python: the loader seeds them for each example.",
            shown_by=(e.without_dropout, reference, *([e.again_whole] if e.again_whole is not None else [])),
        )
    return _overlapping_examples(e)


def _overlapping_examples(e: Evidence) -> Cause:
    ours, theirs = e.without_dropout.example_counts(e.step, "data"), e.reference.example_counts(e.step, "data")
    return Cause(
        "examples-overlap-or-miss",
        "the ranks together do not compute the batch that one process computes: "
        f"{(ours - theirs).total()} of its {ours.total()} examples are different or repeated, and "
        f"{(theirs - ours).total()} are missing",
        "Pass the whole data set to run.loader, in the same order on every rank: the loader shards each batch itself.",
        shown_by=(e.without_dropout, e.reference),
    )


def _examples_from_elsewhere(e: Evidence) -> Cause | None:
    """The cause if the ranks read the wrong examples: most examples that differ are bitwise equal to examples that one
    process reads at a different position."""
    ours, theirs = e.without_dropout.example_digests(e.step), e.reference.example_digests(e.step)
    known = {value for step in range(e.reference.steps) for value in e.reference.example_digests(step).values()}
    other = [value in known for key, value in ours.items() if theirs.get(key) != value]
    return _overlapping_examples(e) if other and 2 * sum(other) >= len(other) else None


def _evidence_of_drawing(e: Evidence) -> str | None:
    """Describe the evidence that examples with the same index differ only by random draws; None without evidence.

    Either one process reads different values when it runs again, or most of the examples that differ share a part that
    identifies them (a label, an id).
    """
    values, theirs = e.without_dropout.example_digests(e.step), e.reference.example_digests(e.step)
    if e.again_whole is not None and e.again_whole.example_digests(e.step) != theirs:
        return "one process that reads them again gets different values too"
    pairs = [(value.split(), theirs[key].split()) for key, value in values.items() if key in theirs]
    columns = list(zip(*(own for own, _ in pairs), strict=False))
    varying = {place for place, column in enumerate(columns) if len(set(column)) > 1}
    other = [(own, their) for own, their in pairs if own != their]
    kept = [any(own[i] == their[i] for i in varying if i < min(len(own), len(their))) for own, their in other]
    if kept and sum(kept) > len(kept) / 2:
        return (
            f"{len(other)} of {len(pairs)}, although a part that identifies the example, such as a label, is unchanged"
        )
    return None


def _initialisation(e: Evidence) -> Cause:
    name = _first_name(e, "initial weights")
    return Cause(
        "initialisation-by-rank",
        f"{name} starts with different values than on one process: the initialisation depends on the rank or on the "
        "number of processes",
        "Initialise in the same way on every rank and for any number of processes: paceline.start seeds the "
        "generators.",
        name,
        e.compared,
    )


def _learning_rate(e: Evidence) -> Cause | None:
    reference = e.reference
    ours = [e.without_dropout.learning_rates(step) for step in range(e.without_dropout.steps)]
    theirs = [reference.learning_rates(step) for step in range(reference.steps)]
    factor = _common_factor(ours, theirs)
    if factor is not None:
        return Cause(
            "learning-rate-scaled",
            f"the learning rate is {factor:.4g} times that of one process in every step"
            + (f", with {e.shard_count} processes" if abs(factor - e.shard_count) < 1e-6 * e.shard_count else ""),
            "The global batch does not grow with the processes: do not scale the learning rate. (To grow both, see "
            "paceline.scale_lr.)",
            shown_by=(e.without_dropout, reference),
        )
    yields = e.without_dropout.yields(0) / max(reference.yields(0), 1)
    moves = [
        name
        for name, times in (("process", float(e.shard_count)), ("micro-batch", yields))
        if _follows_course(ours, theirs, times)
    ]
    return Cause(
        "scheduler-steps",
        "the learning rate follows a different course than on one process"
        + (f": the scheduler steps once per {' or '.join(moves)}, not once per update" if moves else ""),
        "Prepare the scheduler: run.step then steps it once per update. Give its length in updates (loader.steps).",
        shown_by=(e.without_dropout, reference),
    )


def _common_factor(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float | None:
    """The constant factor, other than 1, between a learning rate and that of one process; None if there is none.

    There is a learning rate for each group of parameters of each optimizer. For every rate, the factor must be the same
    in all steps, but it may be 1. Returns the first factor other than 1.
    """
    ratios: dict[int, list[float]] = {}
    for x, y in zip(ours, theirs, strict=False):
        for place, (a, b) in enumerate(zip(x, y, strict=False)):
            if b:
                ratios.setdefault(place, []).append(a / b)
    if any(abs(ratio - found[0]) > 1e-6 * found[0] for found in ratios.values() for ratio in found):
        return None
    return next((found[0] for found in ratios.values() if abs(found[0] - 1) > 1e-6), None)


def _follows_course(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], times: float) -> bool:
    """Whether the learning rates `ours` follow the schedule of `theirs`, but faster by the factor `times`."""
    pairs = [
        (x, theirs[round(k * times)])
        for k, x in enumerate(ours)
        if k and (k * times) % 1 == 0 and k * times < len(theirs)
    ]
    return (
        times != 1
        and bool(pairs)
        and all(abs(a - b) <= 1e-6 * abs(b) for x, y in pairs for a, b in zip(x, y, strict=False))
    )


def _changed_outside(e: Evidence) -> Cause | None:
    name = _first_name(e, "weights")
    ours = {n for step in range(e.subject.steps) for n in e.subject.changed_outside(step)}
    theirs = {n for step in range(e.reference.steps) for n in e.reference.changed_outside(step)}
    if name not in ours | theirs:
        return None
    where = (
        "differently on several processes than on one"
        if name in ours & theirs
        else ("on several processes but not on one" if name in ours else "on one process only")
    )
    return Cause(
        "changed-outside",
        f"{name} is changed between two steps, outside the optimizer, {where}",
        "Make the same change for any number of processes, or make it in the optimizer.",
        name,
        (e.subject, e.reference),
    )


def _buffers(e: Evidence) -> Cause:
    name = _first_name(e, "buffers")
    return Cause(
        "buffer-not-synchronised",
        f"the buffer {name} is equal on all ranks, but differs from that of one process: it is updated from a "
        "single shard",
        "Combine its input over the processes: run.sum of the sum and of the count, or run.mean.",
        name,
        e.compared,
    )


def _overflow(e: Evidence) -> Cause | None:
    for ours, theirs in ((e.without_dropout, e.whole_batches), (e.subject, e.same_shards)):
        if theirs is None or theirs.not_finite(e.step) or not (names := ours.not_finite(e.step)):
            continue
        bad = sorted({shard for (shard, *_), loss in ours.shard_losses(e.step).items() if not abs(loss) < float("inf")})
        where = f". Only the loss of shard {', '.join(map(str, bad))} is not finite" if bad else ""
        return overflow(f"the gradient of {names[0]}", theirs, where, names[0], ours)
    return None


def overflow(what: str, reference: RunRecord, where: str = "", name: str | None = None, *ours: RunRecord) -> Cause:
    """The cause if a number is not finite.

    Args:
        reference: a run of one process with finite numbers.
    """
    return Cause(
        "overflow-on-some-ranks",
        f"{what} is not finite, but it is finite in one process" + where,
        "Numbers overflow on some ranks only. Compute the operation that overflows in fp32 (torch.autocast(..., "
        "enabled=False) around it), or use bf16.",
        name,
        (*ours, reference),
    )


def _not_in_the_model(e: Evidence) -> Cause | None:
    """The cause if a trained tensor is in no model, and differs between ranks or from one process."""
    records = [*e.subject.step_records(e.step), *e.reference.step_records(e.step)]
    for key in records[0]["unowned_tensors"]:
        if len({record["unowned_tensors"].get(key) for record in records}) > 1:
            shape = key.partition("of shape ")[2]
            return Cause(
                "not-in-the-model",
                f"the loss depends on a tensor of shape {shape} that is trained but is in no prepared model: its "
                "gradients are not combined over the processes, so its values differ between the ranks",
                "Make it a parameter of a module, and prepare that module: run.prepare(model, criterion, optimizer).",
                shown_by=(e.subject, e.reference),
            )
    return None


def _clipped_early(e: Evidence) -> Cause | None:
    early = sum(record["clipped_early"] for record in e.without_dropout.step_records(e.step))
    hooked = [name for name in e.reference.ranks[0]["hooked"] if e.by_splitting]
    if not early and not hooked:
        return None
    how = (
        f"gradients are clipped {early} times in a step before its last micro-batch"
        if early
        else f"a hook on the gradient of {hooked[0]} changes each shard's gradient separately"
    )
    return Cause(
        "clipped-early",
        f"{how}, before the gradients are complete and combined over the processes",
        "run.step(optimizer, max_grad_norm=...) clips at the right time. Or clip after the last run.backward of the "
        "global batch: .grad is then the mean over it.",
        hooked[0] if hooked and not early else None,
        (e.without_dropout, e.reference),
    )


def _scaled_gradients(e: Evidence) -> Cause | None:
    """The cause if every gradient is the same multiple of the gradient of one process."""
    n = e.shard_count
    for ours, theirs, whole_batch in (
        (e.without_dropout, e.whole_batches, True),
        (e.subject, e.same_shards, False),
        (e.subject, e.rank_0_of_1, False),
    ):
        if theirs is None:
            continue
        gradients = ours.gradients(e.step, e.update), theirs.gradients(e.step, e.update)
        ratio = scalar_multiple(*gradients, e.gradient_noise)
        if ratio is None or abs(ratio - 1) < PARALLEL:
            continue
        size = f"{n}" if abs(ratio / n - 1) < 0.02 else f"1/{n}" if abs(ratio * n - 1) < 0.02 else f"{ratio:.4g}"
        every = f"every gradient is {size} times that of one process"
        if theirs is e.rank_0_of_1:
            every = f"every gradient is {size} times that of a run in which each process sees rank 0 of 1"
        if whole_batch and not e.by_distributing and e.same_shards is not None:
            pieces = len({tuple(place) for record in ours.step_records(e.step) for *place, _ in record["ids"]})
            if not any(abs(ratio * k - 1) < 0.02 or abs(ratio / k - 1) < 0.02 for k in (n, pieces)):
                continue  # no factor: the gradients are nearly parallel by chance
            return _sum_or_mean("mean-for-sum" if ratio > 1 else "sum-for-mean", every, e, (ours, theirs))
        if not any(abs(ratio / float(n) ** power - 1) < 0.02 for power in (1, -1, 0.5, -0.5, 2, -2)):
            continue
        return Cause(
            "scaled-by-processes",
            every
            + (
                ", but not if one process computes the same shards"
                if whole_batch and e.same_shards and e.by_distributing
                else ""
            )
            + ": the loss or the gradient is "
            + ("multiplied" if ratio > 1 else "divided")
            + " by the number of processes",
            "Remove the factor from the script: Paceline weights each shard's loss by its number of examples.",
            shown_by=(ours, theirs, *([e.same_shards] if whole_batch and e.same_shards is not None else [])),
        )
    return None


def _control_by_rank(e: Evidence) -> Cause | None:
    """The cause if the results differ although shards and weights are equal and no random numbers are drawn."""
    if not e.by_distributing or e.same_shards is None or (e.subject.drew and not e.by_splitting and not e.noisy):
        return None
    if e.rank_0_of_1 is not None and not e.by_rank_queries and e.by_splitting and e.whole_batches is not None:
        return _depends_on_the_rank(e) or _state_outside(e)
    path = different_layers(dict(enumerate(e.subject.called_layers(e.step))))
    if path is not None:
        return replace(path, shown_by=(e.subject,))
    ours, theirs = e.subject.shard_losses(e.step), e.same_shards.shard_losses(e.step)
    tolerance = next((d.tolerance for d in e.by_distributing if d.quantity == "loss"), 0.0) * e.shard_count
    bad = sorted({key[0] for key in ours.keys() & theirs.keys() if not abs(ours[key] - theirs[key]) <= tolerance})
    which = (
        f"the loss of shard {', '.join(map(str, bad))} differs from that of one process that computes the same shard"
        if bad
        else "one process that computes the same shards has different gradients"
    )
    return Cause(
        "control-by-rank",
        f"{which}: something between the data and the gradient depends on the rank or on the number of processes",
        "Make every rank do the same: remove the condition on rank or number of processes from the model or the loss.",
        shown_by=(e.subject, e.same_shards),
    )


def _batch_norm_per_shard(e: Evidence) -> Cause | None:
    record = e.subject.ranks[0]
    if not (e.by_splitting and record["normalised"] and record["batch_norm"] == "shard"):
        return None
    return Cause(
        "batch-norm-per-shard",
        f"batch norm ({record['norms'][0]}) uses the statistics of each shard separately (batch_norm='shard')",
        "Remove batch_norm='shard': the default, 'global', uses the statistics of the global batch.",
        shown_by=(e.subject, e.without_dropout, e.reference),
    )


def _no_mean_of_parts(e: Evidence) -> Cause | None:
    """The cause if A equals B and both differ from C: splitting the batch makes the difference."""
    if e.whole_batches is None or not e.by_splitting or e.by_distributing or e.part_gradients is None:
        return None
    found = linear_combination(e.whole_batches.gradients(e.step, e.update), e.part_gradients, e.gradient_noise)
    if found is not None and e.counted:
        words = "the sums over the parts of a batch do not add up to the sum over the whole batch"
        return _sum_or_mean("mean-for-sum", words, e, (e.without_dropout, e.whole_batches))
    if (odd := _odd_shards(e)) is not None:
        return odd
    if found is not None and min(found[0]) > MEAN:
        return _unequal_weights(e, *found)
    return _in_batch_loss(
        e,
        "the gradient of the whole batch is not a linear combination of its parts' gradients: the loss or a layer "
        "compares the examples of a batch with each other (or pads them to the longest), and each part contains "
        "only some of them",
    )


def _odd_shards(e: Evidence) -> Cause | None:
    """The cause if each shard's loss gathers the examples of the whole batch, but some shards' gradients differ."""
    if e.whole_batches is None or e.part_gradients is None or e.same_shards is not None or not e.subject.gathers:
        return None
    whole, total = e.whole_batches.gradients(e.step, e.update), sum(e.part_examples)
    bad = []
    for shard, (part, count) in enumerate(zip(e.part_gradients, e.part_examples, strict=False)):
        errors = [(part[n] * total / count - whole[n]).square().sum() for n in whole if n in part] if count else []
        if errors and float(sum(errors)) ** 0.5 > 3 * e.gradient_noise:
            bad.append(str(shard))
    if not 0 < len(bad) < len(e.part_gradients):
        return None
    return Cause(
        "control-by-rank",
        "the losses use examples gathered from all processes, and every shard has the gradient of the whole batch "
        f"except shard {', '.join(bad)}: its process adds something to the loss, or leaves something out",
        "Make every rank do the same: remove the condition on the rank from the model or the loss.",
        shown_by=(e.without_dropout, e.whole_batches, *e.part_runs),
    )


def _in_batch_loss(e: Evidence, evidence: str) -> Cause:
    remedy = "Gather the examples that the loss compares: run.gather(features), which is differentiable."
    return Cause("in-batch-loss", evidence, remedy, shown_by=(e.without_dropout, e.reference, *e.part_runs))


def _depends_on_the_rank(e: Evidence) -> Cause | None:
    """The cause if the same shards give different results when other ranks compute them."""
    if not e.by_rotating:
        return None
    return Cause(
        "control-by-rank",
        f"the {e.by_rotating[0].quantity} of the batch differs when each rank computes another rank's shard: something "
        "between the data and the gradient depends on the rank",
        "Make every rank do the same: remove the condition on the rank from the model or the loss.",
        shown_by=(e.without_dropout, *e.rotated_runs),
    )


def _gathered_examples(e: Evidence) -> Cause | None:
    if not e.by_splitting or not e.subject.gathers:
        return None
    return _in_batch_loss(
        e,
        "the loss gathers examples of all ranks (run.gather), but its gradient is not that of the whole batch: "
        "somewhere the compared values, or the gradient through them, still belong to a single rank's shard",
    )


def _unequal_weights(e: Evidence, shares: Sequence[float], error: float) -> Cause:
    """The cause if the gradient of the whole batch sums its parts' gradients with other weights than by examples.

    Args:
        shares: x_i for each part i. The gradient of the whole batch is the sum of x_i g_i. Each g_i is the gradient of
            part i, already weighted by its number of examples.
        error: the standard error of the mean of the shares.
    """
    examples, total = e.part_examples, sum(e.part_examples)
    by_number = [share * count / total for share, count in zip(shares, examples, strict=False)]
    if len(by_number) == len(shares) and all(abs(factor - 1) < 0.02 for factor in by_number):
        words = (
            "the gradient of the whole batch is the sum of its parts' gradients, not weighted by their numbers of "
            "examples"
        )
        return _sum_or_mean("sum-for-mean", words, e, (e.without_dropout, e.reference))
    if (power := _power_of_size(shares, examples)) is not None:
        return _weighed_by_size(e, power)
    if abs(sum(by_number) - 1) > max(MEAN, ERRORS * error):
        return _in_batch_loss(
            e,
            "the gradient of the whole batch is the sum of its parts' gradients times numbers that add up to "
            f"{sum(by_number):.3g}, not to 1 as for a mean: each part is divided, or weighted, by a value computed "
            "from its examples (a norm, a variance, a maximum)",
        )
    return Cause(
        "mean-of-means",
        "the gradient of the whole batch is a sum of its parts' gradients with the wrong weights ("
        + ", ".join(f"{share:.3g}" for share in shares)
        + " times the weights by number of examples): the loss averages over counts that differ between the parts "
        "(such as tokens)",
        "Pass the count: return paceline.Total(sum, count), or call run.backward(loss, count=...).",
        shown_by=(e.without_dropout, e.reference, *e.part_runs),
    )


def _power_of_size(shares: Sequence[float], examples: Sequence[int]) -> float | None:
    """The exponent p if the script weights a part of k examples by k**p; None if no p explains the shares.

    To undo this weight, the part's gradient must be multiplied by (n / k)**p, for a batch of n examples.
    """
    total = sum(examples)
    known = [
        (math.log(s), math.log(total / k)) for s, k in zip(shares, examples, strict=False) if s > 0 and 0 < k < total
    ]
    if len(known) < 2 or len(known) < len(shares):
        return None
    power = sum(y for y, _ in known) / sum(x for _, x in known)
    fits = all(abs(y - power * x) < 0.02 for y, x in known)
    return power if fits and abs(power) > 0.05 and abs(power * 2 - round(power * 2)) < 0.04 else None


def _weighed_by_size(e: Evidence, power: float | None = None) -> Cause:
    how = "" if power is None else f" (to the power of {power:.2g})"
    return Cause(
        "depends-on-shard-size",
        f"a part of the batch is weighted by its number of examples{how} twice: the script divides or multiplies by "
        "the size of its input, and Paceline already weights each part by its number of examples",
        "Remove the factor: return the mean over the examples of the batch, or paceline.Total(sum, count).",
        shown_by=(e.without_dropout, e.reference, *e.part_runs),
    )


def _sum_or_mean(kind: str, evidence: str, e: Evidence, runs: Sequence[RunRecord]) -> Cause:
    what = "a sum over the examples is passed as their mean" if kind == "sum-for-mean" else "a mean is passed as a sum"
    alone = e.same_shards is not None and not e.by_distributing
    where = ", even if one process computes the shards" if alone else ""
    return Cause(
        kind,
        f"{evidence}{where}: {what}",
        "Return a mean. Or pass the count: paceline.Total(sum, count), run.backward(total=..., count=...).",
        shown_by=(*runs, *e.part_runs, *([e.same_shards] if e.same_shards is not None and alone else [])),
    )


def _state_outside(e: Evidence) -> Cause:
    return Cause(
        "state-outside",
        STATE,
        STATE_REMEDY,
        shown_by=tuple(run for run in (e.subject, e.whole_batches, e.rank_0_of_1, e.same_shards) if run is not None),
    )


def _behaves_by_rank(e: Evidence) -> Cause | None:
    """The cause if the results differ when each process sees rank 0 of 1, with the same shards and weights."""
    if (
        e.rank_0_of_1 is None
        or not e.by_rank_queries
        or (e.same_shards is not None and e.subject.drew and not e.by_splitting and not e.noisy)
    ):
        return None
    quantity = (
        "different random numbers are drawn"
        if e.by_rank_queries[0].quantity == "data"
        else f"the {e.by_rank_queries[0].quantity} differs"
    )
    return Cause(
        "control-by-rank",
        f"when every process sees rank 0 of 1, {quantity}: the script behaves differently depending on rank or world "
        "size",
        "Make every rank do the same: remove the condition on rank or world size from the data, the model or the loss.",
        e.by_rank_queries[0].name,
        (e.subject, e.rank_0_of_1),
    )


def _optimizer_settings(e: Evidence) -> Cause | None:
    """The cause if a setting of an optimizer other than the learning rate differs."""
    for step in range(min(e.step + 1, e.subject.steps, e.reference.steps)):
        for mine, theirs in zip(e.subject.optimizer_options(step), e.reference.optimizer_options(step), strict=False):
            for key in mine.keys() & theirs.keys() - {"lr", "initial_lr"}:
                if mine[key] != theirs[key]:
                    return Cause(
                        "optimizer-settings",
                        f"the optimizer's {key} is {mine[key]} on several processes and {theirs[key]} on one",
                        "Use the same setting for any number of processes: the global batch does not grow with them.",
                        shown_by=(e.subject, e.reference),
                    )
    return None


def _randomness(e: Evidence) -> Cause | None:
    if e.subject.drew and e.by_distributing and not e.by_splitting and not e.noisy and e.same_shards is not None:
        return Cause(
            "other-random-numbers",
            "the runs are equal with dropout off and differ with it on: the model draws different random numbers "
            "than one process that computes the same shards",
            "Draw from torch's default generator: Paceline seeds it for each shard of each step.",
            shown_by=tuple(
                run for run in (e.subject, e.same_shards, e.without_dropout, e.whole_batches) if run is not None
            ),
        )
    return None
