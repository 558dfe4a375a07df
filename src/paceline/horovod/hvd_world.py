"""The world of a Horovod script: init, shutdown, ranks and sizes, and what the library can do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from paceline import world as worlds
from paceline.comm import collectives, device_choice, process_group
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
    """Horovod raises it where a collective fails. Here torch.distributed's own error is raised in its place; the name
    is there for scripts that import it."""


# ---- joining ----


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world that the launcher made (`paceline run`, torchrun, srun, mpirun); alone, the world is this process.

    Calling it again changes nothing. On a machine with GPUs each process's own becomes the current device.

    Raises:
        WorldError: an environment that describes no world, or one of `horovodrun`.
        SettingError: a communicator or process sets, or settings that are for scripts with paceline.start().
    """
    if _worlds:
        return
    if comm is not None:
        raise SettingError(
            "hvd.init(comm=...): there is no MPI here, so a communicator cannot be taken over. Call hvd.init(), and "
            "start as many processes as shall take part."
        )
    if process_sets:
        raise _no_process_sets("hvd.init(process_sets=...)")
    if process_group.runs == 0:  # else they are those of a run that this process has started
        _refuse_settings()
    _worlds.append(_join(worlds.from_env(os.environ)))


def _refuse_settings() -> None:
    given = json.loads(os.environ.get(worlds.SETTINGS) or "{}")
    given.pop("config", None)
    if given:
        flags = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise SettingError(
            f"the command line sets {flags}, and this script trains with paceline.horovod, which takes no settings of "
            "paceline run. Leave them out, or move the script to paceline.start() (docs/horovod.md)."
        )
    if os.environ.get(worlds.TRIAL):
        raise UsageError(
            "`paceline compare` and `paceline verify` look at runs of paceline.start(), and this script trains with "
            "paceline.horovod: its data and its batch are its own. Move it to paceline.start() (docs/horovod.md), or "
            "have `paceline doctor` watch it as it is."
        )


def _join(world: World) -> World:
    """Joins the default process group, and makes this process's accelerator the current one."""
    started = os.environ.get("HOROVOD_SIZE", "1")
    if world.size == 1 and started not in ("", "1"):
        raise WorldError(
            f"HOROVOD_SIZE={started}: horovodrun started this process, and paceline.horovod cannot meet the others: "
            f"each would train by itself. Start the script with `paceline run --nproc {started} script.py` (several "
            "machines: --nnodes, as for torchrun), or with torchrun, srun or mpirun."
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
    """This process's device: where there are fewer accelerators than processes, some share one (a script that computes
    on the CPU may well be started in more processes than there are GPUs)."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, world.local_rank % count)


def shutdown() -> None:
    """Take back `init`: ranks and collectives are refused until it is called again. The processes stay connected until
    they exit."""
    _worlds.clear()


def is_initialized() -> bool:
    """Was `init` called?"""
    return bool(_worlds)


def world() -> World:
    """The joined world. Raises UsageError before `init`."""
    if not _worlds:
        raise UsageError("Horovod has not been initialized. Call hvd.init() first.")
    return _worlds[0]


# ---- ranks and sizes ----


def rank() -> int:
    """This process's number among all."""
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
    """Has every machine as many processes as this one?"""
    return size() == local_size() * cross_size()


# ---- process sets: the one of all processes ----


class ProcessSet:
    """Processes that communicate. Only that of all of them is there: `global_process_set`."""

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
    """Refused: see ProcessSet."""
    raise _no_process_sets(f"hvd.ProcessSet {process_set!r}")


remove_process_set = add_process_set


def check_process_set(process_set: Any, call: str) -> None:
    """Raises SettingError where another set than that of all processes is meant."""
    if process_set is not None and process_set is not global_process_set:
        raise _no_process_sets(f"{call}(process_set={process_set!r})")


def _no_process_sets(call: str) -> SettingError:
    return SettingError(
        f"{call}: paceline.horovod has no process sets but that of all processes. Make a group with "
        "torch.distributed.new_group(ranks) after hvd.init(), and call torch.distributed with it."
    )


# ---- what there is ----


def gloo_built() -> bool:
    """Does torch have gloo? CPU tensors travel by it."""
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> bool:
    """Does torch have NCCL?"""
    return dist.is_nccl_available()


def cuda_built() -> bool:
    """Was torch built for CUDA?"""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Was torch built for ROCm?"""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """False: neither MPI (mpirun may start the processes, and no more) nor DDL nor oneCCL carries anything here."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Refused: there is no background thread to draw."""
    raise UsageError(
        f"hvd.start_timeline({file_path!r}): paceline.horovod has no timeline. Use torch.profiler.profile() around "
        "some steps and export_chrome_trace(): it shows the collectives beside the computation."
    )


def stop_timeline() -> None:
    """Nothing to stop."""


def members() -> int:
    """The processes of the group that exists; for checks that `init` was called."""
    world()
    return collectives.size_of()
