"""Causes that the ranks of the run in question show by themselves: where they are no longer alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.verify.evidence import Cause
from paceline.verify.run_record import RunRecord


def cause_from_failed_ranks(records: Sequence[Mapping[str, Any]]) -> Cause | None:
    """Of a run that failed: the cause, if its ranks were in different layers."""
    return different_layers({record["rank"]: record["unfinished"] for record in records if record["unfinished"]})


def different_layers(called: Mapping[int, Sequence[str]]) -> Cause | None:
    """The cause where two ranks have called different layers. called: rank -> the layers that it has called."""
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
        "Let every rank take the same path: nothing in the model or the loss may ask for the rank.",
        name,
    )


def cause_from_ranks(run: RunRecord) -> tuple[int, str, Cause] | None:
    """(the step, the quantity, the cause) where the ranks are not alike; None where they are."""
    if len(run.ranks) < 2:
        return None
    late = [name for record in run.ranks for name in record["late"]]
    if late:
        cause = Cause(
            "registered-late",
            f"the parameter {late[0]} was added to the model after run.prepare, which does not know it: its gradients "
            "are not combined over the processes",
            "Add it before run.prepare(model), or prepare the model again.",
            late[0],
        )
        return 0, "gradient", cause
    norms = tuple(f"{name}." for name in run.ranks[0]["norms"])  # Paceline keeps theirs
    for step in range(run.steps):
        if (apart := _out_of_step(run, step)) is not None:
            return step, "examples", apart
        found = _unlike(run, step, "start", norms)
        if found is not None:
            return step, _quantity_of(run, found), _before_the_step(run, step, found)
        if (met := _in_the_step(run, step, norms)) is not None:
            return step, *met
    unmade = next((step for step in range(run.steps) if not run.updates(step)), None)
    if unmade is not None:  # the strategy would not say what the state is, and the weights are alike
        return _unlike_tensors(run, unmade) or (unmade, "optimizer state", _changed_state(run, unmade))
    return None


def _unlike_tensors(run: RunRecord, step: int) -> tuple[int, str, Cause] | None:
    """(the step, the quantity, the cause) where some ranks' models have a tensor that others have not."""
    held = {r["rank"]: at["start"] for r, at in zip(run.ranks, run.step_records(step), strict=False) if at["start"]}
    names = dict.fromkeys(name for own in held.values() for name in own)
    name = next((name for name in names if any(name not in own for own in held.values())), None)
    if name is None:
        return None
    ranks = ", ".join(str(rank) for rank, own in held.items() if name in own)
    cause = Cause(
        "control-by-rank",
        f"when step {step + 1} begins, only rank {ranks} has {name} in the model",
        "Build and change the model in the same way on every rank.",
        name,
    )
    return step, _quantity_of(run, name), cause


def _changed_state(run: RunRecord, step: int) -> Cause:
    """The cause where weights and buffers are alike when the step begins, and the optimizers' state is not."""
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
        what = f"the optimizer's {key} of {name} is missing on {ranks}: it was cleared there between two updates"
    else:
        what = f"the optimizer's {key} of {name} was changed between two updates on some ranks"
    return _changed_optimizer(what, name)


def _changed_optimizer(what: str, name: str | None) -> Cause:
    return Cause(
        "changed-outside",
        f"{what}, outside the optimizer, so the next update would differ between the ranks",
        "Clear or change the optimizer's state on every rank alike: take the change out of the branch on the rank.",
        name,
    )


def _out_of_step(run: RunRecord, step: int) -> Cause | None:
    """The cause where ranks have made unequally many steps or yields."""
    made = [(record["epoch"], record["step"], record["yields"]) for record in run.step_records(step)]
    if len(set(made)) < 2:
        return None
    each = "; ".join(f"rank {record['rank']}: {yields} of step {at + 1}" for record, (_, at, yields) in
                     zip(run.ranks, made, strict=False))  # fmt: skip
    return Cause(
        "control-by-rank",
        f"when the update was made, the ranks had taken unequally many batches ({each}): some leave out, or make, a "
        "backward or a step that others do not",
        "Let every rank make the same calls for every batch; leave examples out by weights that are zero.",
    )


def _unlike(run: RunRecord, step: int, key: str, norms: tuple[str, ...]) -> str | None:
    """The name of a tensor that has other values on some ranks."""
    values = [record[key] for record in run.step_records(step)]
    names = sorted((n for n in values[0] if not n.startswith(norms)), key=lambda n: n not in run.weights)
    return next((name for name in names if len({own[name] for own in values if name in own}) > 1), None)


def _quantity_of(run: RunRecord, name: str) -> str:
    return "weights" if name in run.weights else "buffers"


def _in_the_step(run: RunRecord, step: int, norms: tuple[str, ...]) -> tuple[str, Cause] | None:
    """(the quantity, the cause), where the ranks were alike when the step began and are not when it ends.

    The cause is in what an update is made of, or in a change between two updates.
    """
    records = run.step_records(step)
    rates = [record["lrs"] for record in records if record["lrs"]]
    if any(own != rates[0] for own in rates):
        each = ", ".join(f"{own[0]:.4g}" for own in rates if own)
        return "learning rate", Cause(
            "control-by-rank",
            f"the learning rate depends on the rank ({each} on the first update of ranks 0 to {len(rates) - 1})",
            "Set it alike on every rank: by a scheduler that is prepared, or from numbers of all ranks (run.mean).",
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
    for update in range(min(len(record["graded"]) for record in records)):
        values = [record["graded"][update] for record in records]
        names = dict.fromkeys(name for own in values for name in own)
        bad = next((name for name in names if len({own.get(name) for own in values}) > 1), None)
        if bad is not None:
            return "gradient", Cause(
                "control-by-rank",
                f"the gradient of {bad} is another on some ranks when the update is made, though they were combined: "
                "it was changed after the backward, or left out, as the rank says",
                "Change gradients alike on every rank.",
                bad,
            )
    return "weights", _changed(f"{found}, or the optimizer's state, was", "on some ranks", found)


def _unsynchronised_buffer(name: str) -> Cause:
    return Cause(
        "buffer-not-synchronised",
        f"the buffer {name} has other values on the ranks: each updates it from its own part of the batch",
        "Combine what it is updated with: run.sum of the sum and of the count, or run.mean.",
        name,
    )


def _before_the_step(run: RunRecord, step: int, name: str) -> Cause:
    """The cause where the ranks differ when the step begins."""
    if name not in run.weights:
        return _unsynchronised_buffer(name)
    if not step:
        return Cause(
            "initialisation-by-rank",
            f"{name} has other values on the ranks before the first step: it was set after run.prepare, which gives "
            "all ranks the weights of rank 0, and differently on each",
            "Initialise the model before run.prepare, or alike on every rank.",
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
        f"{what} changed between two updates, outside the optimizer, {where}, and the ranks differ since",
        "Make the change on every rank alike, or in the optimizer.",
        name,
    )
