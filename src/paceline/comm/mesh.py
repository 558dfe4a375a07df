"""The processes of a run as a mesh of named dimensions, and the groups that share, sum or compare tensors.

    dimension    processes along it have                    used by
    replicate    different examples, the same parameters    ddp, shared, local_sgd; replicas of the other strategies
    shard        different examples, shards of parameters    fsdp, deepspeed
    stage        the same examples, different layers        pipeline
    tensor       the same examples, parts of layers         tensor
    sequence     the same examples and parameters, parts of the tokens    ulysses

replicate and shard are data dimensions: a global batch is split over their product. stage and tensor are model
dimensions. Ranks are adjacent along the last dimension, since model dimensions communicate most and adjacent ranks are
on one machine:

    replicate 2, tensor 2:      tensor 0   tensor 1
              replicate 0:      rank 0     rank 1
              replicate 1:      rank 2     rank 3

A mesh has one group (group.py) for each purpose:

    data       the data-parallel group
    gradient   sums gradients
    layers     the processes of `gradient`, for layers that sum in the middle of a forward
    model      the model-parallel group: its processes hold different parameters of the same replica

torch's DeviceMesh is made when it is first needed.

The mesh of the open run is the only ambient object (`current`), because layers in a user's model have no argument for
it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.comm.group import ALONE as ALONE
from paceline.comm.group import Group, Replicas, leave_neighbours
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


DATA, MODEL = ("replicate", "shard"), ("stage", "tensor")

_made: dict[tuple[Any, ...], Any] = {}
"""A cache of DeviceMeshes, torch's groups and our groups. Later runs in the same process reuse them."""


def check_size(size: int, world: int | None, setting: str) -> None:
    """Raises SettingError if `world` processes (None: unknown) cannot be divided into groups of `size`. A group of one
    is valid only in a run of one process."""
    if world == 1 and size > 1:
        raise SettingError(
            f"{setting}={size}: this run has 1 process. Start {size} processes, or drop {setting.split()[-1]}."
        )
    if world == size == 1:
        return
    if world is None and size < 2:
        raise SettingError(f"{setting}={size}: it must divide the number of processes, and be at least 2.")
    if world is None or (size >= 2 and world % size == 0):
        return
    fits = [n for n in range(2, world + 1) if world % n == 0]
    start = f"; or start {size * max(1, round(world / size))} processes" if size >= 2 else ""
    raise SettingError(
        f"{setting}={size}: it must divide the number of processes, {world}, and be at least 2. Use "
        f"{' or '.join(map(str, fits))}{start}."
    )


def _refuse_gloo_on_cuda(device: torch.device, sizes: Mapping[str, int]) -> None:
    """Raises SettingError if gloo would carry sharded tensors on a GPU. It does so if processes share a GPU.

    torch's functional collectives (used by DTensor and fully_shard) then end the process with SIGSEGV (torch 2.11 and
    CUDA 13.0). Gloo's other collectives of CUDA tensors work.
    """
    cut = [name for name in ("shard", "tensor") if sizes.get(name, 1) > 1]
    if not cut or device.type != "cuda" or not dist.is_initialized():
        return
    backend = str(dist.get_backend_config())
    if "cuda:gloo" in backend.split(","):
        raise SettingError(
            f"the strategy shards tensors over processes that share a GPU ({device}). Only gloo works there, and "
            "torch's collectives of sharded tensors crash with it. Start one process per GPU, set device='cpu', or use "
            "a strategy that keeps whole tensors, such as --strategy ddp."
        )


class ReplicaThread(threading.Thread):
    """A thread that computes one of several replicas of this process."""

    replicas: Replicas


