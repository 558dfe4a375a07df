"""The description of a cluster: sizes, rates, and messages about bad input."""

from __future__ import annotations

import re

import pytest

from paceline.errors import SettingError
from paceline.planning.candidates import read_candidates
from paceline.planning.cluster import Cluster, ClusterOptions, make_cluster, read_fraction
from paceline.planning.device_figures import ANY_FRACTION, DEVICES, H100_FRACTION
from paceline.planning.measurement import read_measurement
from paceline.quantities import read_quantity


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80GB", "bytes", 80e9),
        ("80GiB", "bytes", 80 * 2**30),
        ("1e9", "bytes", 1e9),
        ("0.5 TB", "bytes", 0.5e12),
        ("450GB/s", "rate", 450e9),
        ("400Gbit/s", "rate", 50e9),
        ("100Mbit/s", "rate", 12.5e6),
        ("989TFLOP/s", "flops", 989e12),
        ("1.5PFLOPS", "flops", 1.5e15),
        ("312e12", "flops", 312e12),
    ],
)
def test_sizes_and_rates(text: str, kind: str, value: float) -> None:
    assert read_quantity("--option", text, kind) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("much", "bytes"), ("-1GB", "bytes"), ("80GB/s", "bytes"), ("80Gbit", "bytes"), ("0GB", "bytes"),
        ("989TFLOP/s", "rate"), ("450GB/s", "flops"), ("", "rate"), ("1e999", "bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_an_example(text: str, kind: str) -> None:
    with pytest.raises(SettingError, match=rf"^--memory {re.escape(text)}: (write|must be above 0)"):
        read_quantity("--memory", text, kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes 0: give at least 1"),
        ({"gpus": -1}, "--gpus -1: give at least 1"),
        ({"gpu": "h10"}, "--gpu h10: not known. Known: a100, "),
        ({"gpus": 2}, "--bandwidth is missing"),
        ({"nodes": 2, "gpu": "h100"}, "--node-bandwidth is missing"),
        ({"speed": 0.0}, "--speed 0: give a number above 0"),
        ({"speed": 2.0, "gpu": "h100"}, "--speed 2: the compute time comes from the FLOP/s of --gpu"),
        ({"speed": 2.0, "flops": "1T"}, "of --flops. Drop one"),
        ({"mfu": "0.4"}, "--mfu 0.4: needs the peak of a device"),
        ({"latency": -1.0}, "--latency -1: give seconds"),
        ({"node_latency": float("nan")}, "--node-latency nan"),
    ],
)
def test_bad_descriptions_name_the_option_and_the_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        make_cluster(ClusterOptions(**options), accelerated=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "1.5", "x", "0.5:0.3", "0.1:0.2:0.3", "", "nan"])
def test_bad_fractions(text: str) -> None:
    with pytest.raises(SettingError, match="write a fraction"):
        read_fraction(text)


def test_a_known_device_and_overrides() -> None:
    cluster = make_cluster(ClusterOptions(gpus=8, gpu="H100", memory="96GB"), accelerated=False)
    assert (cluster.flops, cluster.memory, cluster.bandwidth) == (989e12, 96e9, 450e9)
    assert cluster.fraction == H100_FRACTION
    assert not cluster.shares_cores
    assert make_cluster(ClusterOptions(gpu="l4"), accelerated=False).fraction == ANY_FRACTION
    assert make_cluster(ClusterOptions(gpu="l4", mfu="0.3:0.5"), accelerated=False).fraction == (0.3, 0.4, 0.5)
    for figures in DEVICES.values():
        assert figures.source.startswith("NVIDIA")


def test_cpus_share_their_cores_with_sending() -> None:
    assert make_cluster(ClusterOptions(), accelerated=False).shares_cores
    assert not make_cluster(ClusterOptions(), accelerated=True).shares_cores


def test_strategies_by_name() -> None:
    found = read_candidates("ddp,fsdp:stage=2,replicate=2", Cluster(2, 2))
    assert [str(spec) for spec in found] == ["ddp", "fsdp:stage=2,replicate=2"]
    with pytest.raises(SettingError, match="deepspeed is not modelled"):
        read_candidates("deepspeed", Cluster(1, 2))
    with pytest.raises(SettingError, match=r"'dpp' is not known\. Did you mean 'ddp'"):
        read_candidates("dpp", Cluster(1, 2))
    with pytest.raises(SettingError, match="contains no name"):
        read_candidates(",", Cluster(1, 2))


@pytest.mark.parametrize(
    "document", [None, [], {}, {"schema": 1}, {"measurement": {"schema": 2}}, {"schema": 1, "x": 3}]
)
def test_a_file_that_is_no_measurement(document: object) -> None:
    with pytest.raises(SettingError, match=r"--from old\.json: .*paceline plan --json"):
        read_measurement(document, "old.json")
