"""The environment fingerprint: what the bits of a reproducible run depend on beside the program.

The processes compare it when a run starts. A checkpoint holds it, and it is compared again at resume.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm import collectives
from paceline.errors import CheckpointError, SettingError, warn
from paceline.world import processor

# Keys of a fingerprint, with their names in messages: those that must not differ, and those that had better not.
_MUST = {"shards": "reproducible", "threads": "threads in each process"}
_SHOULD = {"torch": "torch", "device": "the device", "capability": "the CPU's instructions"}


def fingerprint(shards: int, device: torch.device) -> dict[str, Any]:
    """The fingerprint of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {processor()}"
    libraries = f", cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    return {
        "shards": shards,
        "threads": torch.get_num_threads(),
        "torch": f"{torch.__version__}{libraries}",
        "device": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def check_resumed(saved: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a resumed run cannot have the same bits. Rank 0 warns where the bits may differ.
    saved: the checkpoint's fingerprint; None for one of a run that was not reproducible."""
    if saved is None:
        if collectives.rank_of() == 0:
            warn(
                "the checkpoint is of a run without `reproducible`: what it holds is taken as it is, and only what "
                "follows is the same on any number of processes.",
            )
        return
    for key, name in _MUST.items():
        if saved[key] != here[key]:
            remedy = f"reproducible={saved[key]}" if key == "shards" else f"OMP_NUM_THREADS={saved[key]}"
            raise CheckpointError(
                f"the checkpoint was written with {name}: {saved[key]}, and this run has {here[key]}: it would go on "
                f"with other bits. Start with {remedy}, or without `reproducible`."
            )
    for key, name in _SHOULD.items():
        if saved[key] != here[key] and collectives.rank_of() == 0:
            warn(
                f"the checkpoint was written with {name}: {saved[key]!r}, and this run has {here[key]!r}: its bits may "
                "differ from here on from those of a run without the change.",
            )


def check_ranks(here: Mapping[str, Any]) -> None:
    """Compare the fingerprints of all processes. Raises SettingError on all of them where numbers of threads differ.
    Rank 0 warns where anything else does. One exchange."""
    everyone = collectives.gather_objects(dict(here))
    if len({other["threads"] for other in everyone}) > 1:
        counts = ", ".join(f"{other['threads']} on rank {rank}" for rank, other in enumerate(everyone))
        raise SettingError(
            f"reproducible={here['shards']}: the processes compute with different numbers of threads ({counts}), which "
            "gives other bits. Set OMP_NUM_THREADS alike on all machines, or on none."
        )
    for key, name in _SHOULD.items():
        found = list(dict.fromkeys(str(other[key]) for other in everyone))
        if len(found) > 1 and collectives.rank_of() == 0:
            warn(
                f"reproducible={here['shards']}: the processes differ in {name} ({'; '.join(found)}): which of them "
                "computes a shard may change its bits.",
            )


def threads(environ: Mapping[str, str] = os.environ, mark: str = "") -> int:
    """How many threads a reproducible run computes with: OMP_NUM_THREADS where the user has set it, else 1. mark: the
    variable by which a launcher says that it has set OMP_NUM_THREADS to a share of the cores, which depends on how many
    processes there are."""
    text = environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 and mark not in environ else 1
