"""Memory and step time of each strategy, from a Measurement and a Cluster. Pure.

Bytes: the traffic and memory that the docstrings of paceline/strategies name, for the strategies as implemented. For
the ZeRO stages these are the figures of Rajbhandari et al. 2020 ("ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"), sections 5 and 7.

Compute: the measured seconds, or FLOPs / (peak x fraction of the peak). A device computes its share of the examples.
The device with most examples counts: shards differ by at most one.

Communication (collectives.py) has two parts. `hidden` may overlap with a window of computation, `exposed` may not.
  low:     all that may overlap does
  high:    nothing overlaps
  middle:  as low on accelerators; as high if sending needs the cores that compute (CPUs)
The interval also has the spread of the measured steps, or of the fraction of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from paceline.planning.cluster import Cluster
from paceline.planning.collectives import (
    Group,
    all_reduce_seconds,
    groups,
    message_seconds,
    pass_seconds,
    reduce_scatter_passes,
    reduce_scatter_seconds,
    sent_by_ring,
    whole,
)
from paceline.planning.measurement import Layer, Measurement, TensorCut
from paceline.planning.memory import Memory, backward_moments, largest, sharded_moments
from paceline.planning.ranges import ZERO, Range
from paceline.strategies.pipeline.pipeline_cut import balanced

BUCKET_MB = 25.0
_MB = 2**20


class CannotRun(Exception):
    """The strategy cannot run on this cluster, or its cost is not modelled. The message says why."""


class Compute(NamedTuple):
    """Seconds of computation in a step."""

    forward: Range
    backward: Range
    update: Range
    other: Range

    @property
    def total(self) -> Range:
        return self.forward.plus(self.backward).plus(self.update).plus(self.other)

    @property
    def passes(self) -> Range:
        return self.forward.plus(self.backward)


@dataclass(frozen=True)
class Cost:
    """One strategy on one cluster."""

    replicas: int  # shards of a global batch
    memory: Memory
    compute: Compute
    hidden: float = 0.0  # seconds of communication that may overlap with `window`
    window: Range = ZERO
    exposed: float = 0.0  # seconds of communication that cannot overlap
    sent_bytes: float = 0.0  # by the device that sends most, in a mean step
    host_bytes: float = 0.0  # of a node's main memory, beyond that of its processes
    notes: Sequence[str] = ()

    def seconds(self, cluster: Cluster) -> Range:
        """Seconds of a step."""
        total = self.compute.total
        covered = [max(self.hidden - free, 0.0) for free in self.window]
        low = total.low + self.exposed + min(covered)
        high = total.high + self.exposed + self.hidden
        middle = total.middle + self.exposed + (self.hidden if cluster.shares_cores else covered[1])
        return Range(low, middle, high)


@dataclass(frozen=True)
class Job:
    """A measured model with a batch, on a cluster."""

    measured: Measurement
    cluster: Cluster
    batch: int  # examples of a global batch

    @property
    def other_bytes(self) -> float:
        """Memory of a process beside its tensors. That of a process on a CPU is no part of another kind of device."""
        m = self.measured
        return m.other_bytes if m.accelerated or self.cluster.flops is None else 0.0

    def examples(self, replicas: int) -> int:
        """Examples of the largest shard."""
        return -(-self.batch // replicas)

    def micro_batches(self, replicas: int) -> tuple[int, int]:
        """(number of micro-batches of a shard, examples of the largest)."""
        examples = self.examples(replicas)
        most = self.measured.micro_batch
        count = 1 if most is None else max(1, -(-examples // most))
        return count, -(-examples // count)

    def compute(
        self, examples: float, share: float = 1.0, update_share: float = 1.0, recomputed: float = 0.0
    ) -> Compute:
        """Computation of a device.

        Args:
            share: the device's part of the model's FLOPs.
            update_share: the part of the update.
            recomputed: the part of the forward that the backward computes again.
        """
        m, c = self.measured, self.cluster
        if c.flops is not None:
            if m.flops is None:
                raise CannotRun("the measured step has no count of FLOPs (a compiled model)")
            third = m.flops * examples * share / 3  # the backward has twice the products of the forward
            seconds = Range(*(third / (c.flops * fraction) for fraction in reversed(c.fraction)))
            return Compute(seconds, seconds.times(2 + recomputed), ZERO, ZERO)
        scale = examples * share / m.examples / c.speed
        forward = m.seconds("forward").times(scale)
        backward = m.seconds("backward").times(scale).plus(forward.times(recomputed))
        return Compute(
            forward, backward, m.seconds("update").times(update_share / c.speed), m.seconds("other").times(1 / c.speed)
        )


def _passes(job: Job, replicas: int, layers: Sequence[Layer] | None = None) -> tuple[list[float], list[float], float]:
    """Activations and gradients of each layer, and activations outside, of the largest micro-batch."""
    m = job.measured
    _, size = job.micro_batches(replicas)
    chosen = m.layers if layers is None else layers
    return (
        [layer.activation_bytes * size for layer in chosen],
        [layer.gradient_bytes for layer in chosen],
        m.activation_bytes * size,
    )


def _moments(job: Job, replicas: int, kept: bool) -> list[tuple[float, float]]:
    """(gradients, activations) at the moments of a backward, first that of the loss, of a device with whole gradients.

    kept: gradients stay allocated from step to step. Several micro-batches keep them too."""
    m = job.measured
    count, _ = job.micro_batches(replicas)
    activations, gradients, outside = _passes(job, replicas)
    if kept or count > 1:
        return [(m.gradient_bytes, sum(activations) + outside), (m.gradient_bytes, sum(activations))]
    return list(backward_moments(activations, gradients, outside, m.outside_gradient_bytes))


def _temporaries(job: Job, size: int) -> tuple[float, float]:
    """Bytes that a backward of `size` examples holds beside gradients and activations: (at the loss, in layers).

    In the measured process they are the differences between the counted bytes and those that the sizes give.
    """
    m = job.measured
    alone = Job(m, job.cluster, m.examples)
    first, *others = (gradients + activations for gradients, activations in _moments(alone, 1, kept=False))
    at_loss = m.loss_live_bytes - (first if m.layers else max(first, *others))
    in_layers = m.live_bytes - max(others) if m.layers else 0.0
    scale = size / alone.micro_batches(1)[1]
    return max(at_loss, 0.0) * scale, max(in_layers, 0.0) * scale


def _replica_memory(
    job: Job, replicas: int, state: float, kept: bool, buffers: float = 0.0, *, updated: float = 1.0
) -> Memory:
    """A device with whole weights and gradients.

    kept: gradients stay allocated from step to step, as views of buckets. updated: the part of the parameters that this
    device updates.
    """
    m = job.measured
    weights = m.parameter_bytes + m.buffer_bytes
    at_loss, in_layers = _temporaries(job, job.micro_batches(replicas)[1])
    moments = [
        Memory(
            weights,
            gradients,
            state,
            Range.exact(activations),
            buffers,
            in_layers if place else at_loss,
            job.other_bytes,
        )
        for place, (gradients, activations) in enumerate(_moments(job, replicas, kept))
    ]
    update = Memory(weights, m.gradient_bytes, state, ZERO, buffers, m.update_bytes * updated, job.other_bytes)
    return largest([*moments, update])


def single(job: Job) -> Cost:
    """One process."""
    if job.cluster.size > 1:
        raise CannotRun("it uses one device")
    memory = _replica_memory(job, 1, job.measured.state_bytes, kept=False)
    return Cost(1, memory, job.compute(job.batch))


def _bucketed(job: Job, group: Group, size: float, bucket_mb: float) -> tuple[float, float]:
    """Seconds to all-reduce gradients in buckets: (of all but the last bucket, of the last bucket)."""
    bucket = min(bucket_mb * _MB, size)
    if not size:
        return 0.0, 0.0
    count = math.ceil(size / bucket)
    last = size - (count - 1) * bucket
    before = (count - 1) * all_reduce_seconds(job.cluster, group, bucket)
    return before, all_reduce_seconds(job.cluster, group, last)


def ddp(
    job: Job, *, bucket_mb: float = BUCKET_MB, gradient_as_bucket_view: bool = False, reducer: str = "native"
) -> Cost:
    """Gradients are all-reduced in buckets while the backward runs."""
    if reducer not in ("native", "ring"):
        raise CannotRun(f"reducer={reducer} is not modelled")
    m, group = job.measured, whole(job.cluster)
    n = group.size
    compute = job.compute(job.examples(n))
    hidden, exposed = _bucketed(job, group, m.gradient_bytes, bucket_mb)
    buckets = 0.0 if gradient_as_bucket_view else m.gradient_bytes
    memory = _replica_memory(job, n, m.state_bytes, kept=gradient_as_bucket_view, buffers=buckets)
    sent = 2 * sent_by_ring(group, m.gradient_bytes)
    return Cost(n, memory, compute, hidden, compute.backward, exposed, sent)


def _zero1(job: Job) -> Cost:
    m, group = job.measured, whole(job.cluster)
    n = group.size
    compute = job.compute(job.examples(n), update_share=1 / n)
    hidden, last = _bucketed(job, group, m.gradient_bytes, BUCKET_MB)
    gathered = pass_seconds(job.cluster, group, m.gradient_bytes)
    memory = _replica_memory(job, n, m.state_bytes / n, kept=True, updated=1 / n)
    # Parameters are gathered after the update, some at a time: this device's rows, and all rows.
    bucket = min(BUCKET_MB * _MB, m.parameter_bytes)
    gathering = memory._replace(activations=ZERO, temporary=0.0, buffers=bucket * (1 + 1 / n))
    sent = 3 * sent_by_ring(group, m.gradient_bytes)
    return Cost(n, largest([memory, gathering]), compute, hidden, compute.backward, last + gathered, sent)


def fsdp(job: Job, *, stage: int = 3, replicate: int = 1, mixed: str = "none", checkpointing: bool = False) -> Cost:
    """Optimizer state (stage 1), gradients (2) and parameters (3) are sharded; over the devices of a replica."""
    if stage == 1:
        if checkpointing or replicate > 1:
            raise CannotRun("stage=1 is modelled without checkpointing and replicate")
        return _zero1(job)
    return _sharded(job, stage, replicate, mixed, checkpointing, None, 1)


def fsdp_tensor(
    job: Job, *, size: int = 2, stage: int = 3, replicate: int = 1, mixed: str = "none", checkpointing: bool = False
) -> Cost:
    """Layers are split over `size` neighbours, and the parts are sharded over the other devices."""
    if job.cluster.size % size or job.cluster.size // size < 2:
        raise CannotRun(f"{job.cluster.size} devices cannot be {size} x 2 or more")
    return _sharded(job, stage, replicate, mixed, checkpointing, _cut(job, size), size)


def _sharded(
    job: Job, stage: int, replicate: int, mixed: str, checkpointing: bool, cut: TensorCut | None, tensor_size: int
) -> Cost:
    """Stages 2 and 3 of fsdp, of the part 1 / tensor_size of split layers."""
    m, c = job.measured, job.cluster
    n = c.size // tensor_size
    if n % replicate or n // replicate < 2:
        raise CannotRun(f"{n} shards cannot form {replicate} replicas of at least two devices")
    shards = n // replicate
    # Neighbours share a tensor group, then a shard group; the replicas are the outermost dimension.
    inner, _ = groups(c, tensor_size)
    sharded_over, replicas_over = groups(c, tensor_size * shards)
    sharded_over = Group(shards, min(sharded_over.nodes, shards))
    kept_part = _kept_part(m, cut, tensor_size)  # of parameters
    kept_gradients = _kept_part(m, cut, tensor_size, gradients=True)
    narrow = m.gathered_bytes / m.parameter_bytes if mixed != "none" else 1.0
    count, size = job.micro_batches(n)

    layers = [layer.parameter_bytes * kept_part for layer in m.layers]
    layer_gradients = [layer.gradient_bytes * kept_gradients for layer in m.layers]
    outside = (m.parameter_bytes * kept_part) - sum(layers)
    outside_gradients = (m.gradient_bytes * kept_gradients) - sum(layer_gradients)

    def gathered(size: float) -> float:
        return pass_seconds(c, sharded_over, size * narrow)

    def reduced(size: float) -> float:
        return reduce_scatter_seconds(c, sharded_over, size) + all_reduce_seconds(c, replicas_over, size / shards)

    gathers = 2 if stage == 3 else 1
    hidden = count * (gathers * sum(map(gathered, layers)) + sum(map(reduced, layer_gradients)))
    exposed = count * (gathered(outside) + reduced(outside_gradients))
    total, total_gradients = sum(layers) + outside, sum(layer_gradients) + outside_gradients
    moved = narrow * (gathers * sum(layers) + outside) + reduce_scatter_passes(c) * total_gradients
    sent = count * sent_by_ring(sharded_over, moved)
    sent += count * 2 * sent_by_ring(replicas_over, total_gradients / shards)

    recomputed = sum(layer.flops for layer in m.layers) / m.flops if checkpointing and m.flops else float(checkpointing)
    compute = job.compute(
        job.examples(n),
        share=_compute_part(m, cut, tensor_size),
        update_share=kept_part / shards,
        recomputed=recomputed,
    )
    if cut is not None:
        exposed += all_reduce_seconds(c, inner, cut.all_reduced_bytes * size) * count
        whole_gradients = (m.gradient_bytes - cut.gradient_bytes) / shards
        exposed += all_reduce_seconds(c, inner, whole_gradients)
        sent += 2 * sent_by_ring(inner, cut.all_reduced_bytes * size * count + whole_gradients)

    activations, _, outside_activations = _passes(job, n)
    if checkpointing:
        activations = [layer.output_bytes * size for layer in m.layers]
        outside_activations += max((layer.activation_bytes for layer in m.layers), default=0.0) * size
    state = m.state_bytes * kept_gradients / shards
    at_loss, in_layers = _temporaries(job, size)
    moments = [
        Memory(
            total / shards + moment.gathered + m.buffer_bytes,
            moment.gradients,
            state,
            _split_activations(m, cut, tensor_size, moment.activations),
            moment.buffers,
            at_loss if moment.is_first else in_layers,
            job.other_bytes,
        )
        for moment in sharded_moments(
            [layer * narrow for layer in layers],
            layer_gradients,
            activations,
            (outside * narrow, outside_gradients, outside_activations),
            shards,
            keeps=stage == 2,
            accumulates=count > 1,
        )
    ]
    update = Memory(
        total / shards + m.buffer_bytes,
        total_gradients / shards,
        state,
        ZERO,
        0.0,
        m.update_bytes * kept_gradients / shards,
        job.other_bytes,
    )
    memory = largest([*moments, update])
    notes = [f"computes in {mixed}, so the model is close to that of other strategies, not the same"]
    return Cost(n, memory, compute, hidden, compute.passes, exposed, sent, notes=notes if mixed != "none" else ())


def _cut(job: Job, size: int) -> TensorCut:
    cut = job.measured.cuts.get(size)
    if cut is None:
        raise CannotRun(f"no block of the model can be split over {size} devices")
    return cut


def _kept_part(m: Measurement, cut: TensorCut | None, size: int, gradients: bool = False) -> float:
    """Part of the parameters (or gradients) that a device keeps if split layers are divided by `size`."""
    if cut is None:
        return 1.0
    split = cut.gradient_bytes if gradients else cut.parameter_bytes
    total = m.gradient_bytes if gradients else m.parameter_bytes
    return 1 - split / total * (1 - 1 / size) if total else 1.0


def _compute_part(m: Measurement, cut: TensorCut | None, size: int) -> float:
    """Part of the FLOPs that a device computes if split layers are divided by `size`."""
    if cut is None or not m.flops:
        return 1.0
    return 1 - cut.flops / m.flops * (1 - 1 / size)


def _split_activations(m: Measurement, cut: TensorCut | None, size: int, activations: float) -> Range:
    """Activations of a tensor-parallel device: between all divided and all whole; the middle follows the FLOPs."""
    if cut is None:
        return Range.exact(activations)
    return Range(activations / size, activations * _compute_part(m, cut, size), activations)


def tensor(job: Job, *, size: int = 0) -> Cost:
    """Layers are split over neighbours, which have the same examples."""
    m, c = job.measured, job.cluster
    size = size or c.size
    if c.size % size:
        raise CannotRun(f"{c.size} devices cannot be divided by size={size}")
    cut = _cut(job, size)
    n = c.size // size
    inner, outer = groups(c, size)
    count, examples = job.micro_batches(n)
    part, gradients = _kept_part(m, cut, size), _kept_part(m, cut, size, gradients=True)
    compute = job.compute(job.examples(n), share=_compute_part(m, cut, size), update_share=gradients)
    split, rest = cut.gradient_bytes / size, m.gradient_bytes - cut.gradient_bytes
    exposed = count * all_reduce_seconds(c, inner, cut.all_reduced_bytes * examples)
    exposed += all_reduce_seconds(c, outer, split) + all_reduce_seconds(c, whole(c), rest)
    sent = 2 * sent_by_ring(inner, count * cut.all_reduced_bytes * examples)
    sent += 2 * sent_by_ring(outer, split) + 2 * sent_by_ring(whole(c), rest)
    base = _replica_memory(job, n, m.state_bytes * gradients, kept=False)
    memory = base._replace(
        weights=m.parameter_bytes * part + m.buffer_bytes,
        gradients=base.gradients * gradients,
        activations=_split_activations(m, cut, size, base.activations.middle),
    )
    return Cost(n, memory, compute, 0.0, ZERO, exposed, sent)


def pipeline(job: Job, *, stages: int = 0, schedule: str = "gpipe") -> Cost:
    """The layers are split into stages, and micro-batches flow through them.

    With m micro-batches, p stages wait for (p - 1) / m of the ideal time (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1).
    """
    m, c = job.measured, job.cluster
    p = stages or c.size
    if c.size % p:
        raise CannotRun(f"{c.size} devices cannot be divided by stages={p}")
    if len(m.layers) < p:
        raise CannotRun(f"the model has {len(m.layers)} layers, too few for {p} stages")
    n = c.size // p
    inner, outer = groups(c, p)
    count, size = job.micro_batches(n)
    ends = [0.0] * len(m.layers)  # parameters outside of layers: half in the first stage, half in the last
    ends[0] += 0.5
    ends[-1] += 0.5
    weights = [layer.parameter_bytes + end * m.outside_bytes for layer, end in zip(m.layers, ends, strict=True)]
    starts = balanced(weights, p)

    def of_stages(values: Sequence[float], outside: float) -> list[float]:
        full = [value + end * outside for value, end in zip(values, ends, strict=True)]
        return [sum(full[a:b]) for a, b in pairwise(starts)]

    parameters = of_stages([layer.parameter_bytes for layer in m.layers], m.outside_bytes)
    gradients = of_stages([layer.gradient_bytes for layer in m.layers], m.outside_gradient_bytes)
    saved = of_stages([layer.activation_bytes for layer in m.layers], m.activation_bytes)
    work = of_stages([layer.flops for layer in m.layers], max((m.flops or 0) - sum(x.flops for x in m.layers), 0.0))
    slowest = max(work) / sum(work) if sum(work) else max(parameters) / sum(parameters)
    held = {"gpipe": count, "1f1b": min(p, count), "naive": 1}[schedule]
    bubble = 1.0 if schedule == "naive" else (count + p - 1) / count
    share = 1.0 if schedule == "naive" else slowest
    part = max(gradients) / m.gradient_bytes if m.gradient_bytes else 1.0
    compute = job.compute(job.examples(n) * bubble, share=share, update_share=part)

    boundary = max(layer.output_bytes for layer in m.layers) * size
    slots = count + p - 1
    exposed = 2 * slots * message_seconds(c, inner.nodes > 1, boundary) if p > 1 else 0.0
    exposed += all_reduce_seconds(c, outer, max(gradients))
    sent = 2 * count * boundary * (p > 1) + 2 * sent_by_ring(outer, max(gradients))
    totals = [
        weight + gradient + m.state_bytes * gradient / max(m.gradient_bytes, 1) + activation * size * held
        for weight, gradient, activation in zip(parameters, gradients, saved, strict=True)
    ]
    most = totals.index(max(totals))
    start = max(m.parameter_bytes - totals[most], 0.0)  # each process holds the whole model until the first step
    memory = Memory(
        parameters[most] + m.buffer_bytes,
        gradients[most],
        m.state_bytes * gradients[most] / max(m.gradient_bytes, 1),
        Range.exact(saved[most] * size * held),
        start,
        max(_temporaries(job, size)),
        job.other_bytes,
    )
    notes = ["one micro-batch: only one stage computes at a time; set micro_batch"] if count == 1 and p > 1 else []
    return Cost(n, memory, compute, 0.0, ZERO, exposed, sent, notes=notes)


def local_sgd(job: Job, *, every: int = 8) -> Cost:
    """Weights are averaged after every `every` steps."""
    return _periodic(job, every, 0.0, 1)


def diloco(job: Job, *, every: int = 100) -> Cost:
    """An outer optimizer applies the mean change of the weights after every `every` steps."""
    return _periodic(job, every, 2 * job.measured.gradient_bytes, 2)


def _periodic(job: Job, every: int, outer_state: float, copies: int) -> Cost:
    """copies: of the averaged tensors, while averaging."""
    if every < 1:
        raise CannotRun(f"every={every} is not a number of steps")
    m, group = job.measured, whole(job.cluster)
    n = group.size
    averaged = m.gradient_bytes + m.buffer_bytes
    memory = _replica_memory(job, n, m.state_bytes + outer_state, kept=False)
    # Averaging comes after the backward, so its copies replace activations and gradients.
    buffers = max(copies * averaged - memory.activations.middle - memory.gradients, 0.0)
    exposed = all_reduce_seconds(job.cluster, group, averaged) / every
    sent = 2 * sent_by_ring(group, averaged) / every
    compute = job.compute(job.examples(n))
    return Cost(n, memory._replace(buffers=buffers), compute, 0.0, ZERO, exposed, sent, notes=["trains another model"])


def mirrored(job: Job) -> Cost:
    """One process, a replica on each device; gradients are all-reduced after the backward."""
    m, group = job.measured, _one_node(job)
    before, last = _bucketed(job, group, m.gradient_bytes, BUCKET_MB)
    memory = _replica_memory(job, group.size, m.state_bytes, kept=False, buffers=min(BUCKET_MB * _MB, m.gradient_bytes))
    compute = job.compute(job.examples(group.size))
    sent = 2 * sent_by_ring(group, m.gradient_bytes)
    return Cost(group.size, memory, compute, 0.0, ZERO, before + last, sent)


def data_parallel(job: Job) -> Cost:
    """One process; the first device sends the weights and adds the gradients."""
    m, c, group = job.measured, job.cluster, _one_node(job)
    n = group.size
    exposed = (n - 1) * (m.parameter_bytes + m.gradient_bytes) / (c.bandwidth or math.inf) + 2 * (n - 1) * c.latency
    memory = _replica_memory(job, n, m.state_bytes, kept=False, buffers=min(BUCKET_MB * _MB, m.parameter_bytes))
    sent = (n - 1) * m.parameter_bytes  # by the first device
    return Cost(n, memory, job.compute(job.examples(n)), 0.0, ZERO, exposed, sent)


def central_storage(job: Job) -> Cost:
    """One process; the weights that are updated, and the optimizer state, are in the host's memory."""
    m, c, group = job.measured, job.cluster, _one_node(job)
    if c.host_bandwidth is None:
        raise CannotRun("its weights and gradients cross the link to the host: give --host-bandwidth")
    n = group.size
    moved = m.parameter_bytes + m.gradient_bytes
    exposed = moved / c.host_bandwidth + (n - 1) * moved / (c.bandwidth or math.inf)
    memory = _replica_memory(job, n, 0.0, kept=False)
    host = m.parameter_bytes + m.gradient_bytes + m.state_bytes
    notes = _host_update(job)
    sent = m.gradient_bytes + (n - 1) * m.parameter_bytes
    return Cost(n, memory, job.compute(job.examples(n)), 0.0, ZERO, exposed, sent, host, notes)


