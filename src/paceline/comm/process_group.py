"""The process group of a run: created once per process, and kept until the process exits.

The group's backends and each process's device may depend on the other processes. So the processes first exchange their
machines and GPUs (`Rendezvous`) through the store that the group will use, and then join the group.
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

from paceline.comm import device_choice, mesh
from paceline.comm.mesh import world_group
from paceline.errors import WorldError
from paceline.torch_private.variables import check_interfaces, check_variables
from paceline.world import World, ends_if_failed, store_address

if not dist.is_initialized():
    # The first optimizer imports this module. If a process group exists by then, default arguments in the module hold
    # it, and the group's threads live until the interpreter shuts down (see `leave`). So import it now.
    import torch.distributed.nn.functional

runs = 0  # number of runs that this process has joined
HINT_SECONDS = 5.0  # a wait for other processes is first reported after this time, then at growing intervals
_CONNECT_SECONDS = 2.0


class Rendezvous:
    """The processes of a world, from their first contact until they form a process group.

    An existing group (of an earlier run in this process, or of the script) is reused: exchanges go through it, and
    `join` makes no new group. A single process contacts no other process.
    """

    def __init__(self, world: World, init_method: str | None, timeout_seconds: float = 1800.0) -> None:
        """Check the environment and any existing group. Does not wait for other processes.

        Raises:
            WorldError: an existing group has another rank or size.
            SettingError: torch cannot read one of its environment variables.
        """
        global runs
        runs += 1
        self._world, self._init_method = world, init_method
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._joined = world.size == 1 or dist.is_initialized()  # whether `join` has nothing to do
        self.versions: list[tuple[str, dict[str, str]]] | None = None  # each rank's host and versions, if exchanged
        if not self._joined:
            check_variables(os.environ)
            check_interfaces(os.environ)
        if world.size == 1 or not dist.is_initialized():
            return
        found = (dist.get_rank(), dist.get_world_size())
        if found != (world.rank, world.size):
            raise WorldError(
                f"a torch.distributed process group already exists, with this process as rank {found[0]} of "
                f"{found[1]}. But {world.source} says rank {world.rank} of {world.size}. Leave init_process_group to "
                "paceline.start()."
            )

    @cached_property
    def _store(self) -> Store:
        """The store of the future group. Waits until rank 0 or the launcher, which hosts the store, is up."""
        world = self._world
        with _report_wait(lambda: _wait_reason(world, self._init_method)):
            if self._init_method is None and world.source not in ("torchrun", "paceline"):
                store: Store = _store(world, self._timeout)
            else:
                method = self._init_method or "env://"
                with _own_store(method):
                    store = next(rendezvous(method, world.rank, world.size, timeout=self._timeout))[0]
                store.set_timeout(self._timeout)
        return PrefixStore("default_pg", store)  # the prefix that torch gives it

    def gather(self, what: str, own: Any) -> list[Any]:
        """Every rank's value, in rank order. All ranks make the same calls.

        what: names the value; unique for each call. own: this rank's value, serializable as JSON.
        """
        if self._joined:
            return world_group().gather(own)
        keys = [f"paceline/{what}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(own))
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def place(self) -> World:
        """Return the world with this process's local rank and node. With `start(rank=...)` these are unknown, and one
        exchange of all ranks' machines determines them."""
        if self._world.source != "start()":
            return self._world
        everyone = self.gather("hosts", (machine(), socket.gethostname(), versions()))
        self.versions = [(host, found) for _, host, found in everyone]
        self._world = device_choice.placed(self._world, [where for where, _, _ in everyone])
        return self._world

    def cards(self, device: torch.device) -> list[str | None]:
        """Return the GPU of each rank, in the form for `device_choice.sharing`. If this process does not compute on a
        GPU, or the group exists already, return [] without an exchange."""
        return [] if self._joined or device.type != "cuda" else self.gather("cards", card(device))

    def join(self, device: torch.device, backend: str | None) -> None:
        """Make the process group. device: this process's device. backend: see device_choice.backend."""
        if self._joined:
            return
        bound = device.type == "cuda" and "nccl" in str(backend)  # NCCL then connects at once
        store = self._store
        # Under `paceline run` the launcher sees which rank is missing, and reports it.
        with _report_wait(self._incomplete) if self._world.source != "paceline" else contextlib.nullcontext():
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
            f"rank 0 is up, but not all {world.size} processes of this run have joined. Has each been started, "
            f"with WORLD_SIZE={world.size} and its own RANK?"
        )


