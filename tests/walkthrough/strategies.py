"""The strategies that the jobs run under: how each is started, which jobs it takes, and how near it must come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Way:
    """spec: as on the command line; {n} is the number of replicas, {devices} as many CPUs.

    one_process: its replicas are devices of one process. forms: of the jobs. jobs: those that it takes; left out is
    what it refuses, and says so. optimizers, micro: likewise. sgd, adamw: the most that weights may be apart, as a
    share of their norm. factor: processes for each replica. servers: further processes, which compute nothing. daily:
    whether `cut_of_strategies` has cases of it.
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
    refuses: dict[str, str] = field(default_factory=dict)  # left-out job or job-variant -> what the error says
    daily: bool = True  # in `cut_of_strategies`
    servers: int = 0  # processes beside the replicas


_SLICES = {"d": "cannot be copied with copy.deepcopy", "f-other": "cannot be copied", "h-separate": "outside of any"}
_STAGES = {
    "c": "takes one model, not 2",
    "d": "cannot be copied with copy.deepcopy",
    "f-other": "cannot be copied",
    "g": "which did not use it in the first call",
    "h": "a gradient penalty",
}
_BLOCKS = dict.fromkeys(("a", "c", "d", "e-small", "f-other", "h-separate"), "No such block was found. Name the layers")

WAYS = {
    "data_parallel": Way("data_parallel:devices={devices}", one_process=True, forms=("closure",)),
    "mirrored-ring": Way("mirrored:devices={devices},reduction=ring", one_process=True, forms=("closure",)),
    "mirrored-native": Way("mirrored:devices={devices}", one_process=True, forms=("closure",)),
    "central_storage": Way("central_storage:devices={devices}", one_process=True, forms=("closure",)),
    "ddp-ring": Way("ddp:reducer=ring"),
    "ddp-hierarchical": Way("ddp:reducer=hierarchical"),
    "ddp-reduce_to_one": Way("ddp:reducer=reduce_to_one"),
    "shared": Way("shared"),
    "fsdp-1": Way("fsdp:stage=1", sgd=1e-8),
    "fsdp-2": Way("fsdp:stage=2", sgd=1e-8, jobs="abcegh", refused=("separate",), refuses=_SLICES),
    "fsdp-3": Way("fsdp:stage=3", sgd=1e-8, jobs="abcegh", refused=("separate",), refuses=_SLICES),
    "hsdp": Way(
        "fsdp:replicate=2", sgd=1e-10, jobs="abcegh", refused=("separate",), worlds=(4,), refuses=_SLICES, daily=False
    ),
    "hsdp-1": Way("fsdp:replicate=2,stage=1", sgd=1e-10, worlds=(4,), daily=False),
    "pipeline": Way("pipeline", forms=("closure",), jobs="abe", sgd=1e-8, worlds=(2, 3), refuses=_STAGES),
    "pipeline-2": Way(
        "pipeline:stages=2,schedule=1f1b",
        forms=("closure",),
        jobs="abe",
        sgd=1e-8,
        worlds=(2,),
        factor=2,
        daily=False,
    ),
    "tensor": Way("tensor:size=2", jobs="bg", sgd=1e-8, worlds=(1, 2), factor=2, refuses=_BLOCKS),
    "fsdp-tensor": Way("fsdp+tensor:size=2", jobs="bg", sgd=1e-10, worlds=(2,), factor=2, refuses=_BLOCKS, daily=False),
    # Not refused, and another model: b clips by the norm of the whole gradient, the shards of g are of two sizes, batch
    # norm is by shard. diloco is the same as local_sgd where its outer step is a plain one of rate 1.
    "local_sgd-1": Way(
        "local_sgd:every=1,average_state=true", jobs="acdefh", refused=("bn",), optimizers=("sgd",), micro=(True,)
    ),
    "diloco-1": Way(
        "diloco:every=1,outer_lr=1,outer_momentum=0,average_state=true",
        jobs="acdefh",
        refused=("bn",),
        optimizers=("sgd",),
        micro=(True,),
        daily=False,
    ),
    "parameter_server": Way("parameter_server", servers=1, daily=False),
    "parameter_server-2": Way("parameter_server:servers=2", worlds=(2,), servers=2, daily=False),
}


def spec(name: str, world: int) -> str | None:
    """What `paceline.start` is given on so many replicas."""
    return WAYS[name].spec.format(n=world, devices="+".join(["cpu"] * world)) if name else None


def processes(name: str, world: int) -> int:
    if not name:
        return world
    way = WAYS[name]
    return 1 if way.one_process else world * way.factor + way.servers


def tolerance(name: str, optimizer: str) -> float:
    way = WAYS[name] if name else Way("")
    return way.sgd if optimizer == "sgd" else way.adamw
