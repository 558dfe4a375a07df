"""The processes of a run as a mesh of named dimensions, and over which of them something is cut, summed or compared.

    dimension    processes along it have               used by
    replicate    other examples, the same parameters   ddp, shared, local_sgd, the replicas of fsdp, tensor, pipeline
    shard        other examples, slices of parameters  fsdp, deepspeed
    stage        the same examples, other layers       pipeline
    tensor       the same examples, parts of layers    tensor

replicate and shard are data dimensions: a global batch is cut over their product. stage and tensor are model
dimensions. Along the last dimension ranks are neighbours, since model dimensions talk most and neighbours are on one
machine:

    replicate 2, tensor 2:      tensor 0   tensor 1
              replicate 0:      rank 0     rank 1
              replicate 1:      rank 2     rank 3

A mesh has groups by purpose: `data`, the data-parallel group; `gradient`, over which gradients are summed; `layers`, of
the same processes, over which layers sum in the middle of a forward; and `model`, the model-parallel group, whose
processes have other parameters of the same replica. torch's DeviceMesh is made when a group of it is first needed.

The mesh of the open run is the only ambient object (`current`): layers in a user's model have no argument for it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import SettingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OneProcess:
    """The type of ALONE."""


ALONE = OneProcess()
"""The group of this process alone, in which nothing travels."""

Group = dist.ProcessGroup | OneProcess | None
"""Processes that make a collective call together. None: all members of the run."""

DATA, MODEL = ("replicate", "shard"), ("stage", "tensor")

_made: dict[tuple[Any, ...], Any] = {}
"""DeviceMeshes and groups of this process group, for runs that follow each other in one process."""


def check_size(size: int, world: int | None, setting: str) -> None:
    """Raises SettingError where `world` processes (None: not known) cannot be cut into groups of `size`. One process is
    a group of its own."""
    if world == 1 and size > 1:
        raise SettingError(
            f"{setting}={size}: this run has 1 process. Start {size} processes, or leave {setting.split()[-1]} out."
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
        f"{setting}={size}: it must divide the number of processes, {world}, and be at least 2. Here that is "
        f"{' or '.join(map(str, fits))}{start}."
    )


def _refuse_gloo_on_cuda(device: torch.device, sizes: Mapping[str, int]) -> None:
    """Raises SettingError where sharded tensors on a GPU would travel through gloo, as they do between processes on one
    GPU. torch's functional collectives (those of DTensor and fully_shard) end such a process with SIGSEGV (torch 2.11
    and CUDA 13.0); gloo's other collectives of CUDA tensors work."""
    cut = [name for name in ("shard", "tensor") if sizes.get(name, 1) > 1]
    if not cut or device.type != "cuda" or not dist.is_initialized():
        return
    backend = str(dist.get_backend_config())
    if "cuda:gloo" in backend.split(","):
        raise SettingError(
            f"the strategy shards tensors over processes that share a GPU ({device}). Gloo would carry them there, and "
            "torch's collectives of sharded tensors crash. Start one process for each GPU, set device='cpu', or take a "
            "strategy that keeps whole tensors, such as --strategy ddp."
        )


class Replicas(ABC):
    """The replicas that compute one global batch together, seen from one of them. Layers use it for sums in the middle
    of a forward; all replicas call it equally often and in the same order. comm/replicas.py lists the kinds."""

    everywhere = True  # whether all members of the run compute this; else calls over all members are refused

    @property
    @abstractmethod
    def size(self) -> int:
        """How many replicas there are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The index of this replica, from 0."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum of all replicas' tensors (of one shape and dtype), the same bits on each.

        Not differentiable; for that see `differentiable_sum`.
        """

    def rows(self, row: Tensor) -> Tensor:
        """(size, ...): all replicas' tensors (of one shape and dtype), in their order, the same on each."""
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return self.sum(table)


class OneReplica(Replicas):
    """One replica: nothing is added."""

    size = 1
    rank = 0

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


class ReplicaThread(threading.Thread):
    """A thread that computes one of several replicas of this process."""

    replicas: Replicas


