"""paceline plan: memory and step time of each strategy on a described cluster.

1. Check everything that can be checked before anything starts.
2. Measure a few steps of the script in one process, as a trial (worker/step_measure.py). With --from, read the
   measurement of an earlier plan instead.
3. Compute the cost of each strategy, print the table, and write the file.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline import __version__
from paceline.config import StrategySpec
from paceline.errors import SettingError, UsageError, printable
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import say
from paceline.planning import limits
from paceline.planning.candidates import NOT_MODELLED, read_candidates
from paceline.planning.cluster import Cluster, ClusterOptions, make_cluster
from paceline.planning.cost_model import MODELS, ONE_PROCESS, CannotRun, Cost, Job
from paceline.planning.device_figures import DEVICES, FRACTION_SOURCE
from paceline.planning.measurement import SCHEMA, Measurement, read_measurement, read_measurement_file
from paceline.planning.plan_table import render_plan
from paceline.planning.ranges import Range
from paceline.strategies import check
from paceline.trials.json_file import check_writable, write_json
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Length, Script, Start
from paceline.trials.trial import check_script, launch_trial, plan_trial, quiet_output

LEAST_STEPS = 3


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    script: Script | None  # None: only with `source`
    cluster: ClusterOptions
    strategies: str | None = None  # comma-separated names; None: all
    precision: str | None = None  # None: the script's
    global_batch: int | None = None  # examples to plan for; None: those of the measured step
    measured_batch: int | None = None  # examples of the measured steps; None: the script's
    steps: int = 10  # measured steps
    deadline: float = 300.0  # seconds; a longer measurement is ended
    source: str | None = None  # a file with a measurement
    json_file: str | None = None


def plan(options: PlanOptions) -> int:
    """Print the table and write the file.

    Returns the exit code: 0; 1 if nothing could be measured or written; 128 + n for signal n.

    Raises:
        LaunchError, SettingError: the command cannot work.
    """
    _check(options)
    if options.source is not None:
        measured = read_measurement_file(options.source)
        cluster = make_cluster(options.cluster, measured.accelerated)
    else:
        assert options.script is not None
        check_script(options.script)
        cluster = make_cluster(options.cluster, accelerated=False)  # to check the options before the measurement
        read_candidates(options.strategies, cluster)
        with Interrupts() as interrupts:
            try:
                found = measure(options.script, options, interrupts)
            except Stopped as stopped:
                return stopped.report()
        if isinstance(found, str):
            say(f"paceline plan: the step could not be measured: {found}\n")
            return 1
        measured = found
        cluster = make_cluster(options.cluster, measured.accelerated)
    document = make_plan_document(measured, cluster, options)
    sys.stdout.write(printable(render_plan(document)))
    sys.stdout.flush()
    if options.json_file is not None:
        try:
            write_json(options.json_file, document)
        except OSError as error:
            say(f"paceline plan: cannot write {options.json_file}: {error}\n")
            return 1
    return 0


def _check(options: PlanOptions) -> None:
    if (options.script is None) == (options.source is None):
        raise SettingError("give a SCRIPT to measure, or --from FILE with an earlier measurement, but not both.")
    if options.steps < LEAST_STEPS:
        raise SettingError(f"--steps {options.steps}: give at least {LEAST_STEPS}.")
    if options.deadline <= 0:
        raise SettingError(f"--deadline {options.deadline:g}: give a number of seconds above 0, such as 300.")
    for name, batch in (("--global-batch", options.global_batch), ("--measured-batch", options.measured_batch)):
        if batch is not None and batch < 1:
            raise SettingError(f"{name} {batch}: give at least 1.")
    if options.json_file is not None:
        check_writable(options.json_file)


def measure(script: Script, options: PlanOptions, interrupts: Interrupts) -> Measurement | str:
    """Measure the script in one process. Return the measurement, or why there is none, in one line.

    Raises:
        Stopped: a signal came; the process has ended.
    """
    warmup = max(1, min(3, options.steps // 3))
    length = Length(options.steps + warmup, warmup, options.deadline)
    start = Start(StrategySpec("single", {}), 1, options.precision)
    plan_trial(script, start, length)
    with quiet_output() as output:
        spec = TrialSpec(output.private, length.steps, warmup, time.time(), options.measured_batch, measures_step=True)
        failed = launch_trial(script, start, length, spec, interrupts, output)
        if failed is not None:
            return failed
        try:
            with open(os.path.join(output.private, "rank-0.json")) as file:
                record = json.load(file)
        except FileNotFoundError:
            return "the script never called paceline.start, or ended immediately. plan measures scripts of Paceline."
        if record is None:
            return f"the script made fewer than {length.steps + 1} steps. Lower --steps, or train longer."
        return read_measurement({"schema": SCHEMA, "script": script.path, **record}, script.path)


def cost_of(spec: StrategySpec, job: Job) -> Cost:
    """The cost of a strategy.

    Raises:
        CannotRun: it cannot run on this cluster, or is not modelled with these options.
    """
    size = job.cluster.size
    model = MODELS[spec.name]
    known = inspect.signature(model).parameters
    options = {key: _value(value) for key, value in spec.options.items()}
    for key, value in options.items():
        if key not in known or key == "job":
            raise CannotRun(f"option {key} is not modelled")
        if not isinstance(value, (float, int) if isinstance(known[key].default, float) else type(known[key].default)):
            raise CannotRun(f"{key}={value} cannot be read")
    try:
        if spec.name not in ONE_PROCESS:
            check(spec, size + int(options.get("servers", spec.name == "parameter_server")))
    except SettingError as error:
        raise CannotRun(str(error)) from None
    return model(job, **options)


def _value(value: Any) -> Any:
    """An option's value; text from the command line as a truth value or number if it is one."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def make_plan_document(measured: Measurement, cluster: Cluster, options: PlanOptions) -> dict[str, Any]:
    """The object that `--json` writes. The fastest strategy that fits comes first."""
    batch = options.global_batch if options.global_batch is not None else measured.examples
    job = Job(measured, cluster, batch)
    rows = []
    for spec in read_candidates(options.strategies, cluster):
        try:
            rows.append(_row(str(spec), cost_of(spec, job), job))
        except CannotRun as error:
            rows.append({"name": str(spec), "failed": str(error)})
    rows.sort(key=_rank)
    if options.strategies is None:
        rows += [{"name": name, "failed": f"not modelled: {why}"} for name, why in NOT_MODELLED.items()]
    if all(row["failed"] is not None for row in rows):
        raise UsageError("no strategy can run: " + "; ".join(f"{row['name']}: {row['failed']}" for row in rows))
    return {
        "schema": 1,
        "paceline": __version__,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cluster": {**asdict(cluster), "fraction": _range(cluster.fraction)},
        "global_batch": batch,
        "rows": rows,
        "basis": basis(measured, cluster, batch, options.cluster.gpu),
        "measurement": measured.to_json(),
    }


