"""What was seen, and what it means. Pure: records of the ranks in, findings out.

record.py       the events of all ranks, and the questions that several judges ask
data.py         examples read twice, order of the epochs
evaluation.py   padded duplicates, metrics of one rank
places.py       what the script's text does with results that were exchanged
model.py        batch norm, parameters without gradients
replicas.py     weights that part: by the place of the first difference
writes.py       the line where the script writes to weights or gradients itself
schedule.py     learning rates, schedulers, accumulation, clipping
calls.py        collectives compared over ranks: also while the script runs
costs.py        time and space
source.py       what can only be read in the script: how the learning rate is scaled
"""

from __future__ import annotations

from paceline.doctor.findings import Finding
from paceline.doctor.judge import costs, data, evaluation, model, replicas, schedule, source
from paceline.doctor.judge.record import Run

PARTING = ("weights_differ", "not_reduced", "past_ddp", "sync_off", "unknown_to_ddp", "partly_reduced",
           "gradients_differ", "optimizer_differs", "written_outside", "steps_differ")  # fmt: skip


def judge(run: Run) -> list[Finding]:
    """All findings but those about collectives (calls.py), the gravest first."""
    found: list[Finding] = []
    for subject in (data, evaluation, model, replicas, schedule, costs, source):
        found += subject.findings(run)
    causes = {finding.cause for finding in found}
    if "sync_off" in causes and any(run.of(0, "fsdp")):  # FSDP has no gradient that it did not send
        found = [f for f in found if f.cause != "no_gradient"]
    if "steps_differ" in causes:  # a rate goes with its step
        found = [f for f in found if f.cause != "lr_differs"]
    elif causes & {"lr_differs", "no_gradient"}:  # it follows from these
        found = [f for f in found if f.cause not in PARTING or (run.ended and "lr_differs" not in causes)]
    order = {"model": 0, "cost": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.about.kind])
