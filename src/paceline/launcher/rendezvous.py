"""Where the workers meet.

On one machine: at a store of the launcher's own on loopback, for this user's processes alone (doors.py). The workers
use it (TORCHELASTIC_USE_AGENT_STORE), so that none of them opens one.

On several machines that share a secret: one launcher keeps the stores, at the address that was named. Each launcher
has doors on its own loopback that lead there. torch's state machine decides who takes part (c10d), on state that is
JSON; or each launcher has its number (static).

On several machines otherwise, where that was asked for (--rdzv-insecure, etcd): torch's rendezvous. Its store listens
on every interface, asks nobody, and holds a pickle.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from paceline.errors import LaunchError
from paceline.launcher.doors import Doors, KeeperDoor, NoKeeper, RelayDoor, StoreDoor, knock
from paceline.launcher.early_start import HOST, EarlyWorkers, listen
from paceline.launcher.nodes import Nodes
from paceline.launcher.sealed import Refused
from paceline.torch_private import dynamic_rendezvous
from paceline.world import is_loopback

BACKEND = "paceline-loopback"
MEET_SECONDS = 600.0  # torch's own time limit for joining
_HINT_SECONDS = 5.0  # of waiting, before a message says so
_PROBE_SECONDS = 10
_KNOCKS = 5


class LoopbackRendezvous(RendezvousHandler):
    """torch's rendezvous interface for a single agent, which never waits for another one."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.get("port", 0))
        self._listener: socket.socket | None = parameters.get("listener")  # of the first store; None: not made yet
        self._doors: Doors | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store at each call: what former workers left in theirs would confuse the next ones."""
        if self._doors is not None:
            self._doors.close()  # its port may be wanted again
        listener, self._listener = self._listener or listen(HOST, self._port), None
        self._doors = Doors(listener, StoreDoor())
        store = client(self._doors.port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(HOST, self._doors.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        if self._doors is not None:
            self._doors.close()
        return True


class Guard:
    """The stores of a run on several machines, for who knows the secret.

    Attributes:
        address: of the launcher that keeps them.
    """

    def __init__(self, nodes: Nodes, address: tuple[str, int], keeper: Doors | None) -> None:
        self.address = address
        self._nodes, self._keeper = nodes, keeper
        self._open: dict[str, Doors] = {}

    def door(self, room: str) -> int:
        """The port on this machine's loopback that leads to a room. One of an earlier round closes."""
        kind = room.partition("/")[0]
        if kind in self._open:
            self._open[kind].close()
        door = RelayDoor(self.address, self._nodes.key, room)
        self._open[kind] = Doors(listen(HOST, 0), door)
        return self._open[kind].port

    def close(self) -> None:
        for doors in self._open.values():
            doors.close()
        if self._keeper is not None:
            self._keeper.close()


