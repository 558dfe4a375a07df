"""Which device a process computes on, and which backends its process group has. Pure.

What a process cannot know alone, the others tell it before there is a process group (`process_group.Rendezvous`): on
which machines they are, and which GPUs they have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.errors import SettingError
from paceline.world import World

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def placed(world: World, hosts: Sequence[str]) -> World:
    """The world with the places that follow from the machines of all ranks. hosts: one for each rank, in rank order."""
    own = hosts[world.rank]
    ranks = [rank for rank, host in enumerate(hosts) if host == own]
    nodes = list(dict.fromkeys(hosts))
    local_rank, node = ranks.index(world.rank), nodes.index(own)
    return replace(world, local_rank=local_rank, local_size=len(ranks), node=node, nodes=len(nodes))


def choose(name: str | None, accelerator: str | None, count: int, world: World) -> torch.device:
    """The device of this process.

    A process that sees one accelerator takes it, whatever its local rank: Slurm and MPI can bind one to each task, and
    each task then sees its own as number 0.

    Args:
        name: the setting; None: not given.
        accelerator: the type of this machine's accelerators, such as "cuda"; None: it has none.
        count: how many of them this process sees.

    Raises:
        SettingError: there is no such device.
    """
    if name is None:
        device = torch.device(accelerator or "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise SettingError(f"device={name!r} is no device: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return device
    if device.type != accelerator:
        raise SettingError(f"device={name!r}: this machine has {accelerator or 'no accelerator'}. Use device='cpu'.")
    index: int | None = device.index
    if index is None:
        index = 0 if count == 1 else world.local_rank
    if index >= count:
        raise SettingError(
            f"device {device.type}:{index}: {count} are visible to the process of local rank {world.local_rank}, of "
            f"{world.local_size} on this machine. Start {count} processes on it, or name a device that is visible."
        )
    return torch.device(device.type, index)


def sharing(cards: Sequence[str | None]) -> list[list[int]]:
    """The ranks that have chosen one GPU, for each GPU that several have chosen. cards: of each rank the UUID of its
    GPU; None: it has none, or it is not known."""
    ranks: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card is not None:
            ranks.setdefault(card, []).append(rank)
    return [several for several in ranks.values() if len(several) > 1]


def backend(kind: str, cards: Sequence[str | None] = ()) -> str | None:
    """The backends of a process group, as torch.distributed takes them; None: torch's own choice.

    Gloo carries CPU tensors everywhere. NCCL carries those of GPUs, but refuses two ranks on one GPU: then gloo carries
    them too.

    Args:
        kind: the type of the ranks' devices; "cpu" where at least one rank computes on the CPU.
        cards: see `sharing`.
    """
    if kind == "cuda" and sharing(cards):
        return "cpu:gloo,cuda:gloo"
    return _BACKENDS.get(kind)


def note(shared: Sequence[Sequence[int]]) -> str:
    """What the user is told where ranks share GPUs."""
    groups = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in shared)
    return (
        f"several processes compute on one GPU ({groups}). NCCL refuses that, so gloo carries their tensors, by way of "
        "the host. This is for trying things out, and slow: for training start one process for each GPU."
    )
