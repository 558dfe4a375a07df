"""The process group of a run: made once in a process, and kept until it exits."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import socket
import sys
from importlib import metadata

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from paceline.comm import collectives, mesh
from paceline.errors import WorldError
from paceline.world import World

if not dist.is_initialized():
    # Its functions' default arguments hold the world's group, if there is one when it is imported, as by the first
    # optimizer. The group's threads would then live until the interpreter is taken down (see `leave`).
    import torch.distributed.nn.functional

runs = 0  # how many this process has joined

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def join(world: World, device: torch.device, init_method: str | None, timeout_seconds: float = 1800.0) -> None:
    """Makes the world's process group, or uses one that exists (of an earlier run in this process, or of the script).

    Gloo carries CPU tensors on every machine; the device's own backend its own. Raises WorldError where an existing
    group is of another world.
    """
    global runs
    runs += 1
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
    store = None
    if init_method is None and world.source not in ("torchrun", "paceline"):
        store = _store(world, timeout_seconds)
    dist.init_process_group(
        _BACKENDS.get(device.type),
        init_method=None if store is not None else init_method or "env://",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(leave)


def check_versions(world: World) -> None:
    """Raises WorldError, on every process, where the machines of the world have different versions of the packages.

    One exchange, and none where the world is one machine, whose launcher starts every process with one interpreter.
    (What `start(rank=...)` is given does not say how many machines there are.)
    """
    if world.size == 1 or (world.nodes == 1 and world.source != "start()"):
        return
    everyone = collectives.gather_objects((socket.gethostname(), versions()))
    names = [name for name in everyone[0][1] if len({found[name] for _, found in everyone}) > 1]
    if not names:
        return
    differing: dict[str, list[str]] = {}
    for host, found in everyone:
        hosts = differing.setdefault(", ".join(f"{name} {found[name]}" for name in names), [])
        if host not in hosts:
            hosts.append(host)
    parts = [f"{what} on {', '.join(hosts)}" for what, hosts in differing.items()]
    raise WorldError(
        f"the machines of this run have different versions: {'; '.join(parts)}. They would compute different "
        "things, or wait for each other for ever. Install the same on all of them (`paceline env` shows what is there)."
    )


def versions() -> dict[str, str]:
    """The versions that must be the same on all machines."""
    try:
        own = metadata.version("paceline")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        own = "unknown"
    return {
        "Paceline": own,
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "Python": ".".join(map(str, sys.version_info[:2])),
    }


def _store(world: World, timeout_seconds: float) -> TCPStore:
    """The store of a world without an agent (srun, mpirun). On one machine it and gloo listen on loopback only: torch's
    own would listen on every interface, so rank 0 brings a socket that is bound already."""
    assert world.master_addr is not None
    assert world.master_port is not None
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if world.nodes > 1:
        return TCPStore(world.master_addr, world.master_port, world.size, world.rank == 0, timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world.rank != 0:
        return TCPStore("127.0.0.1", world.master_port, world.size, False, timeout)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", world.master_port))
    except OSError as error:
        raise WorldError(
            f"rank 0 cannot listen on port {world.master_port}, which {world.source} gives this run: "
            f"{error.strerror}. End "
            "what uses it, or set MASTER_PORT (and MASTER_ADDR) to a free one for all processes."
        ) from None
    listening.listen()
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, world.size, True, timeout, master_listen_fd=listening.detach())


def leave() -> None:
    """Ends the process group, if there is one, and its threads with it.

    Gloo's threads drop a finished collective's tensors a moment after its waiter has gone on. One that does so while
    the interpreter is being taken down aborts the process ("terminate called without an active exception"; plain DDP
    does that in one of some ten exits). Destroying the group joins them, once nothing else holds it.
    """
    if dist.is_available() and dist.is_initialized():
        mesh.forget()
        gc.collect()
        dist.destroy_process_group()