class JsonBackend(RendezvousBackend):
    """The state of torch's dynamic rendezvous in a store, as JSON.

    torch gives and takes a pickle. What it takes was made here, of JSON whose every field was looked at.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._key = store, f"rendezvous/{run_id}"

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        # An empty value stands for none: to read a key that is not there would wait for it.
        return self._found(self._call("compare_set", self._key, "", ""))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        wanted = dynamic_rendezvous.to_json(state)
        text = self._call("compare_set", self._key, "" if token is None else str(token), wanted)
        found = self._found(text)
        return None if found is None else (*found, text == wanted.encode())

    def _found(self, text: bytes) -> tuple[bytes, Token] | None:
        if not text:
            return None
        try:
            return dynamic_rendezvous.from_json(text.decode()), text.decode()
        except ValueError as error:
            raise RendezvousStateError(str(error)) from None

    def _call(self, operation: str, *arguments: str) -> bytes:
        try:
            return bytes(getattr(self._store, operation)(*arguments))
        except (ValueError, RuntimeError, OSError) as error:
            raise RendezvousConnectionError(f"The store of the rendezvous does not answer: {error}") from error


class NumberedRendezvous(RendezvousHandler):
    """Of machines that are numbered already, and all take part in each round."""

    def __init__(self, nodes: Nodes, store: Store) -> None:
        self._nodes, self._store = nodes, store

    def next_rendezvous(self) -> RendezvousInfo:
        rank = self._nodes.rank
        assert rank is not None
        place = RendezvousStoreInfo(self._nodes.host, self._nodes.port)
        return RendezvousInfo(PrefixStore(self._nodes.run_id, self._store), rank, self._nodes.max_nodes, place)

    def get_backend(self) -> str:
        return "static"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._nodes.run_id

    def shutdown(self) -> bool:
        return True


class InterruptibleRendezvous(RendezvousHandler):
    """Another rendezvous, whose waiting for other machines can be interrupted.

    torch waits inside C++ for minutes, where no signal handler of Python's is called. Here it waits in a thread of its
    own.
    """

    def __init__(self, inner: RendezvousHandler, nodes: Nodes, guard: Guard | None = None) -> None:
        self._inner, self._nodes = inner, nodes
        self.guard = guard  # None: torch's stores

    def next_rendezvous(self) -> RendezvousInfo:
        found: list[RendezvousInfo | BaseException] = []

        def meet() -> None:
            try:
                found.append(self._inner.next_rendezvous())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        start, said = time.monotonic(), False
        while thread.is_alive():
            thread.join(0.05)
            if not said and time.monotonic() - start > _HINT_SECONDS:
                said = True
                print(
                    f"paceline: waiting for the other machines, at {self._nodes.endpoint}", file=sys.stderr, flush=True
                )
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        try:
            return self._inner.shutdown()
        finally:
            if self.guard is not None:
                self.guard.close()


def make_rendezvous(nodes: Nodes, early: EarlyWorkers | None = None) -> RendezvousHandler:
    """The rendezvous handler for these machines, by way of torch's registry. early: workers that wait for its store.

    Raises LaunchError where the endpoint cannot be reached or is no rendezvous.
    """
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    if not nodes.several:
        run_id, listener = (uuid.uuid4().hex, None) if early is None else (early.run_id, early.listener)
        parameters = RendezvousParameters(BACKEND, "", run_id, 1, 1, port=nodes.port, listener=listener)
        return rendezvous_handler_registry.create_handler(parameters)
    # That another machine has closed the rendezvous, or has gone, is told in our own words.
    logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
    if nodes.guarded:
        return _guarded(nodes)
    config: dict[str, Any] = {"timeout": int(MEET_SECONDS), **nodes.conf}
    if nodes.rank is not None:
        config["rank"] = nodes.rank
    if nodes.backend == "c10d" and nodes.conf.get("store_type", "tcp") == "tcp" and "is_host" not in nodes.conf:
        config["is_host"] = _hosts_rendezvous(nodes)
    elif nodes.backend == "static" and nodes.rank != 0:
        _wait_for(nodes)
    try:
        try:
            inner = _torch_handler(nodes, config)
        except Exception:
            if config.get("is_host") is not True or not _is_listening(nodes):
                raise
            inner = _torch_handler(nodes, {**config, "is_host": False})  # another launcher here was faster
        return InterruptibleRendezvous(inner, nodes)
    except Exception as error:  # torch's are of many kinds; some only wrap the one that says something
        why = str(error.__cause__ or error).splitlines()[0]
        raise LaunchError(
            f"The rendezvous ({nodes.backend}, {nodes.endpoint}) cannot be made: {why}. Check --rdzv-backend, "
            "--rdzv-endpoint and --rdzv-conf, and that the port is free on the machine named."
        ) from None


def client(port: int, timeout_seconds: float = MEET_SECONDS) -> TCPStore:
    """torch's client, at a door of this launcher's."""
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=limit)


def _guarded(nodes: Nodes) -> InterruptibleRendezvous:
    """The rendezvous of machines that share a secret. Raises LaunchError."""
    keeper: Doors | None = None
    if nodes.rank == 0 or (nodes.rank is None and _is_local(nodes.host)):
        try:
            listener = listen(_named_address(nodes), nodes.port)
        except OSError as error:
            # Another launcher of this machine was faster, as a test may have; or else nobody answers below.
            if error.errno != errno.EADDRINUSE or not _is_listening(nodes):
                raise _cannot_be_made(nodes, str(error)) from None
        else:
            keeper = Doors(listener, KeeperDoor(nodes.key, own_machine=nodes.secret is None))
    try:
        address = _reach(nodes, keeper)
        guard = Guard(nodes, address, keeper)
        store = client(guard.door("rendezvous"))
        if nodes.rank is not None and nodes.backend == "static":
            return InterruptibleRendezvous(NumberedRendezvous(nodes, store), nodes, guard)
        config: dict[str, Any] = {"timeout": int(MEET_SECONDS), **nodes.conf}
        numbers = (nodes.min_nodes, nodes.max_nodes)
        parameters = RendezvousParameters("c10d", nodes.endpoint, nodes.run_id, *numbers, nodes.local_addr, **config)
        inner = create_handler(store, JsonBackend(store, nodes.run_id), parameters)
        return InterruptibleRendezvous(inner, nodes, guard)
    except Exception as error:
        if keeper is not None:
            keeper.close()
        if isinstance(error, LaunchError):
            raise
        raise _cannot_be_made(nodes, str(error.__cause__ or error)) from None


def _cannot_be_made(nodes: Nodes, why: str) -> LaunchError:
    return LaunchError(
        f"The rendezvous ({nodes.backend}, {nodes.endpoint}) cannot be made: {why.splitlines()[0]}. Check "
        "--rdzv-backend, --rdzv-endpoint and --rdzv-conf, and that the port is free on the machine named."
    )


def _named_address(nodes: Nodes) -> str:
    """The address to listen on: the one that was named. All of them where this machine knows its name as loopback, as
    Debian has it, or does not have that address itself, as behind a translating router: the others could not come."""
    for host in (nodes.host, nodes.local_addr):
        if host is not None and _is_local(host):
            address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
            if nodes.loopback or not is_loopback(address):
                return address
    return "0.0.0.0"


def _reach(nodes: Nodes, keeper: Doors | None) -> tuple[str, int]:
    """The keeper's address, once it has answered and knows the secret. Raises LaunchError."""
    if keeper is not None:
        return keeper.host if keeper.host != "0.0.0.0" else HOST, nodes.port
    _wait_until_listening(nodes)
    problem: OSError | None = None
    host = str(socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)[0][4][0])
    for attempt in range(_KNOCKS):
        try:
            knock((host, nodes.port), nodes.key, _PROBE_SECONDS)
            return host, nodes.port
        except OSError as error:
            problem = error
            if isinstance(error, NoKeeper) and attempt:
                break
            if attempt < _KNOCKS - 1:
                time.sleep(0.2)  # it may have been crowded by others, or end just now
    if isinstance(problem, Refused):
        ours = f"the secret in {nodes.secret_file}" if nodes.secret_file else "this launcher, which has no secret"
        raise LaunchError(
            f"--rdzv-endpoint {nodes.endpoint}: the launcher there does not accept {ours} ({problem}). Give all "
            "machines the same file (--rdzv-secret-file)."
        )
    if isinstance(problem, NoKeeper) and _is_insecure(nodes):
        raise LaunchError(
            f"--rdzv-endpoint {nodes.endpoint}: the launcher there asks nobody for a secret (it has --rdzv-insecure, "
            "or is torchrun's), and this one does. Start all machines alike: with --rdzv-secret-file, or all with "
            "--rdzv-insecure."
        )
    if isinstance(problem, NoKeeper):
        raise LaunchError(
            f"--rdzv-endpoint {nodes.endpoint}: something that is no launcher of this version listens on port "
            f"{nodes.port} ({problem}). End it there (`ss -ltnp | grep {nodes.port}` names it), choose another port on "
            "all machines alike, or install the same version of Paceline on all."
        )
    raise LaunchError(f"--rdzv-endpoint {nodes.endpoint}: the connection broke ({problem}). Start the launchers again.")


