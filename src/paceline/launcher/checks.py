"""Checks before a run starts: the script, an outer launcher, ports, addresses, devices."""

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

# World.source -> (description of this process, command to start the script).
_OUTER = {
    "slurm": ("srun task {rank} of {size}", "srun python"),
    "openmpi": ("rank {rank} of {size} of mpirun", "mpirun -np {size} python"),
    "mpich": ("rank {rank} of {size} of mpirun", "mpirun -np {size} python"),
    "torchrun": ("rank {rank} of {size} of another launcher (RANK and WORLD_SIZE are set)", "python"),
    "paceline": ("rank {rank} of {size} of another `paceline run`", "python"),
}


def check_script(script: str) -> None:
    """Raise LaunchError unless `script` is a file that can be read."""
    if os.path.isdir(script):
        inside = os.path.join(script, "train.py")
        raise LaunchError(f"{script!r} is a directory. Give the Python script in it, for example {inside!r}.")
    if not os.path.isfile(script):
        raise LaunchError(
            f"There is no script {script!r} in {os.getcwd()!r}. Options of paceline come before the script, options of "
            f"the script after it: `paceline run --nproc 2 train.py --epochs 3`."
        )
    if not os.access(script, os.R_OK):
        raise LaunchError(f"You do not have permission to read the script {script!r}. Change its permissions.")


def check_module(name: str) -> None:
    """Raise LaunchError if `python -m name` would find nothing. Does not import user code."""
    places: list[str] | None = [os.getcwd(), *filter(None, sys.path)]
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(parts[end - 1], places) if places is not None else None
        if spec is None:
            hint = f" Leave out the `.py`: `-m {name[:-3]}`." if parts[-1] == "py" else ""
            missing = ".".join(parts[:end])
            raise LaunchError(f"-m {name}: no module {missing!r} in {os.getcwd()!r} or on sys.path.{hint}")
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if places is not None and PathFinder.find_spec("__main__", places) is None:
        raise LaunchError(f"-m {name}: {name!r} is a package without a __main__.py. Give a module in it.")


def check_outer_world(environ: Mapping[str, str], nodes: Nodes) -> None:
    """Raise LaunchError inside a task of an outer launcher, unless the outer launcher starts one `paceline run` on each
    machine."""
    if "PET_NNODES" in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return  # a pod of a PyTorchJob: RANK is the machine's number, meant for a launcher
    try:
        outer = from_env(environ)
    except WorldError:  # an incomplete environment, such as a stale RANK: the workers do not see it
        return
    if outer.size == 1 or outer.source not in _OUTER:
        return
    if nodes.several and nodes.min_nodes <= outer.size <= nodes.max_nodes and nodes.rank in (None, outer.rank):
        return
    where, instead = (text.format(rank=outer.rank, size=outer.size) for text in _OUTER[outer.source])
    if nodes.several and nodes.min_nodes <= outer.size <= nodes.max_nodes:
        problem = f"but --node-rank is {nodes.rank}: the numbers contradict each other. Leave out --node-rank. "
    elif nodes.several:
        problem = (
            f"and each of the {outer.size} tasks would start a launcher for {nodes.min_nodes} to {nodes.max_nodes} "
            "machines. "
        )
    else:
        problem = "and each task would start a separate run. "
    raise LaunchError(
        f"You are inside {where}, {problem}Either let the outer launcher start the script (`{instead} train.py`), or "
        "let it start one launcher on each machine (set --nnodes to their number, and --rdzv-endpoint), or unset its "
        "variables."
    )


def check_port(host: str, port: int, option: str) -> None:
    """Raise LaunchError if this machine cannot listen on `port` of `host`."""
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # if the address is not this machine's, torch's error says more
            why = str(error.strerror).partition(" (while")[0]  # drop "(while attempting to bind ...)"
            raise LaunchError(
                f"{option} {port}: this machine cannot listen on port {port} ({why}). End the process that uses it "
                f"(`ss -ltnp | grep {port}` names it), or choose another port, the same on all machines."
            ) from None


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on one address only. Port 0 means any free port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=1024)


def is_local(host: str) -> bool:
    """Return whether `host` is an address of this machine, by trying to bind to it.

    torch compares names, but a machine may not know all of its names.
    """
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
    """Return the number of visible accelerators. For CUDA this uses NVML, which creates no context. Loads torch."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def device_capacity(device: str | None, count: int, on_cpu: int = 0) -> int | None:
    """Return the maximum number of workers on this machine if each needs a separate device. None: no maximum.

    Arguments as for `check_devices`.
    """
    chosen = device is not None and (device.startswith("cpu") or ":" in device)
    return None if count == 0 or chosen else count + on_cpu


def check_devices(nproc: int, device: str | None, count: int, on_cpu: int = 0) -> None:
    """Raise LaunchError if several workers would have to share a device, unless `device` names their device.

    Args:
        nproc: the number of workers on this machine.
        device: the device setting, or None if the launcher does not know it.
        count: the number of visible accelerators. 0: train on CPUs.
        on_cpu: the number of workers that need no device.
    """
    capacity = device_capacity(device, count, on_cpu)
    if capacity is None or nproc <= capacity:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    devices = "1 device is" if count == 1 else f"{count} devices are"
    each = "each process needs its own" if on_cpu == 0 else f"all but {on_cpu} of the processes need one each"
    raise LaunchError(
        f"--nproc {nproc}: {devices} visible on this machine{why}, and {each}. Use --nproc {capacity} (or `auto`), or "
        "--device cpu to train on the CPU. (For experiments, --device cuda:0 lets all processes share one GPU.)"
    )
