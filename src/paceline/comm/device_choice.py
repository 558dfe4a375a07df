"""Chooses the device of a process, and the backends of its process group. Pure functions.

They need the machine and the GPU of every process. `process_group.Rendezvous` exchanges these before a process group
exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.errors import SettingError
from paceline.world import World

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def placed(world: World, hosts: Sequence[str]) -> World:
    """Return the world with its local rank and node filled in. hosts: the machine of each rank, in rank order."""
    own = hosts[world.rank]
    ranks = [rank for rank, host in enumerate(hosts) if host == own]
    nodes = list(dict.fromkeys(hosts))
    local_rank, node = ranks.index(world.rank), nodes.index(own)
    return replace(world, local_rank=local_rank, local_size=len(ranks), node=node, nodes=len(nodes))


def choose(name: str | None, accelerator: str | None, count: int, world: World) -> torch.device:
    """Choose the device of this process.

    A process that sees one accelerator takes it, whatever its local rank: Slurm and MPI can bind one accelerator to
    each task, which then sees it as number 0.

    Args:
        name: the setting `device`; None: not given.
        accelerator: the type of this machine's accelerators, such as "cuda"; None: no accelerator.
        count: the number of accelerators that this process sees.

    Raises:
        SettingError: there is no such device.
    """
    if name is None:
        device = torch.device(accelerator or "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise SettingError(f"device={name!r} is not a device: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return device
    if device.type != accelerator:
        raise SettingError(f"device={name!r}: this machine has {accelerator or 'no accelerator'}. Use device='cpu'.")
    index: int | None = device.index
    if index is None:
        index = 0 if count == 1 else world.local_rank
    if index >= count:
        seen = "1 device" if count == 1 else f"{count} devices"
        raise SettingError(
            f"device {device.type}:{index}: local rank {world.local_rank} (of {world.local_size} on this machine) sees "
            f"only {seen}. Start one process per visible device, or choose a visible device."
        )
    return torch.device(device.type, index)


def sharing(cards: Sequence[str | None]) -> list[list[int]]:
    """The groups of ranks that share a GPU. cards: the UUID of each rank's GPU; None: no GPU, or UUID unknown."""
    ranks: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card is not None:
            ranks.setdefault(card, []).append(rank)
    return [several for several in ranks.values() if len(several) > 1]


def backend(kind: str, cards: Sequence[str | None] = ()) -> str | None:
    """The backends of a process group, in torch.distributed's syntax; None: torch's default.

    Gloo carries CPU tensors, and NCCL carries GPU tensors. NCCL refuses two ranks on one GPU; then gloo carries both.

    Args:
        kind: the type of the ranks' devices; "cpu" if at least one rank computes on the CPU.
        cards: see `sharing`.
    """
    if kind == "cuda" and sharing(cards):
        return "cpu:gloo,cuda:gloo"
    return _BACKENDS.get(kind)


def note(shared: Sequence[Sequence[int]]) -> str:
    """The warning for ranks that share GPUs."""
    groups = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in shared)
    return (
        f"several processes share one GPU ({groups}). NCCL does not support that, so gloo transfers their tensors "
        "through host memory, which is slow. Use this for tests only. For training, start one process per GPU."
    )
