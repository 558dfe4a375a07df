"""Find causes in the subject run alone: its ranks disagree with each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.verify.evidence import Cause
from paceline.verify.run_record import RunRecord


def cause_from_failed_ranks(records: Sequence[Mapping[str, Any]]) -> Cause | None:
    """The cause of a failed run, if its ranks had called different layers."""
    return different_layers({record["rank"]: record["unfinished"] for record in records if record["unfinished"]})


def different_layers(called: Mapping[int, Sequence[str]]) -> Cause | None:
    """The cause if two ranks called different layers. called: rank -> the layers that it called."""
    first = next(iter(called), 0)
    other = next((rank for rank, names in called.items() if set(names) != set(called[first])), None)
    if other is None:
        return None
    ours, theirs = called[first], called[other]
    name = next(name for name in [*ours, *theirs] if (name in ours) != (name in theirs))
    yes, no = (first, other) if name in ours else (other, first)
    return Cause(
        "control-by-rank",
        f"rank {yes} calls the layer {name} and rank {no} does not: the path through the model depends on the rank",
        "Make every rank take the same path: remove the condition on the rank from the model or the loss.",
        name,
    )


def cause_from_ranks(run: RunRecord) -> tuple[int, str, Cause] | None:
    """(step, quantity, cause) of the first disagreement between ranks; None if they agree."""
    if len(run.ranks) < 2:
        return None
    late = [name for record in run.ranks for name in record["late"]]
    if late:
        cause = Cause(
            "registered-late",
            f"the parameter {late[0]} was added to the model after run.prepare, so its gradients are not combined over "
            "the processes",
            "Add it before run.prepare(model), or prepare the model again.",
            late[0],
        )
        return 0, "gradient", cause
    norms = tuple(f"{name}." for name in run.ranks[0]["norms"])  # Paceline keeps the statistics of batch norms equal
    for step in range(run.steps):
        if (unequal := _out_of_step(run, step)) is not None:
            return step, "examples", unequal
        found = _unlike(run, step, "start", norms)
        if found is not None:
            return step, _quantity_of(run, found), _before_the_step(run, step, found)
        if (differing := _in_the_step(run, step, norms)) is not None:
            return step, *differing
    unmade = next((step for step in range(run.steps) if not run.updates(step)), None)
    if unmade is not None:  # the strategy refused to return its state, although the weights are equal
        return _unlike_tensors(run, unmade) or (unmade, "optimizer state", _changed_state(run, unmade))
    return None


def _unlike_tensors(run: RunRecord, step: int) -> tuple[int, str, Cause] | None:
    """(step, quantity, cause) if some ranks' models have a tensor that others lack."""
    held = {r["rank"]: at["start"] for r, at in zip(run.ranks, run.step_records(step), strict=False) if at["start"]}
    names = dict.fromkeys(name for own in held.values() for name in own)
    name = next((name for name in names if any(name not in own for own in held.values())), None)
    if name is None:
        return None
    ranks = ", ".join(str(rank) for rank, own in held.items() if name in own)
    cause = Cause(
        "control-by-rank",
        f"at the start of step {step + 1}, the model contains {name} only on rank {ranks}",
        "Build and change the model in the same way on every rank.",
        name,
    )
    return step, _quantity_of(run, name), cause


def _changed_state(run: RunRecord, step: int) -> Cause:
    """The cause if weights and buffers are equal at the start of the step, but the optimizers' state is not."""
    kept = [(record["rank"], at["optimizer"]) for record, at in zip(run.ranks, run.step_records(step), strict=False)]
    digests = {rank: own for rank, own in kept if own is not None}
    entries = dict.fromkeys(entry for own in digests.values() for entry in own)
    differs = next((e for e in entries if len({own.get(e) for own in digests.values()}) > 1), None)
    if differs is None:
        return _changed_optimizer("the optimizer's state was changed between two updates on some ranks", None)
    name, _, key = differs.rpartition(" ")
    without = [str(rank) for rank, own in digests.items() if differs not in own]
    if without:
        ranks = f"rank {without[0]}" if len(without) == 1 else f"ranks {', '.join(without)}"
        what = f"the optimizer's {key} of {name} is missing on {ranks}: it was cleared between two updates"
    else:
        what = f"the optimizer's {key} of {name} was changed between two updates on some ranks"
    return _changed_optimizer(what, name)


def _changed_optimizer(what: str, name: str | None) -> Cause:
    return Cause(
        "changed-outside",
        f"{what}, outside the optimizer. The next update would differ between the ranks",
        "Clear or change the optimizer's state in the same way on every rank: move the change out of the branch "
        "that depends on the rank.",
        name,
    )