def _rank(row: dict[str, Any]) -> tuple[bool, bool, float]:
    if row["failed"] is not None:
        return True, True, 0.0
    return False, row["fits"] is False, row["step_seconds"]["middle"]


def _row(name: str, cost: Cost, job: Job) -> dict[str, Any]:
    used = limits.utilization(cost, job.cluster, job.batch)
    seconds = cost.seconds(job.cluster)
    notes = list(cost.notes)
    if used[limits.BATCH] > 1:
        notes.append(f"the batch of {job.batch} examples is smaller than the number of its shards")
    memory = cost.memory
    return {
        "name": name,
        "failed": None,
        "fits": limits.fits(cost, job.cluster),
        "replicas": cost.replicas,
        "examples_per_second": job.batch / seconds.middle,
        "step_seconds": _range(seconds),
        "compute_seconds": _range(cost.compute.total),
        "communication_seconds": {"may_overlap": cost.hidden, "cannot_overlap": cost.exposed},
        "sent_bytes_per_device": cost.sent_bytes,
        "memory_bytes": {
            **{key: value for key, value in memory._asdict().items() if key != "activations"},
            "activations": _range(memory.activations),
            "total": _range(memory.total),
        },
        "host_bytes": cost.host_bytes,
        "runs_out_first": limits.first(used),
        "used": used,
        "notes": notes,
    }


def _range(value: Range) -> dict[str, float]:
    return value._asdict()


def basis(measured: Measurement, cluster: Cluster, batch: int, gpu: str | None) -> Sequence[str]:
    """Sentences about the sources of the figures and what they leave out."""
    total = sum(measured.seconds(name).middle for name in ("forward", "backward", "update", "other"))
    lines = [
        f"One process on {measured.device}, {measured.precision}: {len(measured.forward)} steps of {measured.examples} "
        f"examples, {total * 1e3:.4g} ms each (median). The plan is for {cluster.nodes} x {cluster.devices_per_node} "
        f"devices and {batch} examples per step."
    ]
    if cluster.flops is not None and measured.flops is not None:
        low, middle, high = cluster.fraction
        source = FRACTION_SOURCE if gpu is not None else "--mfu, or else the range of " + FRACTION_SOURCE
        lines.append(
            f"Compute time: {measured.flops:.3g} FLOP per example, and {low:.0%} to {high:.0%} (middle: {middle:.0%}) "
            f"of the peak of {cluster.flops:.4g} FLOP/s. Source of the fraction: {source}. The measured seconds are "
            "not used."
        )
        if measured.precision == "fp32":
            lines.append("The peak is that of 16-bit products, but the step ran in fp32: add --precision bf16.")
    else:
        lines.append(
            f"Compute time: the measured seconds, on devices {cluster.speed:g} times as fast. Another kind of device "
            "needs --gpu NAME or --flops: seconds measured here do not carry over to it."
        )
    if gpu is not None:
        lines.append(f"Figures of {gpu}: {DEVICES[gpu.lower()].source}.")
    overlap = "no overlap (sending needs the cores that compute)" if cluster.shares_cores else "full overlap"
    lines.append(
        f"Interval: from full overlap of communication with computation to none, and the spread of the compute time. "
        f"Middle: {overlap}. Rates and latencies of links are taken as given."
    )
    if cluster.flops is not None and not measured.accelerated:
        lines.append(
            "Memory does not include the parts that only such a device shows: its context, buffers of NCCL, "
            "fragmentation."
        )
        lines.append(
            "The host's time to start a step's kernels is not included: steps of a few milliseconds take longer than "
            "this."
        )
    lines.append("Waiting for data is not included.")
    return lines
