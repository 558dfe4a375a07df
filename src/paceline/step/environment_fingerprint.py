"""The environment fingerprint: everything besides the program that affects the bits of a reproducible run.

The processes compare their fingerprints when a run starts. Checkpoints store the fingerprint, and a resumed run
compares it with its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm.mesh import world_group
from paceline.errors import CheckpointError, SettingError, warn
from paceline.world import processor

# Keys of a fingerprint, with their names in messages. A difference in _MUST is an error, in _SHOULD a warning.
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
    """Raises CheckpointError if the resumed run cannot have the same bits. Rank 0 warns if the bits may differ.

    saved: the checkpoint's fingerprint; None if its run was not reproducible.
    """
    if saved is None:
        if world_group().rank == 0:
            warn(
                "the checkpoint was written by a run without `reproducible`. Only the training from here on is the "
                "same on any number of processes.",
            )
        return
    for key, name in _MUST.items():
        if saved[key] != here[key]:
            remedy = f"reproducible={saved[key]}" if key == "shards" else f"OMP_NUM_THREADS={saved[key]}"
            raise CheckpointError(
                f"the checkpoint was written with {name}: {saved[key]}, but this run has {here[key]}, so it would "
                f"continue with different bits. Start with {remedy}, or without `reproducible`."
            )
    for key, name in _SHOULD.items():
        if saved[key] != here[key] and world_group().rank == 0:
            warn(
                f"the checkpoint was written with {name}: {saved[key]!r}, but this run has {here[key]!r}. From here on "
                "the bits may differ from those of an unchanged run.",
            )


def check_ranks(here: Mapping[str, Any]) -> None:
    """Compare the fingerprints of all processes, in one exchange.

    Raises SettingError on all processes if their numbers of threads differ. Rank 0 warns about any other difference.
    """
    everyone = world_group().gather(dict(here))
    if len({other["threads"] for other in everyone}) > 1:
        counts = ", ".join(f"{other['threads']} on rank {rank}" for rank, other in enumerate(everyone))
        raise SettingError(
            f"reproducible={here['shards']}: the processes compute with different numbers of threads ({counts}), which "
            "changes the bits. Set the same OMP_NUM_THREADS on all machines, or on none."
        )
    for key, name in _SHOULD.items():
        found = list(dict.fromkeys(str(other[key]) for other in everyone))
        if len(found) > 1 and world_group().rank == 0:
            warn(
                f"reproducible={here['shards']}: the processes differ in {name} ({'; '.join(found)}), so the bits may "
                "depend on which process computes a shard.",
            )


def threads(environ: Mapping[str, str] = os.environ, mark: str = "") -> int:
    """The number of threads of a reproducible run: OMP_NUM_THREADS if the user has set it, else 1.

    mark: an environment variable. The launcher sets it when it sets OMP_NUM_THREADS to a share of the cores. That share
    depends on the number of processes, so this function then ignores it.
    """
    text = environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 and mark not in environ else 1