class Mesh:
    """The mesh of a run, seen from one process.

    sizes: processes along each dimension; their product is the number of processes. independent: whether replicas are
    independent, so that gradients are not summed over processes.
    """

    def __init__(
        self, device: torch.device, rank: int, sizes: Mapping[str, int] | None = None, *, independent: bool = False
    ) -> None:
        self.sizes = dict(sizes or {"replicate": 1})
        _refuse_gloo_on_cuda(device, self.sizes)
        self.device, self.rank, self.independent = device, rank, independent
        self._world: dist.ProcessGroup | None = None  # the group of all processes, once `narrow` has replaced it
        self.replicas: Replicas = ALONE  # the replicas of the current batch, for all threads except ReplicaThreads
        self.on_all_members = True  # whether all members run the current code, not only one stage
        place, self.coordinates = rank, dict[str, int]()
        for name in reversed(self.sizes):
            place, self.coordinates[name] = divmod(place, self.sizes[name])
        self.shards, self.shard = 1, 0  # the number of shards of a global batch, and this process's shard
        for name in self.sizes:
            if name in DATA:
                self.shards *= self.sizes[name]
                self.shard = self.shard * self.sizes[name] + self.coordinates[name]
        self.data: Group = self._over(DATA)
        self.gradient: Group = ALONE if independent else self.data
        self.layers: Group = self.gradient  # see `separate_layers`
        self.model: Group = self._over(("shard", *MODEL))

    @property
    def lockstep(self) -> Group:
        """The processes that make each step together: all members, or only this process if replicas are independent."""
        return ALONE if self.independent else world_group()

    def size(self, name: str) -> int:
        """Processes along a dimension."""
        return self.sizes.get(name, 1)

    def coordinate(self, name: str) -> int:
        """This process's coordinate along a dimension, from 0."""
        return self.coordinates.get(name, 0)

    def at(self, **coordinates: int) -> int:
        """The rank at these coordinates. Dimensions that are not given use this process's coordinate."""
        place = 0
        for name, size in self.sizes.items():
            place = place * size + coordinates.get(name, self.coordinates[name])
        return place

    def group(self, name: str) -> Group:
        """The group of this process along one dimension."""
        return self._over((name,))

    def along(self, *names: str) -> DeviceMesh:
        """torch's DeviceMesh of these dimensions."""
        whole = self._device_mesh()
        return whole if tuple(self.sizes) == names else whole[names if len(names) > 1 else names[0]]

    def separate_layers(self) -> None:
        """Give the sums of layers a separate group, so that they do not queue behind gradients.

        Collective over the world. A second call, and a later run, reuse the same group.
        """
        if self.layers is self.gradient and self.gradient is not ALONE:
            self.layers = group_of(self._subgroup(tuple(name for name in self.sizes if name in DATA), "layers"))

    def background(self) -> Group:
        """Return a group of all processes for background sums. They do not queue behind the collectives of the training
        thread.

        Collective over the world. A second call, and a later run, reuse the same group.
        """
        if prod(self.sizes.values()) == 1:
            return ALONE
        return group_of(self._subgroup(tuple(self.sizes), "background"))

    def narrow(self, count: int) -> None:
        """Make the first `count` processes the members of the run. From here on, every other process is in a group
        alone.

        The members' group replaces torch's default group until `close`. Collective over the world. A later run reuses
        the group.
        """
        key = (id(dist.group.WORLD), "first", count)
        if key not in _made:
            others = range(count, prod(self.sizes.values()))
            _made[key] = dist.new_subgroups_by_enumeration([list(range(count)), *([rank] for rank in others)])[0]
        self._world, dist.group.WORLD = dist.group.WORLD, _made[key]
        self.data = world_group()
        summed_over = self.layers
        self.gradient = self.layers = ALONE if self.independent else self.data
        if self.replicas is summed_over:
            self.replicas = self.layers

    def _over(self, names: tuple[str, ...]) -> Group:
        """The group of the processes that differ from this process along these dimensions only."""
        chosen = tuple(name for name in self.sizes if name in names)
        if prod(self.sizes[name] for name in chosen) == 1:
            return ALONE
        if prod(self.sizes.values()) == prod(self.sizes[name] for name in chosen):
            return world_group()
        return group_of(self._subgroup(chosen))

    def _subgroup(self, chosen: tuple[str, ...], purpose: str = "") -> dist.ProcessGroup:
        """torch's group of the processes that differ from this process along these dimensions only. purpose: if given,
        make a separate group for it."""
        if not purpose and prod(self.sizes.values()) == prod(self.sizes[name] for name in chosen):
            world = dist.group.WORLD
            assert world is not None
            return world
        key = (id(dist.group.WORLD), *self.sizes.items(), *chosen, purpose)
        if key not in _made:
            others = [[(name, i) for i in range(self.sizes[name])] for name in self.sizes if name not in chosen]
            inner = [[(name, i) for i in range(self.sizes[name])] for name in chosen]
            ranks = [[self.at(**dict(outer), **dict(own)) for own in product(*inner)] for outer in product(*others)]
            _made[key] = dist.new_subgroups_by_enumeration(ranks)[0]
        group: dist.ProcessGroup = _made[key]
        return group

    def _device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh, from groups made here. init_device_mesh would split the world's group if that group is
        bound to a GPU. The gloo half would then get NCCL's options, which some versions of torch refuse."""
        from torch.distributed.device_mesh import DeviceMesh  # imported here: most runs need no DeviceMesh

        key = (id(dist.group.WORLD), self.device.type, *self.sizes.items())
        if key not in _made:
            groups = [self._subgroup((name,)) for name in self.sizes]
            ranks = torch.arange(prod(self.sizes.values())).reshape(tuple(self.sizes.values()))
            _made[key] = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(self.sizes))
        found: DeviceMesh = _made[key]
        return found

    @contextlib.contextmanager
    def computing(self, replicas: Replicas, on_all_members: bool = True) -> Iterator[None]:
        """Set the replicas that compute a batch within the block. on_all_members: whether all members run the block."""
        before = self.replicas, self.on_all_members
        self.replicas, self.on_all_members = replicas, on_all_members
        try:
            yield
        finally:
            self.replicas, self.on_all_members = before

    def close(self) -> None:
        """Drop the groups. Their threads must end before the interpreter does."""
        self.data = self.gradient = self.layers = self.model = ALONE
        self.replicas = ALONE
        leave_neighbours()
        if self._world is not None:
            dist.group.WORLD, self._world = self._world, None


