"""Where the workers meet.

On one machine: at a store of the launcher's own on loopback, for this user's processes alone (store.py). The workers
use it (TORCHELASTIC_USE_AGENT_STORE), so that none of them opens one.

On several machines that share a secret: one launcher keeps the stores, at the address that was named, and each launcher
has ports on its own loopback that lead there (tunnel.py). With --rdzv-insecure the secret is one that everybody knows.
Several launchers on one machine need none: they meet at a store as on one machine. torch's state machine decides who
takes part (c10d), on state that is JSON; or each launcher has its number (static).

With etcd, or a file that machines share: torch's rendezvous, which holds a pickle.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
import uuid
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
from paceline.launcher.checks import HOST, is_local, listen
from paceline.launcher.early_start import EarlyWorkers
from paceline.launcher.key_values import PING, PONG
from paceline.launcher.nodes import Nodes
from paceline.launcher.store import Refused, Service, open_store
from paceline.launcher.tunnel import NoKeeper, knock, open_keeper, open_relay
from paceline.torch_private import dynamic_rendezvous
from paceline.world import is_loopback

MEET_SECONDS = 600.0  # torch's own time limit for joining
_HINT_SECONDS = 5.0  # of waiting, before a message says so
_PROBE_SECONDS = 10
_KNOCKS = 5


class _FixedRendezvous(RendezvousHandler):
    """torch's interface, of a rendezvous for which no machine waits and which is never closed."""

    run_id = ""

    def get_backend(self) -> str:
        return "paceline"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


