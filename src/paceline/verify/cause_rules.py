"""Why the runs of `paceline verify` differ, from their records alone. Each cause is known by what only it leaves. Pure.

A is the run in question; B is one process that computes the same shards; C is one process that computes whole batches.

One difference brings about the next: other data give another loss, and another loss gives another gradient. So the
rules that apply are those of the quantity that differs first, in the first step that has a difference. They are tried
in order, and the first rule that finds its cause answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.verify.evidence import ERRORS, MEAN, PARALLEL, Cause, Evidence, linear_combination, scalar_multiple
from paceline.verify.rank_disagreement import different_layers
from paceline.verify.run_record import RunRecord

STATE = (
    "the script keeps state outside the model, its buffers and the optimizer (a counter, a running number, earlier "
    "examples) that differs between processes and affects training"
)
STATE_REMEDY = (
    "Make it from the numbers of all processes (run.mean, run.gather), count updates and not batches, and keep it in a "
    "buffer."
)


def find_cause(e: Evidence) -> Cause | None:
    """The cause; None where no known cause leaves such records."""
    computed: tuple[Callable[[Evidence], Cause | None], ...] = (
        _overflow, _not_in_the_model, _clipped_early, _scaled_gradients, _control_by_rank, _asks_for_the_rank,
        _depends_on_the_rank, _batch_norm_per_shard, _no_mean_of_parts, _gathered_examples, _randomness,
    )  # fmt: skip
    rules: dict[str, tuple[Callable[[Evidence], Cause | None], ...]] = {
        "initial weights": (_initialisation,),
        "examples": (_other_data,),
        "data": (_examples_from_elsewhere, _asks_for_the_rank, _other_data),
        "loss": computed,
        "gradient": computed,
        "learning rate": (_learning_rate,),
        "weights": (_changed_outside, _optimizer_settings, _asks_for_the_rank),
        "buffers": (_buffers,),
    }
    return next((cause for rule in rules[e.quantity] if (cause := rule(e)) is not None), None)


def _first_name(e: Evidence, quantity: str) -> str | None:
    """The name of the first tensor of this kind that differs."""
    return next(
        (d.name for d in (*e.by_cutting, *e.by_distributing) if d.quantity == quantity and d.step == e.step), None
    )


def _other_data(e: Evidence) -> Cause:
    reference = e.reference
    if e.quantity == "data" and (drawn := _evidence_of_drawing(e)) is not None:
        return Cause(
            "other-random-numbers",
            f"the same examples have other values, {drawn}. The data set, or what augments it, draws from a generator "
            "that is not keyed by the example",
            "Draw from torch's, NumPy's or Python's global generators, which the loader seeds for each example.",
            shown_by=(e.without_dropout, reference, *([e.again_whole] if e.again_whole is not None else [])),
        )
    return _overlapping_examples(e)


def _overlapping_examples(e: Evidence) -> Cause:
    ours, theirs = e.without_dropout.example_counts(e.step, "data"), e.reference.example_counts(e.step, "data")
    return Cause(
        "examples-overlap-or-miss",
        "the ranks together do not compute the batch that one process computes: "
        f"{(ours - theirs).total()} of its {ours.total()} examples are others, or the same ones again, and "
        f"{(theirs - ours).total()} are missing",
        "Give run.loader the whole data set and one order, alike on every rank: it cuts each batch itself.",
        shown_by=(e.without_dropout, e.reference),
    )


def _examples_from_elsewhere(e: Evidence) -> Cause | None:
    """Other examples than those of one process: most of them are, to the bit, examples that one process has in another
    place. So nothing was drawn for them."""
    ours, theirs = e.without_dropout.example_digests(e.step), e.reference.example_digests(e.step)
    known = {value for step in range(e.reference.steps) for value in e.reference.example_digests(step).values()}
    other = [value in known for key, value in ours.items() if theirs.get(key) != value]
    return _overlapping_examples(e) if other and 2 * sum(other) >= len(other) else None


def _evidence_of_drawing(e: Evidence) -> str | None:
    """What shows that examples of the same index differ by what was drawn for them, and not by what they are.

    Either one process reads other values when it is run again, or a part of each example (a label, an id) is the same.
    """
    values, theirs = e.without_dropout.example_digests(e.step), e.reference.example_digests(e.step)
    if e.again_whole is not None and e.again_whole.example_digests(e.step) != theirs:
        return "and when one process reads them again, others again"
    pairs = [(value.split(), theirs[key].split()) for key, value in values.items() if key in theirs]
    columns = list(zip(*(own for own, _ in pairs), strict=False))
    varying = {place for place, column in enumerate(columns) if len(set(column)) > 1}
    other = [(own, their) for own, their in pairs if own != their]
    kept = [any(own[i] == their[i] for i in varying if i < min(len(own), len(their))) for own, their in other]
    if kept and sum(kept) > len(kept) / 2:
        return f"{len(other)} of {len(pairs)}, of which a part that tells them apart (a label, say) is as it was"
    return None


def _initialisation(e: Evidence) -> Cause:
    name = _first_name(e, "initial weights")
    return Cause(
        "initialisation-by-rank",
        f"{name} begins with other values than with one process: the initialisation depends on the rank, or on the "
        "number of processes",
        "Initialise alike on every rank and for every number of processes: paceline.start seeds the generators.",
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
            + (
                f", as there are {e.shard_count} processes"
                if abs(factor - e.shard_count) < 1e-6 * e.shard_count
                else ""
            ),
            "The global batch does not grow with the processes: leave the learning rate as it is. (To grow both, see "
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
        "the learning rate follows another course than with one process"
        + (f": the scheduler moves once for each {' or '.join(moves)}, not for each update" if moves else ""),
        "Prepare the scheduler: run.step then moves it once per update. Count its steps in updates (loader.steps).",
        shown_by=(e.without_dropout, reference),
    )


def _common_factor(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float | None:
    """The factor by which one learning rate is larger than in one process, in every step.

    It is the rate of a group of parameters, or of one of several optimizers. Each other rate must be larger by a
    constant factor too, or equal. None where there is no such factor.
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
    """Whether `ours` runs along the course of `theirs`, so many times as fast."""
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
        "otherwise with several processes than with one"
        if name in ours & theirs
        else ("with several processes and not with one" if name in ours else "with one process only")
    )
    return Cause(
        "changed-outside",
        f"{name} is changed between two steps, outside the optimizer, {where}",
        "Make the change alike on any number of processes, or in the optimizer.",
        name,
        (e.subject, e.reference),
    )