def _out_of_step(run: RunRecord, step: int) -> Cause | None:
    """The cause if the ranks are in different steps, or have got different numbers of batches in this step."""
    made = [(record["epoch"], record["step"], record["yields"]) for record in run.step_records(step)]
    if len(set(made)) < 2:
        return None
    each = "; ".join(f"rank {record['rank']}: {yields} in step {at + 1}" for record, (_, at, yields) in
                     zip(run.ranks, made, strict=False))  # fmt: skip
    return Cause(
        "control-by-rank",
        f"at the update, the ranks had taken different numbers of batches ({each}): some ranks skip or repeat a "
        "backward pass or a step",
        "Make the same calls for every batch on every rank. To leave out examples, give them zero weight.",
    )


def _unlike(run: RunRecord, step: int, key: str, norms: tuple[str, ...]) -> str | None:
    """The name of a tensor that differs between ranks; None if all are equal. norms: prefixes of names to skip."""
    values = [record[key] for record in run.step_records(step)]
    names = sorted((n for n in values[0] if not n.startswith(norms)), key=lambda n: n not in run.weights)
    return next((name for name in names if len({own[name] for own in values if name in own}) > 1), None)


def _quantity_of(run: RunRecord, name: str) -> str:
    return "weights" if name in run.weights else "buffers"


def _in_the_step(run: RunRecord, step: int, norms: tuple[str, ...]) -> tuple[str, Cause] | None:
    """(quantity, cause) if the ranks agreed when the step began but not when it ended.

    The cause is in the inputs of an update, or in a change between two updates.
    """
    records = run.step_records(step)
    rates = [record["lrs"] for record in records if record["lrs"]]
    if any(own != rates[0] for own in rates):
        each = ", ".join(f"{own[0]:.4g}" for own in rates if own)
        return "learning rate", Cause(
            "control-by-rank",
            f"the learning rate depends on the rank ({each} in the first update of ranks 0 to {len(rates) - 1})",
            "Set the same rate on every rank: use a prepared scheduler, or compute it from values of all ranks "
            "(run.mean).",
        )
    found = _unlike(run, step, "after", norms)
    if found is None:
        return None
    if found not in run.weights:
        return "buffers", _unsynchronised_buffer(found)
    between = [record["rank"] for record, at in zip(run.ranks, records, strict=False) if at["between"]]
    if 0 < len(between) < len(run.ranks):
        name = next(at["between"][0] for at in records if at["between"])
        return "weights", _changed(f"{name} was", f"on rank {', '.join(map(str, between))}", name)
    for update in range(min(len(record["gradient_digests"]) for record in records)):
        values = [record["gradient_digests"][update] for record in records]
        names = dict.fromkeys(name for own in values for name in own)
        bad = next((name for name in names if len({own.get(name) for own in values}) > 1), None)
        if bad is not None:
            return "gradient", Cause(
                "control-by-rank",
                f"the gradient of {bad} differs between ranks when the update is made, although gradients were "
                "combined: the script changed or dropped it after the backward, depending on the rank",
                "Change gradients in the same way on every rank.",
                bad,
            )
    return "weights", _changed(f"{found}, or the optimizer's state, was", "on some ranks", found)


def _unsynchronised_buffer(name: str) -> Cause:
    return Cause(
        "buffer-not-synchronised",
        f"the buffer {name} differs between the ranks: each rank updates it from its shard of the batch",
        "Combine its input over the processes: run.sum of the sum and of the count, or run.mean.",
        name,
    )


def _before_the_step(run: RunRecord, step: int, name: str) -> Cause:
    """The cause if the ranks differ when the step begins."""
    if name not in run.weights:
        return _unsynchronised_buffer(name)
    if not step:
        return Cause(
            "initialisation-by-rank",
            f"{name} differs between the ranks before the first step: it was set after run.prepare (which gives all "
            "ranks the weights of rank 0), with different values",
            "Initialise the model before run.prepare, or with the same values on every rank.",
            name,
        )
    outside = [
        record["rank"] for record, at in zip(run.ranks, run.step_records(step), strict=False) if name in at["outside"]
    ]
    where = f"rank {', '.join(map(str, outside))}" if outside else "some ranks"
    return _changed(f"{name} was", f"on {where}", name)


def _changed(what: str, where: str, name: str | None = None) -> Cause:
    return Cause(
        "changed-outside",
        f"{what} changed {where} between two updates, outside the optimizer, and the ranks have differed since",
        "Make the same change on every rank, or make it in the optimizer.",
        name,
    )