class LoopbackRendezvous(_FixedRendezvous):
    """Of one launcher, which never waits for another one.

    Args:
        port: of the store; 0: any.
        early: workers that wait for the first store, if they run already.
    """

    use_agent_store = True

    def __init__(self, port: int, early: EarlyWorkers | None) -> None:
        self.run_id = uuid.uuid4().hex if early is None else early.run_id
        self._port, self._listener = port, None if early is None else early.listener
        self._store: Service | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store at each call: what former workers left in theirs would confuse the next ones."""
        self.shutdown()  # its port may be wanted again
        listener, self._listener = self._listener or listen(HOST, self._port), None
        self._store = open_store(listener)
        store = client(HOST, self._store.port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(HOST, self._store.port))

    def shutdown(self) -> bool:
        if self._store is not None:
            self._store.close()
        return True


class NumberedRendezvous(_FixedRendezvous):
    """Of machines that are numbered already, and all take part in each round."""

    def __init__(self, nodes: Nodes, store: Store) -> None:
        self._nodes, self._store, self.run_id = nodes, store, nodes.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        rank = self._nodes.rank
        assert rank is not None
        place = RendezvousStoreInfo(self._nodes.host, self._nodes.port)
        return RendezvousInfo(PrefixStore(self._nodes.run_id, self._store), rank, self._nodes.max_nodes, place)


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


class MachinesRendezvous:
    """Another RendezvousHandler, whose waiting for other machines can be interrupted, and the stores of its rounds.

    torch waits inside C++ for minutes, where no signal handler of Python's is called. Here it waits in a thread of its
    own.

    Args:
        services: of this launcher, which are closed with the rendezvous.
        address: of the launcher that keeps all stores behind tunnels; None: the first machine has those of the workers.
    """

    def __init__(
        self, inner: RendezvousHandler, nodes: Nodes, *services: Service, address: tuple[str, int] | None = None
    ) -> None:
        self._inner, self._nodes = inner, nodes
        self._services, self._address = list(services), address
        self._workers: Service | TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        found: list[RendezvousInfo | BaseException] = []

        def meet() -> None:
            try:
                found.append(self._inner.next_rendezvous())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        hint = _Hint(f"paceline: waiting for the other machines, at {self._nodes.endpoint}")
        while thread.is_alive():
            thread.join(0.05)
            hint.poll()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def relay_to_workers(self, starts: int) -> int | None:
        """The port of loopback that leads to the store for the workers of one round; None: there is no such way."""
        if self._address is None:
            return None
        self._close_workers()
        self._workers = open_relay(self._address, self._nodes.key, f"workers/{starts}")
        return self._workers.port

    def open_workers_store(self, host: str) -> int:
        """On the first machine, which the others know as `host`: a store for the workers of one round. Returns its
        port. (torch would give them the store of the round before, in which gloo finds workers that have ended.)

        Where torch's own rendezvous is used, it listens on --local-addr, or else, as torch's, on every interface.
        """
        self._close_workers()
        if self._nodes.guarded:
            self._workers = open_store(listen(host, 0))
        elif self._nodes.local_addr is not None:
            listener = listen(self._nodes.local_addr, 0)
            address, port = listener.getsockname()[:2]
            options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
            self._workers = TCPStore(address, port, **options)
        else:
            self._workers = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._workers.port)

    def _close_workers(self) -> None:
        if isinstance(self._workers, Service):
            self._workers.close()
        self._workers = None  # torch's stops listening

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def shutdown(self) -> bool:
        try:
            return self._inner.shutdown()
        finally:
            self._close_workers()
            for service in self._services:
                service.close()


class _Hint:
    """A line on stderr, once, where something is waited for longer than usual."""

    def __init__(self, text: str) -> None:
        self._text, self._due = text, time.monotonic() + _HINT_SECONDS

    def poll(self) -> None:
        if time.monotonic() > self._due:
            self._due = float("inf")
            print(self._text, file=sys.stderr, flush=True)


def make_rendezvous(nodes: Nodes, early: EarlyWorkers | None = None) -> LoopbackRendezvous | MachinesRendezvous:
    """The rendezvous of these machines. early: workers that wait for its store.

    Raises LaunchError where the endpoint cannot be reached or is no rendezvous.
    """
    if not nodes.several:
        return LoopbackRendezvous(nodes.port, early)
    # That another machine has closed the rendezvous, or has gone, is told in our own words.
    logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
    config: dict[str, Any] = {"timeout": int(MEET_SECONDS), **nodes.conf}
    if nodes.rank is not None:
        config["rank"] = nodes.rank
    numbers = (nodes.min_nodes, nodes.max_nodes)
    parameters = RendezvousParameters(nodes.backend, nodes.endpoint, nodes.run_id, *numbers, nodes.local_addr, **config)
    services: list[Service] = []
    try:
        if not nodes.guarded:
            return MachinesRendezvous(rendezvous_handler_registry.create_handler(parameters), nodes)
        keeper = _keep(nodes)
        if keeper is not None:
            services.append(keeper)
        address = _reach(nodes, keeper)
        if nodes.tunnelled:
            services.append(open_relay(address, nodes.key, "rendezvous"))
        store = client(*((HOST, services[-1].port) if nodes.tunnelled else address))
        if nodes.backend == "static":
            inner: RendezvousHandler = NumberedRendezvous(nodes, store)
        else:
            inner = create_handler(store, JsonBackend(store, nodes.run_id), parameters)
        return MachinesRendezvous(inner, nodes, *services, address=address if nodes.tunnelled else None)
    except Exception as error:  # torch's are of many kinds; some only wrap the one that says something
        for service in services:
            service.close()
        if isinstance(error, LaunchError):
            raise
        why = str(error.__cause__ or error).splitlines()[0]
        raise LaunchError(
            f"The rendezvous ({nodes.backend}, {nodes.endpoint}) cannot be made: {why}. Check --rdzv-backend, "
            "--rdzv-endpoint and --rdzv-conf, and that the port is free on the machine named."
        ) from None


def client(host: str, port: int, timeout_seconds: float = MEET_SECONDS) -> TCPStore:
    """torch's client, at a store of a launcher's."""
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def _keep(nodes: Nodes) -> Service | None:
    """The service of the launcher that keeps the stores; None: another launcher does. Raises OSError."""
    if nodes.rank != 0 and (nodes.rank is not None or not is_local(nodes.host)):
        return None
    try:
        listener = listen(_named_address(nodes), nodes.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None  # another launcher of this machine was faster, as a test may have; or else nobody answers below
    return open_keeper(listener, nodes.key) if nodes.tunnelled else open_store(listener)


def _named_address(nodes: Nodes) -> str:
    """The address to listen on: the one that was named. All of them where this machine knows its name as loopback, as
    Debian has it, or does not have that address itself, as behind a translating router: the others could not come."""
    for host in (nodes.host, nodes.local_addr):
        if host is not None and is_local(host):
            address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
            if nodes.loopback or not is_loopback(address):
                return address
    return "0.0.0.0"


def _reach(nodes: Nodes, keeper: Service | None) -> tuple[str, int]:
    """The keeper's address, once it has answered and knows the secret: launchers may be started in any order. Raises
    LaunchError."""
    if keeper is not None:
        return keeper.host if keeper.host != "0.0.0.0" else HOST, nodes.port
    hint = _Hint(f"paceline: waiting for the launcher at {nodes.endpoint}")
    start, attempts = time.monotonic(), 0
    while True:
        try:
            host = str(socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)[0][4][0])
            (knock if nodes.tunnelled else _ask_store)((host, nodes.port), nodes.key, _PROBE_SECONDS)
            return host, nodes.port
        except (Refused, NoKeeper) as error:
            attempts += 1  # it may end just now, and another begin
            if attempts >= _KNOCKS or (isinstance(error, NoKeeper) and attempts > 1):
                raise LaunchError(_refusal(nodes, error)) from None
        except OSError:
            if time.monotonic() - start > MEET_SECONDS:
                raise LaunchError(
                    f"Nobody answered at {nodes.endpoint} for {MEET_SECONDS:.0f} s. Start the launcher there, and "
                    "check that its name and port are right and that no firewall is between."
                ) from None
        hint.poll()
        time.sleep(0.2)


def _ask_store(address: tuple[str, int], secret: bytes, seconds: float) -> None:
    """Does a store of this machine's listen there? Raises as `knock` does; `secret` is not needed."""
    with socket.create_connection(address, timeout=seconds) as sock:
        try:
            sock.sendall(PING)
            if sock.recv(len(PONG), socket.MSG_WAITALL) != PONG:
                raise NoKeeper("it does not answer as a launcher does")
        except OSError as error:
            raise NoKeeper(str(error)) from None


def _refusal(nodes: Nodes, problem: OSError) -> str:
    """Why the launcher, or whatever listens at the endpoint, does not let this one in, and what to do."""
    if isinstance(problem, Refused):
        ours = f"the secret in {nodes.secret_file}" if nodes.secret_file else "this launcher, which has no secret"
        return (
            f"--rdzv-endpoint {nodes.endpoint}: the launcher there does not accept {ours} ({problem}). Give all "
            "machines the same file (--rdzv-secret-file), or --rdzv-insecure to all."
        )
    return (
        f"--rdzv-endpoint {nodes.endpoint}: something that is no launcher of this version listens on port "
        f"{nodes.port} ({problem}). End it there (`ss -ltnp | grep {nodes.port}` names it), choose another port on "
        "all machines alike, or install the same version of Paceline on all."
    )