def _buffers(e: Evidence) -> Cause:
    name = _first_name(e, "buffers")
    return Cause(
        "buffer-not-synchronised",
        f"the buffer {name} is alike on the ranks, and not that of one process: it is updated from a part of the batch",
        "Combine what it is updated with: run.sum of the sum and of the count, or run.mean.",
        name,
        e.compared,
    )


def _overflow(e: Evidence) -> Cause | None:
    for ours, theirs in ((e.without_dropout, e.whole_batches), (e.subject, e.same_shards)):
        if theirs is None or theirs.not_finite(e.step) or not (names := ours.not_finite(e.step)):
            continue
        bad = sorted({shard for (shard, *_), loss in ours.shard_losses(e.step).items() if not abs(loss) < float("inf")})
        where = f" The loss of shard {', '.join(map(str, bad))} alone is not finite" if bad else ""
        return overflow(f"the gradient of {names[0]}", theirs, where, names[0], ours)
    return None


def overflow(what: str, reference: RunRecord, where: str = "", name: str | None = None, *ours: RunRecord) -> Cause:
    """The cause where a number is not finite.

    Args:
        reference: a run of one process whose numbers are finite.
    """
    return Cause(
        "overflow-on-some-ranks",
        f"{what} is not finite, where one process's is." + where,
        "Numbers leave the range on some ranks only: compute what overflows in fp32 (with autocast off around it), "
        "or take bf16.",
        name,
        (*ours, reference),
    )


def _not_in_the_model(e: Evidence) -> Cause | None:
    """A tensor that is trained and is in no model: its values differ between ranks, or from those of one process."""
    records = [*e.subject.step_records(e.step), *e.reference.step_records(e.step)]
    for key in records[0]["strangers"]:
        if len({record["strangers"].get(key) for record in records}) > 1:
            shape = key.partition("of shape ")[2]
            return Cause(
                "not-in-the-model",
                f"the loss depends on a tensor of shape {shape} that is trained and is in no prepared model: it has "
                "other values on the ranks, since its gradients are not combined over the processes",
                "Make it a parameter of a module, and prepare that: run.prepare(model, criterion, optimizer).",
                shown_by=(e.subject, e.reference),
            )
    return None


