"""The strategies, and products of strategies, that a plan tries on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import StrategySpec, parse_strategy
from paceline.errors import SettingError
from paceline.planning.cluster import Cluster
from paceline.planning.cost_model import MODELS
from paceline.trials.start import split_strategies

NOT_MODELLED = {
    "deepspeed": "see fsdp of the same stage",
    "shared": "it needs the CPUs of one machine",
    "fsdp+ulysses": "its memory depends on the lengths of sequences",
    "ulysses": "its memory depends on the lengths of sequences",
}


def read_candidates(text: str | None, cluster: Cluster) -> list[StrategySpec]:
    """Read `--strategies`. None: all that the cluster allows.

    Commas separate strategies, and also the options of a strategy, as for `paceline compare`.

    Raises:
        SettingError: an unknown name, or a strategy that is not modelled.
    """
    if text is None:
        return list(all_candidates(cluster))
    whole = split_strategies(text, MODELS.keys() | NOT_MODELLED.keys())
    for name in NOT_MODELLED:
        if any(part.partition(":")[0] == name for part in whole):
            raise SettingError(f"--strategies: {name} is not modelled: {NOT_MODELLED[name]}. Leave it out.")
    return [parse_strategy(part) for part in dict.fromkeys(whole)]


def all_candidates(cluster: Cluster) -> Iterator[StrategySpec]:
    """Every modelled strategy, with the sizes that fit the nodes and devices."""
    size, nodes, per_node = cluster.size, cluster.nodes, cluster.devices_per_node
    if size == 1:
        yield StrategySpec("single", {})
        return
    yield StrategySpec("ddp", {})
    for stage in (1, 2, 3):
        yield StrategySpec("fsdp", {"stage": stage})
    yield StrategySpec("fsdp", {"stage": 3, "mixed": "bf16"})
    yield StrategySpec("fsdp", {"stage": 3, "checkpointing": True})
    if nodes > 1 and per_node > 1:
        yield StrategySpec("fsdp", {"stage": 3, "replicate": nodes})  # HSDP: a replica on each node
    inner = [t for t in (2, 4, 8, 16) if per_node % t == 0]
    for t in inner:
        yield StrategySpec("tensor", {"size": t})
        if size // t >= 2:
            yield StrategySpec("fsdp+tensor", {"size": t})
    for p in dict.fromkeys((2, 4, 8, per_node, nodes, size)):
        if p > 1 and size % p == 0:
            yield StrategySpec("pipeline", {"stages": p, "schedule": "1f1b"})
    yield StrategySpec("local_sgd", {"every": 8})
    yield StrategySpec("diloco", {"every": 100})
    yield StrategySpec("parameter_server", {"servers": nodes})
    if nodes == 1:
        for name in ("mirrored", "data_parallel", "central_storage"):
            yield StrategySpec(name, {})
