"""The world of a Horovod script: init, shutdown, ranks, sizes, and available backends."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from paceline import world as worlds
from paceline.comm import device_choice, process_group
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError, WorldError
from paceline.world import World

_worlds: list[World] = []  # the joined world, if init was called and shutdown was not


class ReduceOp(IntEnum):
    """How tensors of all processes are combined; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


class HorovodInternalError(RuntimeError):
    """Horovod's exception for a failed collective. It is never raised, and exists only for scripts that import it. A
    failed collective raises torch's exception."""


# ---- joining ----


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other processes of the launcher (`paceline run`, torchrun, srun, mpirun), or run alone without one.

    Calling it again has no effect. On a machine with GPUs, this process's GPU becomes the current device.

    Raises:
        WorldError: the environment describes no consistent world, or comes from `horovodrun`.
        SettingError: `comm` or `process_sets` was given, or the command line sets settings for paceline.start().
    """
    if _worlds:
        return
    if comm is not None:
        raise SettingError(
            "hvd.init(comm=...): MPI communicators are not supported. Call hvd.init(), and start only the processes "
            "that should take part."
        )
    if process_sets:
        raise _no_process_sets("hvd.init(process_sets=...)")
    if process_group.runs == 0:  # otherwise the settings belong to a run that this process has joined
        _refuse_settings()
    _worlds.append(_join(worlds.from_env(os.environ)))


def _refuse_settings() -> None:
    given = json.loads(os.environ.get(worlds.SETTINGS) or "{}")
    given.pop("config", None)
    if given:
        flags = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise SettingError(
            f"the command line sets {flags}, but this script uses paceline.horovod, which does not support settings of "
            "paceline run. Leave them out, or move the script to paceline.start() (docs/horovod.md)."
        )
    if os.environ.get(worlds.TRIAL):
        raise UsageError(
            "`paceline compare` and `paceline verify` need a script with paceline.start(), but this one uses "
            "paceline.horovod and handles its data itself. Move it to paceline.start() (docs/horovod.md), or check it "
            "with `paceline doctor`."
        )


def _join(world: World) -> World:
    """Join the default process group, and make this process's accelerator the current device."""
    started = os.environ.get("HOROVOD_SIZE", "1")
    if world.size == 1 and started not in ("", "1"):
        raise WorldError(
            f"HOROVOD_SIZE={started}: horovodrun started this process, but paceline.horovod cannot connect to the "
            f"others, so each would train a separate model. Start the script with `paceline run --nproc {started} "
            "script.py` (several machines: --nnodes, as in torchrun), or with torchrun, srun or mpirun."
        )
    rendezvous = process_group.Rendezvous(world, None)
    device = _device(world)
    cards = rendezvous.cards(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    rendezvous.join(device, device_choice.backend(device.type, cards))
    process_group.check_versions(world)
    return world


def _device(world: World) -> torch.device:
    """Return this process's device. With fewer accelerators than processes, some processes share one.

    A script that computes on the CPU may have more processes than there are GPUs.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, world.local_rank % count)


def shutdown() -> None:
    """Undo `init`: ranks and collectives raise an error until `init` is called again.

    The processes stay connected until they exit.
    """
    _worlds.clear()


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return bool(_worlds)


def world() -> World:
    """The joined world. Raises UsageError before `init`."""
    if not _worlds:
        raise UsageError("Horovod has not been initialized. Call hvd.init() first.")
    return _worlds[0]


# ---- ranks and sizes ----


def rank() -> int:
    """This process's number, from 0."""
    return world().rank


def size() -> int:
    """The number of processes."""
    return world().size


def local_rank() -> int:
    """This process's number on its machine."""
    return world().local_rank


def local_size() -> int:
    """The number of processes on this machine."""
    return world().local_size


def cross_rank() -> int:
    """The number of this machine."""
    return world().node


def cross_size() -> int:
    """The number of machines."""
    return world().nodes


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of processes."""
    return size() == local_size() * cross_size()


# ---- process sets: only the set of all processes ----


class ProcessSet:
    """A set of processes. Only the set of all processes is supported: `global_process_set`."""

    process_set_id = 0

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        if ranks is not None:
            raise _no_process_sets(f"hvd.ProcessSet({list(ranks)})")

    def rank(self) -> int:
        return rank()

    def size(self) -> int:
        return size()

    def included(self) -> bool:
        return True

    @property
    def ranks(self) -> list[int]:
        return list(range(size()))


global_process_set = ProcessSet()


def add_process_set(process_set: Any) -> Any:
    """Raise SettingError: not supported, see ProcessSet."""
    raise _no_process_sets(f"hvd.ProcessSet {process_set!r}")


remove_process_set = add_process_set


def check_process_set(process_set: Any, call: str) -> None:
    """Raise SettingError unless the process set is `global_process_set` or None."""
    if process_set is not None and process_set is not global_process_set:
        raise _no_process_sets(f"{call}(process_set={process_set!r})")


def _no_process_sets(call: str) -> SettingError:
    return SettingError(
        f"{call}: paceline.horovod supports only the process set of all processes. Create a group with "
        "torch.distributed.new_group(ranks) after hvd.init(), and pass it to torch.distributed."
    )


# ---- available backends ----


def gloo_built() -> bool:
    """Return whether torch has gloo, the backend for CPU tensors."""
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> bool:
    """Return whether torch has NCCL."""
    return dist.is_nccl_available()


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False: MPI, DDL and oneCCL are not used for communication. (mpirun may still start the processes.)"""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise UsageError: there is no timeline."""
    raise UsageError(
        f"hvd.start_timeline({file_path!r}): paceline.horovod has no timeline. Use torch.profiler.profile() around "
        "some steps, and export_chrome_trace(), which shows collectives and computation."
    )


def stop_timeline() -> None:
    """Do nothing: there is no timeline."""


def members() -> int:
    """Return the number of processes. Raises UsageError before `init`."""
    world()
    return world_group().size
