"""The cost of each strategy, against values computed by hand."""

from __future__ import annotations

import pytest

from paceline.config import StrategySpec, parse_strategy
from paceline.planning import limits
from paceline.planning.candidates import all_candidates
from paceline.planning.cluster import Cluster
from paceline.planning.collectives import Group, all_reduce_seconds, groups, message_seconds, pass_seconds
from paceline.planning.cost_model import MODELS, CannotRun, Cost, Job
from paceline.planning.measurement import Layer, Measurement, TensorCut
from paceline.planning.memory import backward_moments, sharded_moments
from paceline.planning.plan_command import cost_of
from paceline.planning.ranges import Range
from paceline.strategies import STRATEGIES

MB = 1e6
# Four layers of 10 MB and 8 MB outside; Adam; 0.1 MB of activations per layer and example, 0.2 MB outside.
MODEL = Measurement(
    "train.py", "cpu", "fp32", 32, None, [0.3, 0.4, 0.5], [0.8] * 3, [0.16] * 3, [0.0] * 3,
    48 * MB, 48 * MB, 96 * MB, 0, 24 * MB, 0.2 * MB, 0, 60e9,
    [Layer(str(i), 10 * MB, 10 * MB, 0.1 * MB, 0.05 * MB, 12e9) for i in range(4)],
    {2: TensorCut(32 * MB, 32 * MB, 40e9, 0.4 * MB)}, 5 * MB,
)  # fmt: skip
FOUR = Cluster(1, 4, bandwidth=100 * MB, shares_cores=True)
PAIRS = Cluster(2, 2, bandwidth=100 * MB, node_bandwidth=20 * MB)


def cost(strategy: str, cluster: Cluster = FOUR, batch: int = 32) -> Cost:
    return cost_of(parse_strategy(strategy), Job(MODEL, cluster, batch))


def test_a_ring() -> None:
    """4 devices at 100 MB/s: each sends 3/4 of 48 MB for a gather, twice that for an all-reduce."""
    assert pass_seconds(FOUR, Group(4, 1), 48 * MB) == pytest.approx(0.36)
    assert all_reduce_seconds(FOUR, Group(4, 1), 48 * MB) == pytest.approx(0.72)
    late = Cluster(1, 4, bandwidth=100 * MB, latency=0.01)
    assert all_reduce_seconds(late, Group(4, 1), 48 * MB) == pytest.approx(0.72 + 6 * 0.01)
    assert all_reduce_seconds(FOUR, Group(1, 1), 48 * MB) == 0


def test_a_ring_over_two_nodes_is_as_slow_as_the_link_between_them() -> None:
    """One ring of all four: 3/4 of 48 MB at 20 MB/s. Two rings, of one device of each node: each 1/2, on one link."""
    assert pass_seconds(PAIRS, Group(4, 2), 48 * MB) == pytest.approx(1.8)
    assert pass_seconds(PAIRS, Group(2, 2), 48 * MB) == pytest.approx(2 * 24 / 20)
    assert message_seconds(PAIRS, True, 10 * MB) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("nodes", "per_node", "inner", "expected"),
    [
        (2, 4, 2, ((2, 1), (4, 2))),
        (2, 4, 4, ((4, 1), (2, 2))),
        (2, 4, 8, ((8, 2), (1, 1))),
        (4, 2, 4, ((4, 2), (2, 2))),
        (3, 8, 12, ((12, 2), (2, 2))),
        (1, 8, 2, ((2, 1), (4, 1))),
    ],
)
def test_inner_and_outer_groups(nodes: int, per_node: int, inner: int, expected: object) -> None:
    assert tuple(map(tuple, groups(Cluster(nodes, per_node), inner))) == expected


def test_compute_is_a_share_of_the_measured_seconds() -> None:
    """8 of 32 examples at a quarter of the speed take as long as all; the whole update takes four times as long."""
    shared = Cluster(1, 4, bandwidth=100 * MB, speed=0.25, shares_cores=True)
    compute = cost("ddp", shared).compute
    assert compute.forward == pytest.approx((0.3, 0.4, 0.5))
    assert compute.backward.middle == pytest.approx(0.8)
    assert compute.update.middle == pytest.approx(0.64)
    assert cost("fsdp:stage=1", shared).compute.update.middle == pytest.approx(0.16)


def test_compute_from_flops() -> None:
    """8 examples of 60 GFLOP at 40% (20% to 50%) of 1 TFLOP/s."""
    cluster = Cluster(1, 4, bandwidth=100 * MB, flops=1e12, fraction=Range(0.2, 0.4, 0.5))
    total = cost("ddp", cluster).compute.total
    assert total == pytest.approx((480 / 500, 480 / 400, 480 / 200))
    again = cost("fsdp:checkpointing=true", cluster).compute.total  # 48 of 60 GFLOP are in layers; a third is forward
    assert again.middle == pytest.approx(1.2 * (1 + 0.8 / 3))


