"""What is checked before anything starts: the script, an outer launcher, ports, addresses, devices. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

from paceline.errors import LaunchError, WorldError
from paceline.launcher.nodes import Nodes
from paceline.world import from_env

HOST = "127.0.0.1"

# World.source -> (where this process is, the command to start the script by).
_OUTER = {
    "slurm": ("srun task {rank} of {size}", "srun python"),
    "openmpi": ("rank {rank} of {size} of mpirun", "mpirun -np {size} python"),
    "mpich": ("rank {rank} of {size} of mpirun", "mpirun -np {size} python"),
    "torchrun": ("rank {rank} of {size} of another launcher (RANK and WORLD_SIZE are set)", "python"),
    "paceline": ("rank {rank} of {size} of another `paceline run`", "python"),
}


def check_script(script: str) -> None:
    """Raises LaunchError where `script` is no file that can be read."""
    if os.path.isdir(script):
        inside = os.path.join(script, "train.py")
        raise LaunchError(f"{script!r} is a directory. Name the Python script in it, for example {inside!r}.")
    if not os.path.isfile(script):
        raise LaunchError(
            f"There is no script {script!r} in {os.getcwd()!r}. The options of paceline come before the script, the "
            f"script's own after it: `paceline run --nproc 2 train.py --epochs 3`."
        )
    if not os.access(script, os.R_OK):
        raise LaunchError(f"The script {script!r} may not be read by this user. Change its permissions.")


def check_module(name: str) -> None:
    """Raises LaunchError where `python -m name` would find nothing. Imports nothing of the user's."""
    places: list[str] | None = [os.getcwd(), *filter(None, sys.path)]
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(parts[end - 1], places) if places is not None else None
        if spec is None:
            hint = f" Leave out the `.py`: `-m {name[:-3]}`." if parts[-1] == "py" else ""
            missing = ".".join(parts[:end])
            raise LaunchError(f"-m {name}: there is no module {missing!r} in {os.getcwd()!r} or on sys.path.{hint}")
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if places is not None and PathFinder.find_spec("__main__", places) is None:
        raise LaunchError(f"-m {name}: {name!r} is a package without a __main__.py. Name a module in it.")


def check_outer_world(environ: Mapping[str, str], nodes: Nodes) -> None:
    """Raises LaunchError inside a task of an outer launcher, unless that starts one launcher on each machine."""
    if "PET_NNODES" in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return  # a pod of a PyTorchJob: RANK is that of the machine, and stands there for a launcher to start
    try:
        outer = from_env(environ)
    except WorldError:  # half a world, such as a stale RANK: the workers do not see it
        return
    if outer.size == 1 or outer.source not in _OUTER:
        return
    if nodes.several and nodes.min_nodes <= outer.size <= nodes.max_nodes and nodes.rank in (None, outer.rank):
        return
    where, instead = (text.format(rank=outer.rank, size=outer.size) for text in _OUTER[outer.source])
    if nodes.several and nodes.min_nodes <= outer.size <= nodes.max_nodes:
        problem = f"but --node-rank is {nodes.rank}: the numbers contradict each other. Leave --node-rank out."
    elif nodes.several:
        problem = (
            f"and each of the {outer.size} would start a launcher of {nodes.min_nodes} to {nodes.max_nodes} machines. "
        )
    else:
        problem = "and each of them would start a run of its own. "
    raise LaunchError(
        f"You are inside {where}, {problem}Either let the outer launcher start the script (`{instead} train.py`), or "
        "let it start one launcher on each machine (with --nnodes equal to their number and --rdzv-endpoint), or unset "
        "its variables."
    )


def check_port(host: str, port: int, option: str) -> None:
    """Raises LaunchError where this machine cannot listen on `port` of `host`."""
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # else it is not our address: torch says more
            why = str(error.strerror).partition(" (while")[0]  # that it was in binding
            raise LaunchError(
                f"{option} {port}: this machine cannot listen on port {port} ({why}). End what uses it "
                f"(`ss -ltnp | grep {port}` names it), or choose another port, on all machines alike."
            ) from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address only. port 0: any that is free."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=1024)


def is_local(host: str) -> bool:
    """Is it an address of this machine? By binding, since a machine need not know all of its names. torch compares
    names."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def device_count() -> int:
    """The number of visible accelerators; 0 where there are none. For CUDA by NVML, which makes no context.

    Loads torch.
    """
    import torch

    if torch.version.cuda or torch.version.hip:
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def room_for(device: str | None, count: int, on_cpu: int = 0) -> int | None:
    """How many workers the devices of this machine suffice for, one each; None: any number. As for `check_devices`."""
    told = device is not None and (device.startswith("cpu") or ":" in device)
    return None if count == 0 or told else count + on_cpu


def check_devices(nproc: int, device: str | None, count: int, on_cpu: int = 0) -> None:
    """Raises LaunchError where several workers would have to share a device, unless `device` says which they use.

    Args:
        nproc: workers on this machine.
        device: the setting, as far as the launcher knows it.
        count: the visible devices; 0: there are only CPUs.
        on_cpu: how many of the workers need none.
    """
    room = room_for(device, count, on_cpu)
    if room is None or nproc <= room:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    devices = "1 device is" if count == 1 else f"{count} devices are"
    each = "each process needs one of its own" if on_cpu == 0 else f"all but {on_cpu} of the processes need one each"
    raise LaunchError(
        f"--nproc {nproc}: {devices} visible on this machine{why}, and {each}. Use --nproc {room} (or "
        "`auto`), or --device cpu to train on the CPU. (--device cuda:0 has all of them share one, to try things out.)"
    )
