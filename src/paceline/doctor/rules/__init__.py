"""Rules: turn the events that the recorders wrote into findings. Pure functions.

recorded_run.py       the events of all ranks, and queries that several rules share
data_rules.py         examples read twice or never, the order of the epochs
metric_rules.py       wrong divisors and averages of metrics, from the numbers in the script's variables
evaluation_rules.py   padded duplicates, metrics of one rank's shard
padded_rows.py        compare rows of examples that are padded to different widths
gathered_results.py   does the script drop the duplicates from gathered results?
model_rules.py        batch norm, modes, parameters without gradients, means of unequal counts
replica_rules.py      weights that differ between ranks, located by the first difference
schedule_rules.py     learning rates, schedulers, accumulation
clip_rules.py         clipping, also by hand
collective_rules.py   compare the collectives of the ranks, also while the script runs
random_rules.py       random numbers that are the same on all ranks
loss_rules.py         the terms of a loss, and the lines that compute them
gradient_rules.py     gradients that are computed and never used, optimizers that work on shards of matrices
cost_rules.py         time and memory
rate_rules.py         how the learning rate and the global batch grow with the number of processes
script_lines.py       find a line in the script's source if no patched function can record it
"""

from __future__ import annotations

from paceline.doctor.findings import Finding
from paceline.doctor.rules import (
    clip_rules,
    cost_rules,
    data_rules,
    evaluation_rules,
    gradient_rules,
    loss_rules,
    metric_rules,
    model_rules,
    random_rules,
    rate_rules,
    replica_rules,
    schedule_rules,
)
from paceline.doctor.rules.recorded_run import RecordedRun

DIVERGENCE = ("weights_differ", "not_reduced", "past_ddp", "sync_off", "unknown_to_ddp", "partly_reduced",
              "gradients_differ", "optimizer_differs", "written_outside", "steps_differ")  # fmt: skip
METRICS = ("local_metric", "mean_of_means")


def find_faults(run: RecordedRun) -> list[Finding]:
    """Return all findings except those about collectives (collective_rules.py), the most serious first."""
    found: list[Finding] = []
    training = (data_rules, metric_rules, evaluation_rules, model_rules, replica_rules, schedule_rules,
                clip_rules, gradient_rules, loss_rules, random_rules, rate_rules)  # fmt: skip
    for rules in (*training, cost_rules):
        found += rules.findings(run)
    # Keep the first finding of each cause in METRICS: metric_rules knows the numbers, evaluation_rules only the calls.
    found = [f for n, f in enumerate(found) if f.cause not in METRICS or f.cause not in {e.cause for e in found[:n]}]
    causes = {finding.cause for finding in found}
    # Leave out findings that follow from other findings.
    if "sync_off" in causes and any(run.events(0, "fsdp")):  # FSDP keeps no gradient that it did not reduce
        found = [f for f in found if f.cause != "no_gradient"]
    if "same_random_numbers" in causes:  # the same in every pass, so also on every rank
        found = [f for f in found if f.cause != "same_augmentations"]
    last = next((f for f in found[::-1] if f.cause == "loss_mean_of_means"), None)  # loss_rules names a line
    found = [f for f in found if f.cause != "loss_mean_of_means" or f is last]
    if "steps_differ" in causes:  # a rank that skips steps also has a different learning rate
        found = [f for f in found if f.cause != "lr_differs"]
    elif causes & {"lr_differs", "no_gradient"}:  # these make weights diverge
        found = [f for f in found if f.cause not in DIVERGENCE or (run.completed and "lr_differs" not in causes)]
    order = {"model": 0, "cost": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.about.kind])