def test_ddp() -> None:
    """48 MB in two buckets: 25 MiB while the backward runs, the rest after it. Buckets double the gradients."""
    found = cost("ddp")
    assert found.hidden == pytest.approx(2 * 0.75 * 25 * 2**20 / (100 * MB))
    assert found.exposed + found.hidden == pytest.approx(0.72)
    assert found.sent_bytes == pytest.approx(2 * 0.75 * 48 * MB)
    # 8 examples: 8 x 0.6 MB of activations at first, or in the end all gradients, which is more.
    assert found.memory == (48 * MB, 48 * MB, 96 * MB, (0, 0, 0), 48 * MB, 0, 5 * MB)
    seconds = found.seconds(FOUR)
    assert seconds.high == pytest.approx(0.125 + 0.2 + 0.16 + 0.72)
    assert seconds.middle == pytest.approx(0.1 + 0.2 + 0.16 + 0.72)
    assert seconds.low == pytest.approx(0.075 + 0.2 + 0.16 + found.exposed + found.hidden - 0.2)


def test_on_accelerators_the_middle_is_full_overlap() -> None:
    fast = Cluster(1, 4, bandwidth=1000 * MB)
    found = cost("ddp", fast)
    assert found.hidden < 0.2, "the backward covers it"
    assert found.seconds(fast).middle == pytest.approx(0.46 + found.exposed)


def test_the_stages_of_zero() -> None:
    """Rajbhandari et al. 2020, section 7: 2 Psi for stages 1 and 2, 3 Psi for stage 3. Here stage 1 is an all-reduce
    and an all-gather. Parameters outside of layers stay gathered between forward and backward."""
    part, four = 0.75 * MB, Cluster(1, 4, bandwidth=100 * MB)
    assert cost("fsdp:stage=1", four).sent_bytes == pytest.approx(3 * 48 * part)
    assert cost("fsdp:stage=2", four).sent_bytes == pytest.approx(2 * 48 * part)
    assert cost("fsdp:stage=3", four).sent_bytes == pytest.approx((3 * 40 + 2 * 8) * part)
    assert cost("fsdp:stage=3,mixed=bf16", four).sent_bytes == pytest.approx((2 * 40 + 1.5 * 8) * part)
    assert cost("fsdp:stage=3").sent_bytes == pytest.approx((4 * 40 + 3 * 8) * part), "gloo reduces by an all-reduce"
    one, two, three = (cost(f"fsdp:stage={stage}").memory for stage in (1, 2, 3))
    assert [memory.optimizer for memory in (one, two, three)] == [24 * MB] * 3
    assert one.weights == 48 * MB
    assert two.weights == 12 * MB + 38 * MB, "one of four layers has been freed"
    # The largest moment is the end of the third layer of the backward: it and the last one are gathered; its gradients
    # and those outside of layers are whole, two layers' are shards; the input of a reduction; one layer's activations.
    assert three.weights == 12 * MB + 8 * MB + 2 * 10 * MB
    assert three.gradients == (10 + 8 + 2 * 2.5) * MB
    assert (three.buffers, three.activations.middle) == (10 * MB, pytest.approx(8 * 0.1 * MB))


def test_replicas_of_shards_send_only_gradients_between_nodes() -> None:
    """2 x 2: gathers and reductions within a node; then each device all-reduces its half with the other node's."""
    found = cost("fsdp:stage=3,replicate=2", PAIRS)
    within = 0.5 * (3 * 40 + 2 * 8) * MB
    assert found.sent_bytes == pytest.approx(within + 2 * 0.5 * 24 * MB)
    assert found.hidden + found.exposed == pytest.approx(within / (100 * MB) + 2 * 24 / 20)


def test_tensor() -> None:
    """Two groups of two: 32 of 48 MB are split, and 40 of 60 GFLOP."""
    found = cost("tensor:size=2")
    assert found.replicas == 2
    assert found.memory.weights == pytest.approx(16 * MB + 16 * MB)
    assert found.memory.optimizer == pytest.approx(64 * MB)
    assert found.compute.forward.middle == pytest.approx(0.4 * 16 / 32 * (1 - 1 / 3))
    inside = 2 * 0.5 * 16 * 0.4 * MB
    between = 2 * 0.5 * 16 * MB + 2 * 0.75 * 16 * MB
    assert found.sent_bytes == pytest.approx(inside + between)
    assert found.exposed == pytest.approx((inside + between) / (100 * MB))
    with pytest.raises(CannotRun, match="over 4 devices"):
        cost("tensor:size=4")