def parameter_server(job: Job, *, servers: int = 1, mode: str = "sync") -> Cost:
    """Servers on hosts hold parameters and optimizer state; the devices compute gradients."""
    if mode != "sync":
        raise CannotRun(f"mode={mode} is not modelled: its workers do not wait for each other")
    if servers < 1:
        raise CannotRun(f"servers={servers}: give at least 1")
    m, c = job.measured, job.cluster
    n = c.size
    rate = c.node_bandwidth if c.nodes > 1 else c.bandwidth
    if rate is None:
        raise CannotRun("its traffic needs a rate: give --bandwidth")
    latency = c.node_latency if c.nodes > 1 else c.latency
    # Push, sums, shares of the corrected gradients, weights: one after the other.
    moved = 2 * n * m.gradient_bytes + m.gradient_bytes + n * m.parameter_bytes
    exposed = moved / servers / rate + 4 * latency
    memory = _replica_memory(job, n, 0.0, kept=False)
    host = (m.parameter_bytes + m.state_bytes + n * m.gradient_bytes) / servers
    compute = job.compute(job.examples(n), update_share=1 / servers)
    sent = n * (m.gradient_bytes + m.parameter_bytes) / servers  # by a server
    return Cost(n, memory, compute, 0.0, ZERO, exposed, sent, host, _host_update(job))


def _one_node(job: Job) -> Group:
    if job.cluster.nodes > 1:
        raise CannotRun("it is one process, so it cannot use several nodes")
    return whole(job.cluster)


def _host_update(job: Job) -> list[str]:
    """The update runs on a CPU. Its time is known only if the step was measured on a CPU like it."""
    return [] if job.cluster.flops is None and not job.measured.accelerated else ["without the update on the host"]


MODELS: dict[str, Callable[..., Cost]] = {
    "single": single,
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp+tensor": fsdp_tensor,
    "tensor": tensor,
    "pipeline": pipeline,
    "local_sgd": local_sgd,
    "diloco": diloco,
    "parameter_server": parameter_server,
    "mirrored": mirrored,
    "data_parallel": data_parallel,
    "central_storage": central_storage,
}

ONE_PROCESS = ("single", "mirrored", "data_parallel", "central_storage")