_outside = Mesh(torch.device("cpu"), 0)  # used while no run is open
_open = _outside


def current() -> Mesh:
    """The mesh of the run that is open in this process."""
    return _open


class _Members(Group):
    """The group of all members of the run. Refuses calls from a computation that not all members run."""

    def check(self) -> None:
        check_everywhere()


def check_everywhere() -> None:
    """Raises UsageError in a computation that not all members of the run make, such as the forward of one of several
    replicas in a process. In it a sum over all members would be silently wrong, or would wait for ever."""
    if not (_open.on_all_members and replicas_here().on_all_members):
        raise UsageError(
            "run.gather, run.sum, run.mean or run.ratio (or another sum over all processes) was called in the loss "
            "function. Under this strategy each replica or stage calls the loss function for its own examples only. "
            "Make the call outside the loss function, or use one replica per process (--strategy ddp)."
        )


def world_group() -> Group:
    """The group of all members of the run, which is torch's default group. ALONE if there is no process group."""
    world = dist.group.WORLD
    return ALONE if world is None else group_of(world)


def group_of(native: dist.ProcessGroup) -> Group:
    """Our `Group` for one of torch's groups. The same group always gives the same object."""
    found: Group | None = _made.get((id(native), "group"))
    if found is None or found.native is not native:
        found = _made[id(native), "group"] = (_Members if native is dist.group.WORLD else Group)(native)
    return found


def data_group() -> Group:
    """The data-parallel group of the open run. Raises UsageError in a computation that not all members run."""
    check_everywhere()
    return _open.data


def new_group() -> Group:
    """Make a new group of all members. Its collectives need no fixed order relative to those of other groups.
    Collective. All ranks must drop the group before the process group ends."""
    return ALONE if world_group().size == 1 else Group(dist.new_group())


def replicas_here() -> Replicas:
    """The replicas that the current thread computes with."""
    thread = threading.current_thread()
    return thread.replicas if isinstance(thread, ReplicaThread) else _open.replicas


def use(mesh: Mesh | None) -> None:
    """Set the mesh of the open run; None: no run is open."""
    global _open
    _open = _outside if mesh is None else mesh


def forget() -> None:
    """Forget the groups of all meshes, before the process group is destroyed."""
    leave_neighbours()
    _made.clear()
