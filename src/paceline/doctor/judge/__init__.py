"""What was seen, and what it means. Pure: records of the ranks in, findings out.

record.py       the events of all ranks, and the questions that several judges ask
data.py         examples read twice, order of the epochs
evaluation.py   padded duplicates, metrics of one rank
places.py       what the script's text does with results that were exchanged
model.py        batch norm, weights, parameters without gradients
schedule.py     learning rates, schedulers, accumulation, clipping
calls.py        collectives compared over ranks: also while the script runs
costs.py        time and space
source.py       what can only be read in the script: how the learning rate is scaled
"""

from __future__ import annotations

from paceline.doctor.findings import Finding
from paceline.doctor.judge import costs, data, evaluation, model, schedule, source
from paceline.doctor.judge.record import Run


def judge(run: Run) -> list[Finding]:
    """All findings but those about collectives (calls.py), the gravest first."""
    found: list[Finding] = []
    for subject in (data, evaluation, model, schedule, costs, source):
        found += subject.findings(run)
    causes = {finding.cause for finding in found}
    if causes & {"lr_differs", "no_gradient"}:  # it follows from these
        found = [f for f in found if f.cause != "weights_differ" or (run.ended and "lr_differs" not in causes)]
    order = {"model": 0, "cost": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.about.kind])
