"""The process group of a run: made once in a process, and kept until it exits."""

from __future__ import annotations

import atexit
import datetime
import gc

import torch
import torch.distributed as dist

from paceline.errors import WorldError
from paceline.world import World

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def join(world: World, device: torch.device, init_method: str | None, timeout_seconds: float = 1800.0) -> None:
    """Makes the world's process group; one that exists (an earlier run's in this process, or the script's own) is used.

    Gloo carries CPU tensors on every machine; the device's own backend its own. Raises WorldError where an existing
    group is of another world.
    """
    if world.size == 1:
        return
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (world.rank, world.size):
            raise WorldError(
                f"this process is rank {found[0]} of {found[1]} in torch.distributed's process group already, but rank "
                f"{world.rank} of {world.size} by {world.source}. Leave init_process_group to paceline.start()."
            )
        return
    if init_method is None and world.source not in ("torchrun", "paceline"):
        init_method = f"tcp://{world.master_addr}:{world.master_port}"
    dist.init_process_group(
        _BACKENDS.get(device.type),
        init_method=init_method or "env://",
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(leave)


def leave() -> None:
    """Ends the process group, if there is one, and its threads with it.

    Gloo's threads drop a finished collective's tensors a moment after its waiter has gone on. One that does so while
    the interpreter is being taken down aborts the process ("terminate called without an active exception"; plain DDP
    does that in one of some ten exits). Destroying the group joins them, once nothing else holds it.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