def _clipped_early(e: Evidence) -> Cause | None:
    early = sum(record["clipped_early"] for record in e.without_dropout.step_records(e.step))
    hooked = [name for name in e.reference.ranks[0]["hooked"] if e.by_cutting]
    if not early and not hooked:
        return None
    how = (
        f"gradients are clipped {early} times in a step while its last micro-batch is still to come"
        if early
        else f"a hook on the gradient of {hooked[0]} acts on each shard's part of it"
    )
    return Cause(
        "clipped-early",
        f"{how}: before they are whole and combined over the processes",
        "run.step(optimizer, max_grad_norm=...) clips at the right time; or clip after the last run.backward of the "
        "global batch, where .grad is the mean over it.",
        hooked[0] if hooked and not early else None,
        (e.without_dropout, e.reference),
    )


def _scaled_gradients(e: Evidence) -> Cause | None:
    """Every gradient is the same multiple of that of one process."""
    n = e.shard_count
    for ours, theirs, cut in (
        (e.without_dropout, e.whole_batches, True),
        (e.subject, e.same_shards, False),
        (e.subject, e.told_alone, False),
    ):
        if theirs is None:
            continue
        gradients = ours.gradients(e.step, e.update), theirs.gradients(e.step, e.update)
        ratio = scalar_multiple(*gradients, e.gradient_noise)
        if ratio is None or abs(ratio - 1) < PARALLEL:
            continue
        size = f"{n}" if abs(ratio / n - 1) < 0.02 else f"1/{n}" if abs(ratio * n - 1) < 0.02 else f"{ratio:.4g}"
        every = f"every gradient is {size} times that of one process"
        if theirs is e.told_alone:
            every = f"every gradient is {size} times as large as where each process is told that it is alone"
        if cut and not e.by_distributing and e.same_shards is not None:
            pieces = len({tuple(place) for record in ours.step_records(e.step) for *place, _ in record["ids"]})
            if not any(abs(ratio * k - 1) < 0.02 or abs(ratio / k - 1) < 0.02 for k in (n, pieces)):
                continue  # gradients that are nearly parallel
            return _sum_or_mean("mean-for-sum" if ratio > 1 else "sum-for-mean", every, e, (ours, theirs))
        if not any(abs(ratio / float(n) ** power - 1) < 0.02 for power in (1, -1, 0.5, -0.5, 2, -2)):
            continue
        return Cause(
            "scaled-by-processes",
            every
            + (
                ", and not where one process computes the same shards"
                if cut and e.same_shards and e.by_distributing
                else ""
            )
            + ": the loss or the gradient is "
            + ("multiplied" if ratio > 1 else "divided")
            + " by the number of processes",
            "Paceline weighs each shard's loss by its examples: take the factor out of the script.",
            shown_by=(ours, theirs, *([e.same_shards] if cut and e.same_shards is not None else [])),
        )
    return None


def _control_by_rank(e: Evidence) -> Cause | None:
    """The shards and the weights are the same, no random numbers are drawn, and still the results differ."""
    if not e.by_distributing or e.same_shards is None or (e.subject.drew and not e.by_cutting and not e.noisy):
        return None
    if e.told_alone is not None and not e.by_asking and e.by_cutting and e.whole_batches is not None:
        return _depends_on_the_rank(e) or _state_outside(e)
    path = different_layers(dict(enumerate(e.subject.called_layers(e.step))))
    if path is not None:
        return replace(path, shown_by=(e.subject,))
    ours, theirs = e.subject.shard_losses(e.step), e.same_shards.shard_losses(e.step)
    tolerance = next((d.tolerance for d in e.by_distributing if d.quantity == "loss"), 0.0) * e.shard_count
    bad = sorted({key[0] for key in ours.keys() & theirs.keys() if not abs(ours[key] - theirs[key]) <= tolerance})
    which = (
        f"the loss of shard {', '.join(map(str, bad))} is another than where one process computes the same shard"
        if bad
        else "one process that computes the same shards has other gradients"
    )
    return Cause(
        "control-by-rank",
        f"{which}: something between the data and the gradient depends on the rank or on the number of processes",
        "Let every rank do the same: nothing in the model or the loss may ask for the rank or the number of processes.",
        shown_by=(e.subject, e.same_shards),
    )