def workers_store(nodes: Nodes, host: str) -> TCPStore:
    """On the first of several machines: a store for the workers of one round, which the others know as `host`.

    torch would give them the store of the round before, in which gloo finds the addresses of workers that have ended.
    This one listens on --local-addr, or on loopback where that is the endpoint; or else, as torch's, on every
    interface.
    """
    if nodes.local_addr is not None:
        return _store_on(listen(nodes.local_addr, 0))
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _store_on(listener: socket.socket) -> TCPStore:
    """A store that listens at this socket, and closes it in the end."""
    host, found = listener.getsockname()[:2]
    return TCPStore(host, found, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _torch_handler(nodes: Nodes, config: Mapping[str, Any]) -> RendezvousHandler:
    numbers = (nodes.min_nodes, nodes.max_nodes)
    parameters = RendezvousParameters(nodes.backend, nodes.endpoint, nodes.run_id, *numbers, nodes.local_addr, **config)
    return rendezvous_handler_registry.create_handler(parameters)


def _hosts_rendezvous(nodes: Nodes) -> bool:
    """Does this launcher host the rendezvous? If not, wait for the one that does."""
    if not _is_local(nodes.host):
        _wait_for(nodes)
        return False
    if _is_listening(nodes):  # another launcher of this machine, which a test may have
        _probe(nodes)
        return False
    return True


def _is_local(host: str) -> bool:
    """Is it an address of this machine? torch compares names, which does not find all addresses of all networks."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _is_listening(nodes: Nodes) -> bool:
    """Does anything accept connections at the endpoint?"""
    try:
        socket.create_connection((nodes.host, nodes.port), timeout=2.0).close()
        return True
    except OSError:
        return False


def _wait_for(nodes: Nodes) -> None:
    """Wait until the machine that hosts torch's rendezvous answers."""
    _wait_until_listening(nodes)
    _probe(nodes)


def _wait_until_listening(nodes: Nodes) -> None:
    """Wait until something listens at the endpoint: launchers may be started in any order."""
    start = time.monotonic()
    said = False
    while not _is_listening(nodes):
        waited = time.monotonic() - start
        if waited > MEET_SECONDS:
            raise LaunchError(
                f"Nobody answered at {nodes.endpoint} for {MEET_SECONDS:.0f} s. Start the launcher there, and "
                "check that its name and port are right and that no firewall is between."
            )
        if waited > _HINT_SECONDS and not said:
            said = True
            print(f"paceline: waiting for the launcher at {nodes.endpoint}", file=sys.stderr, flush=True)
        time.sleep(0.2)


def _probe(nodes: Nodes) -> None:
    """Raise LaunchError if no store of torch's listens there. In a thread, since torch waits for ever."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            limit = timedelta(seconds=_PROBE_SECONDS)  # of new attempts, not of waiting for an answer
            TCPStore(nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=limit)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    start = time.monotonic()
    while thread.is_alive() and time.monotonic() - start < _PROBE_SECONDS:
        thread.join(0.05)
    if answered.is_set():
        return
    if _asks_for_a_secret(nodes):
        raise LaunchError(
            f"--rdzv-endpoint {nodes.endpoint}: the launcher there asks for a secret, and this one was started with "
            "--rdzv-insecure. Start all machines alike: with the file that the launcher there has "
            "(--rdzv-secret-file), or all with --rdzv-insecure."
        )
    raise LaunchError(
        f"--rdzv-endpoint {nodes.endpoint}: what listens on port {nodes.port} does not answer as a launcher does. If "
        f"it is another program (`ss -ltnp | grep {nodes.port}` there names it), end it, or choose another port on all "
        "machines alike. If it is a launcher, start all machines with the same version and options."
    )


def _asks_for_a_secret(nodes: Nodes) -> bool:
    """Does a launcher listen at the endpoint that lets in none without its secret?"""
    try:
        knock((nodes.host, nodes.port), b"", _PROBE_SECONDS)
    except NoKeeper:
        return False
    except OSError as error:
        return isinstance(error, Refused)
    return True


def _is_insecure(nodes: Nodes) -> bool:
    """Does a store of torch's listen at the endpoint, as that of a launcher with --rdzv-insecure or of torchrun?"""
    try:
        _probe(nodes)
    except LaunchError:
        return False
    return True