class Mesh:
    """The mesh of a run, seen from one process.

    sizes: of the dimensions; their product is the number of processes. independent: whether replicas are independent,
    so that gradients are not summed over processes.
    """

    def __init__(
        self, device: torch.device, rank: int, sizes: Mapping[str, int] | None = None, *, independent: bool = False
    ) -> None:
        self.sizes = dict(sizes or {"replicate": 1})
        _refuse_gloo_on_cuda(device, self.sizes)
        self.device, self.rank, self.independent = device, rank, independent
        # (id of the process group of all, group) -> connections between the group's processes where they are on one
        # machine, or None: made by comm/neighbours.py, closed with the mesh.
        self.neighbours: dict[tuple[int, Group], Any] = {}
        self._world: dist.ProcessGroup | None = None  # the group of all processes, once `narrow` has replaced it
        self.replicas: Replicas = OneReplica()  # that compute a batch together, as threads that are no replica's see it
        self.everywhere = True  # whether all members run the current code, and not one stage alone
        place, self.coordinates = rank, dict[str, int]()
        for name in reversed(self.sizes):
            place, self.coordinates[name] = divmod(place, self.sizes[name])
        self.shards, self.shard = 1, 0  # into how many a global batch is cut, and which of them this process has
        for name in self.sizes:
            if name in DATA:
                self.shards *= self.sizes[name]
                self.shard = self.shard * self.sizes[name] + self.coordinates[name]
        self.data: Group = self._over(DATA)
        self.gradient: Group = ALONE if independent else self.data
        self.layers: Group = self.gradient  # see `separate_layers`
        self.model: Group = self._over(("shard", *MODEL))

    def size(self, name: str) -> int:
        """Processes along a dimension."""
        return self.sizes.get(name, 1)

    def coordinate(self, name: str) -> int:
        """This process's coordinate along a dimension, from 0."""
        return self.coordinates.get(name, 0)

    def at(self, **coordinates: int) -> int:
        """The rank of the process with these coordinates and, along all other dimensions, this process's."""
        place = 0
        for name, size in self.sizes.items():
            place = place * size + coordinates.get(name, self.coordinates[name])
        return place

    def group(self, name: str) -> Group:
        """The group of this process along one dimension."""
        return self._over((name,))

    def along(self, *names: str) -> DeviceMesh:
        """torch's mesh of these dimensions."""
        whole = self._device_mesh()
        return whole if tuple(self.sizes) == names else whole[names if len(names) > 1 else names[0]]

    def separate_layers(self) -> None:
        """Gives the sums of layers a group of their own, in which they do not queue behind gradients. Collective over
        the world. A second call finds the same group, and so does a later run."""
        if self.layers is self.gradient and self.gradient is not ALONE:
            self.layers = self._subgroup(tuple(name for name in self.sizes if name in DATA), "layers")

    def background(self) -> Group:
        """A group of all processes for sums that are under way while the training thread makes other collectives. They
        do not queue behind each other. Collective over the world. A second call finds the same group, and so does a
        later run."""
        return self._subgroup(tuple(self.sizes), "background") if prod(self.sizes.values()) > 1 else ALONE

    def narrow(self, count: int) -> None:
        """The first `count` processes are the members of the run from here on, and each other one is alone: their group
        takes the place of torch's default group until `close`. Collective over the world. A later run finds the same
        group."""
        key = (id(dist.group.WORLD), "first", count)
        if key not in _made:
            others = range(count, prod(self.sizes.values()))
            _made[key] = dist.new_subgroups_by_enumeration([list(range(count)), *([rank] for rank in others)])[0]
        self._world, dist.group.WORLD = dist.group.WORLD, _made[key]

    def _over(self, names: tuple[str, ...]) -> Group:
        """The group of the processes that differ from this one along these dimensions only."""
        chosen = tuple(name for name in self.sizes if name in names)
        if prod(self.sizes[name] for name in chosen) == 1:
            return ALONE
        if prod(self.sizes.values()) == prod(self.sizes[name] for name in chosen):
            return None
        return self._subgroup(chosen)

    def _subgroup(self, chosen: tuple[str, ...], purpose: str = "") -> dist.ProcessGroup:
        """torch's group of the processes that differ from this one along these dimensions only. purpose: where it is
        to be another group than that of all purposes."""
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
        """torch's mesh, of groups made here. init_device_mesh would split the world's group where that is bound to a
        GPU: then gloo's half is handed NCCL's options, which it refuses in some versions of torch."""
        from torch.distributed.device_mesh import DeviceMesh  # here: most runs need none

        key = (id(dist.group.WORLD), self.device.type, *self.sizes.items())
        if key not in _made:
            groups = [self._subgroup((name,)) for name in self.sizes]
            ranks = torch.arange(prod(self.sizes.values())).reshape(tuple(self.sizes.values()))
            _made[key] = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(self.sizes))
        found: DeviceMesh = _made[key]
        return found

    @contextlib.contextmanager
    def computing(self, replicas: Replicas, everywhere: bool = True) -> Iterator[None]:
        """Within the block these replicas compute a batch together. everywhere: whether all members do."""
        before = self.replicas, self.everywhere
        self.replicas, self.everywhere = replicas, everywhere
        try:
            yield
        finally:
            self.replicas, self.everywhere = before

    def close(self) -> None:
        """Drops the groups, whose threads must end before the interpreter does."""
        self.data = self.gradient = self.layers = self.model = ALONE
        self.replicas = OneReplica()
        self.leave_neighbours()
        if self._world is not None:
            dist.group.WORLD, self._world = self._world, None

    def leave_neighbours(self) -> None:
        """Closes the connections to other processes."""
        for connections in self.neighbours.values():
            if connections is not None:
                connections.close()
        self.neighbours.clear()


_outside = Mesh(torch.device("cpu"), 0)  # where no run is open
_open = _outside


def current() -> Mesh:
    """The mesh of the run that is open in this process."""
    return _open


def replicas_here() -> Replicas:
    """The replicas of the computation in this thread."""
    thread = threading.current_thread()
    return thread.replicas if isinstance(thread, ReplicaThread) else _open.replicas


def use(mesh: Mesh | None) -> None:
    """Sets the mesh of the open run; None: no run is open."""
    global _open
    _open = _outside if mesh is None else mesh


def forget() -> None:
    """Forgets the groups of all meshes, since the process group is about to be destroyed."""
    _made.clear()
    _outside.leave_neighbours()