def _batch_norm_per_shard(e: Evidence) -> Cause | None:
    record = e.subject.ranks[0]
    if not (e.by_cutting and record["normalised"] and record["batch_norm"] == "shard"):
        return None
    return Cause(
        "batch-norm-per-shard",
        f"batch norm ({record['norms'][0]}) takes its statistics from each shard alone (batch_norm='shard')",
        "Leave out batch_norm='shard': 'global' takes them over the whole batch.",
        shown_by=(e.subject, e.without_dropout, e.reference),
    )


def _no_mean_of_parts(e: Evidence) -> Cause | None:
    """B is as A, and both differ from C: cutting the batch makes the difference."""
    if e.whole_batches is None or not e.by_cutting or e.by_distributing or e.part_gradients is None:
        return None
    found = linear_combination(e.whole_batches.gradients(e.step, e.update), e.part_gradients, e.gradient_noise)
    if found is not None and e.counted:
        words = "what the parts of a batch give as sums do not add up to the whole's"
        return _sum_or_mean("mean-for-sum", words, e, (e.without_dropout, e.whole_batches))
    if (odd := _odd_shards(e)) is not None:
        return odd
    if found is not None and min(found[0]) > MEAN:
        return _unequal_weights(e, *found)
    return _in_batch_loss(
        e,
        "the whole batch's gradient is no combination of its parts' gradients: the loss or a layer compares the "
        "examples of a batch with each other (or pads them to the longest), and sees those of its own part only",
    )


def _odd_shards(e: Evidence) -> Cause | None:
    """Losses over gathered examples, each of which is the whole batch's loss: the shards whose gradient differs."""
    if e.whole_batches is None or e.part_gradients is None or e.same_shards is not None or not e.subject.gathers:
        return None
    whole, total = e.whole_batches.gradients(e.step, e.update), sum(e.part_examples)
    bad = []
    for shard, (part, count) in enumerate(zip(e.part_gradients, e.part_examples, strict=False)):
        apart = [(part[n] * total / count - whole[n]).square().sum() for n in whole if n in part] if count else []
        if apart and float(sum(apart)) ** 0.5 > 3 * e.gradient_noise:
            bad.append(str(shard))
    if not 0 < len(bad) < len(e.part_gradients):
        return None
    return Cause(
        "control-by-rank",
        "the losses are of examples that are gathered from all processes, and the whole batch's gradient is that of "
        f"each but shard {', '.join(bad)}: its process adds something to the loss, or leaves it out",
        "Let every rank do the same: nothing in the model or the loss may ask for the rank.",
        shown_by=(e.without_dropout, e.whole_batches, *e.part_runs),
    )


def _in_batch_loss(e: Evidence, evidence: str) -> Cause:
    remedy = "Gather what is compared: run.gather(features), which is differentiable."
    return Cause("in-batch-loss", evidence, remedy, shown_by=(e.without_dropout, e.reference, *e.part_runs))


def _depends_on_the_rank(e: Evidence) -> Cause | None:
    """The same shards, each computed by another rank, give another result."""
    if not e.by_rotating:
        return None
    return Cause(
        "control-by-rank",
        "where each rank computes the shard of another one, the batch's "
        f"{e.by_rotating[0].quantity} is another: something between the data and the gradient depends on the rank",
        "Let every rank do the same: nothing in the model or the loss may ask for the rank.",
        shown_by=(e.without_dropout, *e.rotated_runs),
    )


def _gathered_examples(e: Evidence) -> Cause | None:
    if not e.by_cutting or not e.subject.gathers:
        return None
    return _in_batch_loss(
        e,
        "the loss gathers examples of all ranks (run.gather), and its gradient is still not that of the whole batch: "
        "what is compared, or the gradient that goes back through it, is that of each rank's own part in some place",
    )


def _unequal_weights(e: Evidence, shares: Sequence[float], error: float) -> Cause:
    """The whole batch's gradient is that of its parts, with other weights than their numbers of examples.

    Args:
        shares: x_i where the whole's gradient is the sum of x_i times the gradient of part i, weighed by its examples.
        error: the standard error of the mean of x.
    """
    examples, total = e.part_examples, sum(e.part_examples)
    by_number = [share * count / total for share, count in zip(shares, examples, strict=False)]
    if len(by_number) == len(shares) and all(abs(factor - 1) < 0.02 for factor in by_number):
        words = "the whole batch's gradient is that of its parts, not weighed by examples"
        return _sum_or_mean("sum-for-mean", words, e, (e.without_dropout, e.reference))
    if (power := _power_of_size(shares, examples)) is not None:
        return _weighed_by_size(e, power)
    if abs(sum(by_number) - 1) > max(MEAN, ERRORS * error):
        return _in_batch_loss(
            e,
            f"the whole batch's gradient is that of its parts times numbers that add up to {sum(by_number):.3g}, not "
            "to 1 as those of means do: each part is divided, or weighed, by something that is computed from its own "
            "examples (a norm, a variance, a maximum)",
        )
    return Cause(
        "mean-of-means",
        "the whole batch's gradient is that of its parts with other weights ("
        + ", ".join(f"{share:.3g}" for share in shares)
        + " times those by examples): the loss averages over counts that differ between the parts (such as tokens)",
        "Say over how many: paceline.Total(sum, count), or run.backward(loss, count=...).",
        shown_by=(e.without_dropout, e.reference, *e.part_runs),
    )