@contextlib.contextmanager
def _report_wait(why: Callable[[], str]) -> Iterator[None]:
    """While this process waits for others, print the reason at intervals. torch alone would wait silently for up to 30
    minutes."""
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


def _wait_reason(world: World, init_method: str | None) -> str:
    """Why this process waits while its store is not up, as a sentence for the user."""
    who = f"this process, rank {world.rank} of {world.size},"
    if init_method is not None and init_method != "env://":
        return f"{who} waits for the others at init_method={init_method!r}. Were all started with this init_method?"
    assert world.master_addr is not None
    assert world.master_port is not None
    place = f"MASTER_ADDR={world.master_addr}, MASTER_PORT={world.master_port}"
    if world.rank == 0:
        others = "one other process" if world.size == 2 else f"the {world.size - 1} other processes"
        return f"{who} listens at {place} and waits for {others}. Were all started with these values?"
    try:
        socket.create_connection(store_address(world.master_addr, world.master_port), _CONNECT_SECONDS).close()
    except socket.gaierror as error:
        return (
            f"{who} waits for rank 0 at {place}, but this machine cannot resolve the host name ({error.strerror}). Is "
            "it misspelt? (A pod's name in Kubernetes is known only after the pod has started.)"
        )
    except OSError as error:
        return (
            f"{who} waits for rank 0 at {place}, but nothing answers there ({error.strerror or error}). Has rank 0 "
            "been started with these values? Does a firewall block the port?"
        )
    return f"{who} reaches rank 0 at {place} and waits for others. Have all {world.size} processes been started?"


def join_alone(device: torch.device) -> None:
    """Make a process group of this process only, for torch's engines that need one. Does nothing if a group exists.
    Gloo listens on loopback only."""
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
    """Let rank 0 open a store at `init_method`, also under torchrun and `paceline run`. Under these launchers torch
    assumes that the launcher hosts a store at every address. The launcher hosts only one, so all processes would wait
    for ever."""
    name = "TORCHELASTIC_USE_AGENT_STORE"
    prior = os.environ.get(name)
    launchers = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if prior is None or not init_method.startswith("tcp://") or init_method.partition("?")[0].rstrip("/") == launchers:
        yield
        return
    os.environ[name] = "False"
    try:
        yield
    finally:
        os.environ[name] = prior


def check_versions(world: World, everyone: Sequence[tuple[str, Mapping[str, str]]] | None = None) -> None:
    """Raises WorldError, on every process, if the machines of the world have different versions of the packages.

    everyone: each rank's host and versions, if already exchanged (Rendezvous.versions). If None, they are exchanged
    now. On a single machine nothing is checked then: the launcher starts all processes with one interpreter.
    """
    if everyone is None:
        if world.nodes == 1:
            return
        everyone = world_group().gather((socket.gethostname(), versions()))
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
        f"the machines of this run have different versions: {'; '.join(parts)}. They would compute different results, "
        "or hang. Install the same versions on all of them (`paceline env` lists them)."
    )


def machine() -> str:
    """Identify this machine by its name and its kernel's boot id. (Two machines may have the same name.)"""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def card(device: torch.device) -> str | None:
    """The UUID of a GPU; None if it is not known."""
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
    """Make the store of a world that torchrun or `paceline run` did not start (srun, mpirun). On one machine the store
    and gloo listen on loopback only. torch's TCPStore would listen on every interface, so rank 0 passes it a bound
    socket."""
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
            f"{error.strerror}. Stop the program that uses it, or set MASTER_PORT (and MASTER_ADDR) to a free port "
            "for all processes."
        ) from None
    listening.listen()
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, world.size, True, timeout, master_listen_fd=listening.detach())


def leave() -> None:
    """End the process group and its threads, if there is a group.

    Gloo's threads drop a finished collective's tensors shortly after the waiting thread continues. A thread that does
    so while the interpreter shuts down aborts the process ("terminate called without an active exception"; plain DDP
    does that in about one of ten exits). Destroying the group joins its threads, if nothing else references the group.

    Destroying waits for collectives in progress, and so does aborting. If this process ends with an error, the others
    may never join those collectives. In that case it waits for at most world.FAILED_SECONDS.
    """
    if dist.is_available() and dist.is_initialized():
        mesh.forget()
        gc.collect()
        with ends_if_failed():
            dist.destroy_process_group()
