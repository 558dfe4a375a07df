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
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    micro: tuple[bool, ...] = (False, True)
    factor: int = 1


WAYS = {
    "data_parallel": Way("data_parallel:devices={devices}", one_process=True, forms=("closure",)),
}


def spec(name: str, world: int) -> str | None:
    """What `paceline.start` is given on so many replicas."""
    return WAYS[name].spec.format(n=world, devices="+".join(["cpu"] * world)) if name else None


def processes(name: str, world: int) -> int:
    return world * WAYS[name].factor if name and not WAYS[name].one_process else 1 if name else world


def tolerance(name: str, optimizer: str) -> float:
    way = WAYS[name] if name else Way("")
    return way.sgd if optimizer == "sgd" else way.adamw