def test_fsdp_and_tensor() -> None:
    """Each device keeps 32 / 2 + 16 MB of a model of 48 MB, and half of it as a shard."""
    found = cost("fsdp+tensor:size=2")
    assert found.replicas == 2
    assert found.memory.optimizer == pytest.approx(32 * MB)
    assert found.compute.update.middle == pytest.approx(0.16 * 2 / 3 / 2)


def test_a_pipeline_waits_for_p_minus_1_of_m_parts() -> None:
    """Narayanan et al. 2021: with m = 8 micro-batches, 4 stages take 1 + 3/8 of the ideal time."""
    divided = Measurement(**{**vars(MODEL), "micro_batch": 4})
    job = Job(divided, FOUR, 32)
    found = cost_of(parse_strategy("pipeline:stages=4"), job)
    work = [12 + 6, 12, 12, 12 + 6]  # GFLOP: those outside of layers are at the ends
    assert found.compute.forward.middle == pytest.approx(0.4 * max(work) / 60 * (1 + 3 / 8))
    assert found.exposed == pytest.approx(2 * 11 * 4 * 0.05 / 100)
    assert cost_of(parse_strategy("pipeline:stages=4,schedule=1f1b"), job).memory.activations.middle == pytest.approx(
        4 * 4 * 0.2 * MB
    )
    assert found.memory.activations.middle == pytest.approx(8 * 4 * 0.2 * MB)
    with pytest.raises(CannotRun, match="4 layers, too few for 8"):
        cost_of(parse_strategy("pipeline"), Job(divided, Cluster(1, 8, bandwidth=1.0), 32))


def test_periodic_averaging_divides_the_traffic() -> None:
    assert cost("local_sgd:every=8").sent_bytes == pytest.approx(2 * 0.75 * 48 * MB / 8)
    assert cost("diloco:every=100").exposed == pytest.approx(0.0072)
    assert cost("diloco").memory.optimizer == pytest.approx(96 * MB + 96 * MB)


def test_a_parameter_server() -> None:
    """4 workers: 2 x 4 G + G + 4 P through one server's link, and 4 gradients in its memory."""
    found = cost("parameter_server")
    assert found.exposed == pytest.approx(13 * 48 / 100)
    assert found.host_bytes == pytest.approx((48 + 96 + 4 * 48) * MB)
    assert cost("parameter_server:servers=2").exposed == pytest.approx(13 * 48 / 200)
    assert found.memory.optimizer == 0


def test_one_process_needs_one_node() -> None:
    host = Cluster(1, 4, bandwidth=100 * MB, host_bandwidth=50 * MB)
    assert cost("mirrored").exposed == pytest.approx(0.72)
    assert cost("data_parallel").exposed == pytest.approx(3 * 96 / 100)
    assert cost("central_storage", host).exposed == pytest.approx(96 / 50 + 3 * 96 / 100)
    assert cost("central_storage", host).host_bytes == pytest.approx(192 * MB)
    with pytest.raises(CannotRun, match="--host-bandwidth"):
        cost("central_storage")
    for name in ("mirrored", "data_parallel", "central_storage"):
        with pytest.raises(CannotRun, match="several nodes"):
            cost(name, PAIRS)


def test_the_largest_shard_counts() -> None:
    """33 examples over 4 devices: one of them has 9."""
    assert cost("ddp", batch=33).compute.forward.middle == pytest.approx(0.4 * 9 / 32)
    assert Job(Measurement(**{**vars(MODEL), "micro_batch": 4}), FOUR, 33).micro_batches(4) == (3, 3)


def test_the_moments_of_a_backward() -> None:
    """Layers of 5 and 1 with gradients of 2 and 4; outside of them, 3 and 1."""
    assert list(backward_moments([5, 1], [2, 4], 3, 1)) == [(0, 9), (1, 6), (5, 5), (7, 0)]


def test_the_moments_of_a_sharded_backward() -> None:
    """Two layers of 4 and 6 bytes, 2 outside, over 2 devices."""
    given = [4.0, 6.0], [4.0, 6.0], [3.0, 1.0], (2.0, 2.0, 5.0), 2
    found = [tuple(moment) for moment in sharded_moments(*given, keeps=False, accumulates=False)]
    assert found == [
        (2, 0, 3 + 1 + 5, 0, True),  # the loss
        (2 + 6 + 4, 2, 3 + 1, 0, False),  # the second layer begins; the first is gathered already
        (2 + 6 + 4, 2 + 6, 3, 0, False),
        (2 + 4, 2 + 3, 3, 6, False),  # the first layer; the second's gradients are reduced
        (2 + 4, 2 + 3 + 4, 0, 6, False),
        (2, 2 + 3 + 2, 0, 2, False),  # what is outside
    ]
    kept = [moment.gathered for moment in sharded_moments(*given, keeps=True, accumulates=False)]
    assert kept == [12, 12, 12, 6, 6, 2]
    added = [moment.gradients for moment in sharded_moments(*given, keeps=False, accumulates=True)]
    assert added == [6, 8, 14, 8, 12, 8]