def _power_of_size(shares: Sequence[float], examples: Sequence[int]) -> float | None:
    """p where a part of k of the batch's n examples has to be taken (n / k)**p times: the script weighs it by k**p.

    None where no such p explains the shares.
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
        f"a part of the batch counts by how many examples it has{how} once more: the script divides by, or multiplies "
        "with, the size of what it is given, and Paceline weighs each part by its examples already",
        "Take the factor out: a mean over the examples that are given is enough; or paceline.Total(sum, count).",
        shown_by=(e.without_dropout, e.reference, *e.part_runs),
    )


def _sum_or_mean(kind: str, evidence: str, e: Evidence, runs: Sequence[RunRecord]) -> Cause:
    what = "a sum over the examples is taken for their mean" if kind == "sum-for-mean" else "a mean is taken for a sum"
    alone = e.same_shards is not None and not e.by_distributing
    where = ", also where one process computes the shards" if alone else ""
    return Cause(
        kind,
        f"{evidence}{where}: {what}",
        "Return a mean, or say what it is: paceline.Total(sum, count), run.backward(total=..., count=...).",
        shown_by=(*runs, *e.part_runs, *([e.same_shards] if e.same_shards is not None and alone else [])),
    )


def _state_outside(e: Evidence) -> Cause:
    return Cause(
        "state-outside",
        STATE,
        STATE_REMEDY,
        shown_by=tuple(run for run in (e.subject, e.whole_batches, e.told_alone, e.same_shards) if run is not None),
    )


def _asks_for_the_rank(e: Evidence) -> Cause | None:
    """The same processes, shards and weights give another result when each process is told that it is the only one."""
    if (
        e.told_alone is None
        or not e.by_asking
        or (e.same_shards is not None and e.subject.drew and not e.by_cutting and not e.noisy)
    ):
        return None
    quantity = (
        "other numbers are drawn" if e.by_asking[0].quantity == "data" else f"the {e.by_asking[0].quantity} is another"
    )
    return Cause(
        "control-by-rank",
        f"where every process is told that it is the only one, {quantity}: the script behaves differently depending on "
        "the rank or on the number of processes",
        "Let every rank do the same: nothing in the data, the model or the loss may ask for the rank or the number of "
        "processes.",
        e.by_asking[0].name,
        (e.subject, e.told_alone),
    )


def _optimizer_settings(e: Evidence) -> Cause | None:
    """The optimizers' settings differ, beside the learning rate."""
    for step in range(min(e.step + 1, e.subject.steps, e.reference.steps)):
        for mine, theirs in zip(e.subject.optimizer_options(step), e.reference.optimizer_options(step), strict=False):
            for key in mine.keys() & theirs.keys() - {"lr", "initial_lr"}:
                if mine[key] != theirs[key]:
                    return Cause(
                        "optimizer-settings",
                        f"the optimizer's {key} is {mine[key]} with several processes and {theirs[key]} with one",
                        "Set the optimizer alike on any number of processes: the global batch does not grow with them.",
                        shown_by=(e.subject, e.reference),
                    )
    return None


def _randomness(e: Evidence) -> Cause | None:
    if e.subject.drew and e.by_distributing and not e.by_cutting and not e.noisy and e.same_shards is not None:
        return Cause(
            "other-random-numbers",
            "the runs are the same with dropout off, and differ with it on: the model draws other numbers than one "
            "process that computes the same shards",
            "Draw from torch's default generator, which is seeded for each shard of each step.",
            shown_by=tuple(
                run for run in (e.subject, e.same_shards, e.without_dropout, e.whole_batches) if run is not None
            ),
        )
    return None
