"""The process group of a run: made once in a process, and kept until it exits.

Which backends it needs, and which device each process takes, may depend on the other processes. So they meet first
(`Rendezvous`), tell each other what is needed through the store that the group will be made with, and then join.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++
from torch.distributed.rendezvous import rendezvous

from paceline.comm import collectives, device_choice, mesh
from paceline.errors import WorldError
from paceline.torch_private.variables import check_interfaces, check_variables
from paceline.world import World, ends_if_failed, store_place

if not dist.is_initialized():
    # Its functions' default arguments hold the world's group, if there is one when it is imported, as by the first
    # optimizer. The group's threads would then live until the interpreter is taken down (see `leave`).
    import torch.distributed.nn.functional

runs = 0  # how many this process has joined
HINT_SECONDS = 5.0  # of waiting for other processes, before a line says so; then after twice that time, and so on
_CONNECT_SECONDS = 2.0


class Rendezvous:
    """The processes of a world, from when they meet until they are a process group.

    Where a group exists (of an earlier run in this process, or of the script) it is used: what the processes tell each
    other goes through it, and `join` makes none. One process alone meets nobody.
    """

    def __init__(self, world: World, init_method: str | None, timeout_seconds: float = 1800.0) -> None:
        """Waits for nobody.

        Raises:
            WorldError: an existing group is of another world.
            SettingError: torch cannot read one of its environment variables.
        """
        global runs
        runs += 1
        self._world, self._init_method = world, init_method
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._joined = world.size == 1 or dist.is_initialized()  # whether there is no group to be made
        self.versions: list[tuple[str, dict[str, str]]] | None = None  # each rank's host and versions, if told already
        if not self._joined:
            check_variables(os.environ)
            check_interfaces(os.environ)
        if world.size == 1 or not dist.is_initialized():
            return
        found = (dist.get_rank(), dist.get_world_size())
        if found != (world.rank, world.size):
            raise WorldError(
                f"this process is rank {found[0]} of {found[1]} in torch.distributed's process group already, but rank "
                f"{world.rank} of {world.size} by {world.source}. Leave init_process_group to paceline.start()."
            )

    @cached_property
    def _store(self) -> Store:
        """That of the group that is to be made. Waits for rank 0 or the launcher, who has it."""
        world = self._world
        with _told(lambda: _awaited(world, self._init_method)):
            if self._init_method is None and world.source not in ("torchrun", "paceline"):
                store: Store = _store(world, self._timeout)
            else:
                method = self._init_method or "env://"
                with _own_store(method):
                    store = next(rendezvous(method, world.rank, world.size, timeout=self._timeout))[0]
                store.set_timeout(self._timeout)
        return PrefixStore("default_pg", store)  # the prefix that torch gives it

    def gather(self, what: str, own: Any) -> list[Any]:
        """Every rank's value, in rank order. All ranks call it alike.

        what: names the value; another one for each call. own: this rank's, of what JSON has.
        """
        if self._joined:
            return collectives.gather_objects(own)
        keys = [f"paceline/{what}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(own))
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def place(self) -> World:
        """The world, with this process's place on its machine. `start(rank=...)` is not told of machines: there the
        place follows from those that have joined, in one exchange."""
        if self._world.source != "start()":
            return self._world
        everyone = self.gather("hosts", (machine(), socket.gethostname(), versions()))
        self.versions = [(host, found) for _, host, found in everyone]
        self._world = device_choice.placed(self._world, [where for where, _, _ in everyone])
        return self._world

    def cards(self, device: torch.device) -> list[str | None]:
        """The GPUs of all ranks, as device_choice.sharing takes them. No exchange, and an empty list, where this
        process computes on no GPU or the group exists already."""
        return [] if self._joined or device.type != "cuda" else self.gather("cards", card(device))

    def join(self, device: torch.device, backend: str | None) -> None:
        """Makes the process group. device: of this process. backend: see device_choice.backend."""
        if self._joined:
            return
        bound = device.type == "cuda" and "nccl" in str(backend)  # NCCL then connects at once
        store = self._store
        # Under `paceline run` the launcher sees which rank does not come, and says so.
        with _told(self._incomplete) if self._world.source != "paceline" else contextlib.nullcontext():
            dist.init_process_group(
                backend,
                store=store,
                rank=self._world.rank,
                world_size=self._world.size,
                timeout=self._timeout,
                device_id=device if bound else None,
            )
        atexit.register(leave)

    def _incomplete(self) -> str:
        world = self._world
        return (
            f"it has found rank 0, and the {world.size} processes of this run are not all there yet. Is each started, "
            f"with WORLD_SIZE={world.size} and a RANK of its own?"
        )


@contextlib.contextmanager
def _told(why: Callable[[], str]) -> Iterator[None]:
    """While this process waits for others, say so now and then, and why. torch waits for up to 30 minutes, mute."""
    done = threading.Event()

    def watch() -> None:
        waited, pause = 0.0, HINT_SECONDS
        while not done.wait(pause):
            waited, pause = waited + pause, max(waited, HINT_SECONDS)
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                print(f"paceline: waiting for {waited:.0f} s: {why()}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, name="paceline-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _awaited(world: World, init_method: str | None) -> str:
    """What this process waits for, whose store is not there yet."""
    who = f"this process, rank {world.rank} of {world.size},"
    if init_method is not None and init_method != "env://":
        return f"{who} waits for the others at init_method={init_method!r}. Are all started, with the same one?"
    assert world.master_addr is not None
    assert world.master_port is not None
    place = f"MASTER_ADDR={world.master_addr}, MASTER_PORT={world.master_port}"
    if world.rank == 0:
        others = "one other process" if world.size == 2 else f"the {world.size - 1} other processes"
        return f"{who} listens at {place} and waits for {others}. Are all started, with the same values of these?"
    try:
        socket.create_connection(store_place(world.master_addr, world.master_port), _CONNECT_SECONDS).close()
    except socket.gaierror as error:
        return (
            f"{who} looks for rank 0 at {place}, and this machine knows no host of that name ({error.strerror}). Is it "
            "misspelt? (The name of a pod in Kubernetes is known once that has started.)"
        )
    except OSError as error:
        return (
            f"{who} looks for rank 0 at {place}, and nobody answers there ({error.strerror or error}). Is rank 0 "
            "started, with the same values of these, and is no firewall between?"
        )
    return f"{who} has found rank 0 at {place}, and waits for others. Are all {world.size} processes started?"


def join_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, for torch's engines that need one. Nothing where there is one. Gloo
    listens on loopback only."""
    if dist.is_initialized():
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(device_choice.backend(device.type), store=HashStore(), rank=0, world_size=1)
    finally:
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    atexit.register(leave)


