"""The processes of a run as a grid: rows of `size` processes that work on one shard together (the parts of a model, the
stages of a pipeline), and columns of those that have the same place in their row and each another shard.

    size 2, 4 processes:        part 0   part 1
                     shard 0:   rank 0   rank 1      a row: self.row
                     shard 1:   rank 2   rank 3      a column: self.column

Neighbouring ranks are a row, since a row talks more and neighbours are on one machine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.errors import SettingError

_made: dict[tuple[int, str, int], DeviceMesh] = {}


def check_size(size: int, world: int | None, setting: str) -> None:
    """Raises SettingError where so many processes (None: not known) cannot be rows of `size`."""
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


class Grid:
    """Seen from one process. shards, shard: how many rows there are, and which is this process's. size, part: how many
    processes are in a row, and which this one is."""

    def __init__(self, device: torch.device, size: int, setting: str) -> None:
        world = dist.get_world_size()
        check_size(size, world, setting)
        key = (id(dist.group.WORLD), device.type, size)
        if key not in _made:
            _made[key] = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("shard", "part"))
        mesh = _made[key]
        self.shards, self.size = world // size, size
        self.shard, self.part = divmod(dist.get_rank(), size)
        self.mesh: Any = mesh["part"]  # of one dimension: this process's row
        self.row: dist.ProcessGroup | None = mesh.get_group("part")
        self.column: dist.ProcessGroup | None = mesh.get_group("shard")

    def let_go(self) -> None:
        """Drops the groups, whose threads must end before the interpreter does."""
        self.mesh = self.row = self.column = None


def forget() -> None:
    """The process group is about to be destroyed, and the groups of all grids with it."""
    _made.clear()