@pytest.mark.parametrize(
    ("outside", "loss_live", "live", "update", "moment"),
    [
        # Measured, 32 examples: 12.8 MB in layers and 19.2 MB outside, and 20 MB at the loss. A device has 8 examples,
        # so the end of the backward is larger, with 48 MB of gradients. Then an update holds 30 MB.
        (0.6, 52, 0, 0, (48, 0, 0)),
        (0.6, 52, 0, 30, (48, 0, 30)),
        # 192 MB outside, and 20 MB at the loss
        (6, 224.8, 0, 0, (0, 51.2, 5)),
        # layers hold 40 MB more than the 48 MB of gradients at the end
        (0.6, 32, 88, 0, (48, 0, 10)),
    ],
)
def test_temporary_tensors(
    outside: float, loss_live: float, live: float, update: float, moment: tuple[float, float, float]
) -> None:
    changed = {
        "activation_bytes": outside * MB,
        "loss_live_bytes": loss_live * MB,
        "live_bytes": live * MB,
        "update_bytes": update * MB,
    }
    found = cost_of(parse_strategy("ddp"), Job(Measurement(**{**vars(MODEL), **changed}), FOUR, 32)).memory
    gradients, saved, temporary = moment
    assert found.gradients == pytest.approx(gradients * MB)
    assert found.activations.middle == pytest.approx(saved * MB)
    assert found.temporary == pytest.approx(temporary * MB)


def test_what_runs_out_first() -> None:
    small = Cluster(1, 4, memory=200 * MB, host_memory=100 * MB, bandwidth=1e12, host_bandwidth=1e12)
    ddp = cost("ddp", small)
    used = limits.utilization(ddp, small, 32)
    assert limits.first(used) == limits.DEVICE_MEMORY
    assert used[limits.DEVICE_MEMORY] == pytest.approx((48 + 48 + 96 + 48 + 5) / 200)
    assert limits.fits(ddp, small) is False
    central = cost("central_storage", small)
    assert limits.first(limits.utilization(central, small, 32)) == limits.HOST_MEMORY
    assert limits.fits(central, small) is False
    assert limits.first(limits.utilization(cost("ddp"), FOUR, 32)) == limits.NETWORK
    wide = Cluster(1, 4, bandwidth=1e12)
    used = limits.utilization(cost("ddp", wide, 2), wide, 2)
    assert (limits.first(used), used[limits.BATCH]) == (limits.BATCH, 2.0)


def test_every_strategy_is_modelled_or_named_as_not() -> None:
    from paceline.planning.candidates import NOT_MODELLED

    assert MODELS.keys() | NOT_MODELLED.keys() == STRATEGIES.keys()
    tried = {spec.name for nodes in (1, 2) for spec in all_candidates(Cluster(nodes, 4))}
    assert tried | {"single"} == MODELS.keys()
    assert [spec.name for spec in all_candidates(Cluster(1, 1))] == ["single"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ddp:codec=bf16", "option codec is not modelled"),
        ("ddp:reducer=direct", "reducer=direct is not modelled"),
        ("fsdp:offload=true", "option offload is not modelled"),
        ("fsdp:stage=two", "stage=two cannot be read"),
        ("fsdp:stage=9", "stage=9: use 1"),
        ("fsdp:replicate=3", "replicate=3"),
        ("pipeline:schedule=other", "schedule='other' is not known"),
        ("parameter_server:mode=async", "its workers do not wait"),
        ("local_sgd:every=0", "every=0"),
    ],
)
def test_options_without_a_model_are_refused(text: str, reason: str) -> None:
    with pytest.raises(CannotRun, match=reason):
        cost(text)


def test_one_bucket() -> None:
    assert cost("ddp:bucket_mb=inf").exposed == pytest.approx(0.72)


def test_all_candidates_have_a_cost_on_many_shapes() -> None:
    """Finite, positive, and in order, or a reason."""
    for nodes, per_node in ((1, 2), (1, 8), (2, 1), (3, 2), (8, 8)):
        cluster = Cluster(nodes, per_node, 80e9, 1e11, 1e10, 1e-6, 1e-5, 1e12, 1e10)
        for spec in all_candidates(cluster):
            try:
                found = cost_of(spec, Job(MODEL, cluster, 64))
            except CannotRun as error:
                assert str(error)
                continue
            low, middle, high = found.seconds(cluster)
            assert 0 < low <= middle <= high < 1e4, spec
            assert all(part >= 0 for part in found.memory.total), spec


def test_a_spec_keeps_its_name() -> None:
    assert str(StrategySpec("fsdp", {"stage": 3})) == "fsdp:stage=3"