@contextlib.contextmanager
def _own_store(init_method: str) -> Iterator[None]:
    """While the processes meet: rank 0 opens a store at `init_method`, also under torchrun and `paceline run`. There
    torch takes the store at any address for the launcher's, which is at one of them: all would wait for ever."""
    name = "TORCHELASTIC_USE_AGENT_STORE"
    told = os.environ.get(name)
    launchers = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if told is None or not init_method.startswith("tcp://") or init_method.partition("?")[0].rstrip("/") == launchers:
        yield
        return
    os.environ[name] = "False"
    try:
        yield
    finally:
        os.environ[name] = told


def check_versions(world: World, everyone: Sequence[tuple[str, Mapping[str, str]]] | None = None) -> None:
    """Raises WorldError, on every process, where the machines of the world have different versions of the packages.

    everyone: each rank's host and versions, if they were told already (Rendezvous.versions). Else there is one
    exchange; and none where the world is one machine, whose launcher starts every process with one interpreter.
    """
    if everyone is None:
        if world.nodes == 1:
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


def machine() -> str:
    """What tells this machine from others: its name, and the boot of its kernel, since names may be equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def card(device: torch.device) -> str | None:
    """The UUID of a GPU; None where it is not known."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", None) or "")
    return uuid if uuid.strip("0-") else None


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


def _store(world: World, timeout: datetime.timedelta) -> TCPStore:
    """The store of a world without an agent (srun, mpirun). On one machine it and gloo listen on loopback only: torch's
    own would listen on every interface, so rank 0 brings a socket that is bound already."""
    assert world.master_addr is not None
    assert world.master_port is not None
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

    Destroying, and aborting too, waits for collectives under way. Where an error ends this process, the others may
    never come to them: it waits for some seconds at most (world.FAILED_SECONDS).
    """
    if dist.is_available() and dist.is_initialized():
        mesh.forget()
        gc.collect()
        with ends_if_failed():
            dist.destroy_process_group()
