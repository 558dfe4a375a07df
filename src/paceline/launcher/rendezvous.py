"""Where the workers meet: on one machine a store that listens on loopback only, on several machines torch's rendezvous.

torch's rendezvous opens a TCPStore that listens on every interface, even when it is told 127.0.0.1. On one machine the
socket is therefore bound first and handed over. The workers use the same store (TORCHELASTIC_USE_AGENT_STORE), so that
none of them opens one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exported from C++
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from paceline.errors import LaunchError
from paceline.launcher.nodes import Nodes

BACKEND = "paceline-loopback"
MEET_SECONDS = 600.0  # torch's own time limit for joining
_HINT_SECONDS = 5.0  # of waiting, before a message says so
_PROBE_SECONDS = 10


class LoopbackRendezvous(RendezvousHandler):
    """torch's rendezvous interface for a single agent, which never waits for another one."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.get("port", 0))
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store at each call: what former workers left in theirs would confuse the next ones."""
        self._store = None  # stops listening, if nobody else holds it: its port may be wanted again
        self._store = _store_on("127.0.0.1", self._port)
        return RendezvousInfo(
            PrefixStore("agent", self._store), 0, 1, RendezvousStoreInfo("127.0.0.1", self._store.port)
        )

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
        self._store = None  # stops listening
        return True


class InterruptibleRendezvous(RendezvousHandler):
    """Another rendezvous, whose waiting for other machines can be interrupted.

    torch waits inside C++ for minutes, where no signal handler of Python's is called. Here it waits in a thread of its
    own.
    """

    def __init__(self, inner: RendezvousHandler, nodes: Nodes) -> None:
        self._inner, self._nodes = inner, nodes

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
        return self._inner.shutdown()


def make_rendezvous(nodes: Nodes) -> RendezvousHandler:
    """The rendezvous handler for these machines, by way of torch's registry.

    Raises LaunchError where the endpoint cannot be reached or is no rendezvous.
    """
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    if not nodes.several:
        parameters = RendezvousParameters(BACKEND, "", uuid.uuid4().hex, 1, 1, port=nodes.port)
        return rendezvous_handler_registry.create_handler(parameters)
    # That another machine has closed the rendezvous, or has gone, is told in our own words.
    logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
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


def workers_store(nodes: Nodes, host: str) -> TCPStore:
    """On the first of several machines: a store for the workers of one round, which the others know as `host`.

    torch would give them the store of the round before, in which gloo finds the addresses of workers that have ended.
    This one listens on --local-addr, or on loopback where that is the endpoint; or else, as torch's, on every
    interface.
    """
    if nodes.local_addr is not None:
        return _store_on(nodes.local_addr, 0)
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _store_on(host: str, port: int) -> TCPStore:
    """A store that listens on one address only."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    found = listener.getsockname()[1]
    # The store takes the descriptor over and closes it.
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
    """Wait until the machine that hosts the rendezvous answers: launchers may be started in any order."""
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
    _probe(nodes)


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
    if not answered.is_set():
        raise LaunchError(
            f"--rdzv-endpoint {nodes.endpoint}: something that is no launcher listens on port {nodes.port}. End it "
            f"there (`ss -ltnp | grep {nodes.port}` names it), or choose another port, on all machines alike."
        )
