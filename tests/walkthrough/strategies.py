"""The strategies that the jobs run under: how each is started, which jobs it takes, and how near it must come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """spec: as on the command line; {n} is the number of replicas, {devices} as many CPUs.

    one_process: its replicas are devices of one process. forms: of the jobs. jobs: those that it takes; left out is
    what it refuses, and says so. optimizers, micro: likewise. sgd, adamw: the most that weights may be apart, as a
    share of their norm. factor: processes for each replica.
    """

    spec: str
    one_process: bool = False
    forms: tuple[str, ...] = ("closure", "loop")
    jobs: str = "abcdefgh"
    sgd: float = 1e-10
    adamw: float = 1e-8
    worlds: tuple[int, ...] = (2, 3, 4)
    refused: tuple[str, ...] = ()  # variants whose names end so
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    micro: tuple[bool, ...] = (False, True)
    factor: int = 1


WAYS = {
    "data_parallel": Way("data_parallel:devices={devices}", one_process=True, forms=("closure",)),
    "mirrored-ring": Way("mirrored:devices={devices},reduction=ring", one_process=True, forms=("closure",)),
    "mirrored-native": Way("mirrored:devices={devices}", one_process=True, forms=("closure",)),
    "central_storage": Way("central_storage:devices={devices}", one_process=True, forms=("closure",)),
    "ddp-ring": Way("ddp:reducer=ring"),
    "ddp-hierarchical": Way("ddp:reducer=hierarchical"),
    "ddp-reduce_to_one": Way("ddp:reducer=reduce_to_one"),
    "fsdp-1": Way("fsdp:stage=1", sgd=1e-8),
    "fsdp-2": Way("fsdp:stage=2", sgd=1e-8, jobs="abcegh", refused=("separate",)),  # d copies the model; a penalty on
    "fsdp-3": Way("fsdp:stage=3", sgd=1e-8, jobs="abcegh", refused=("separate",)),  # parameters outside of a forward
    "pipeline": Way("pipeline", forms=("closure",), jobs="ae", sgd=1e-8, worlds=(2, 3)),
    "pipeline-2": Way(
        "pipeline:stages=2,schedule=1f1b", forms=("closure",), jobs="ae", sgd=1e-8, worlds=(2,), factor=2
    ),
    "tensor": Way("tensor:size=2", jobs="bg", sgd=1e-8, worlds=(1, 2), factor=2),
    # b clips by the norm of the whole gradient, the shards of g are of two sizes, batch norm is by shard.
    "local_sgd-1": Way(
        "local_sgd:every=1,average_state=true", jobs="acdefh", refused=("bn",), optimizers=("sgd",), micro=(True,)
    ),
}


def spec(name: str, world: int) -> str | None:
    """What `paceline.start` is given on so many replicas."""
    return WAYS[name].spec.format(n=world, devices="+".join(["cpu"] * world)) if name else None


def processes(name: str, world: int) -> int:
    return world * WAYS[name].factor if name and not WAYS[name].one_process else 1 if name else world


def tolerance(name: str, optimizer: str) -> float:
    way = WAYS[name] if name else Way("")
    return way.sgd if optimizer == "sgd" else way.adamw
