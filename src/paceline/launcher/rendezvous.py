"""The rendezvous, and the stores of the workers.

On one machine, the launcher opens a store on loopback, for this user's processes only (store.py). The workers use this
store (TORCHELASTIC_USE_AGENT_STORE) and open none.

On several machines with a secret, one launcher hosts the stores at the given address, and each launcher forwards
loopback ports to them (tunnel.py). With --rdzv-insecure, the secret is empty. Several launchers on one machine need no
secret, and use a store like that of a single launcher. With c10d, torch's state machine decides which machines take
part; its state is stored as JSON. With static, each launcher has a fixed number.

With etcd or a shared file, torch's own rendezvous is used, which stores a pickle.
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
from paceline.launcher.tunnel import NotALauncher, knock, open_relay, open_rendezvous_host
from paceline.torch_private import dynamic_rendezvous
from paceline.world import is_loopback

JOIN_SECONDS = 600.0  # torch's own time limit for joining
_HINT_SECONDS = 5.0  # waiting time before a message
_PROBE_SECONDS = 10
_KNOCKS = 5


class _FixedRendezvous(RendezvousHandler):
    """The base class of rendezvous that are never closed and have no waiting machines."""

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
    """The rendezvous of a single launcher, which waits for no other launcher.

    Args:
        port: the port of the store; 0: any free port.
        early: workers that run already and wait for the first store.
    """

    use_agent_store = True

    def __init__(self, port: int, early: EarlyWorkers | None) -> None:
        self.run_id = uuid.uuid4().hex if early is None else early.run_id
        self._port, self._listener = port, None if early is None else early.listener
        self._store: Service | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store at each call, because keys of earlier workers would confuse the next workers."""
        self.shutdown()  # the same port may be needed again
        listener, self._listener = self._listener or listen(HOST, self._port), None
        self._store = open_store(listener)
        store = client(HOST, self._store.port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(HOST, self._store.port))

    def shutdown(self) -> bool:
        if self._store is not None:
            self._store.close()
        return True


class NumberedRendezvous(_FixedRendezvous):
    """A rendezvous of machines with fixed numbers. All machines take part in every round."""

    def __init__(self, nodes: Nodes, store: Store) -> None:
        self._nodes, self._store, self.run_id = nodes, store, nodes.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        rank = self._nodes.rank
        assert rank is not None
        place = RendezvousStoreInfo(self._nodes.host, self._nodes.port)
        return RendezvousInfo(PrefixStore(self._nodes.run_id, self._store), rank, self._nodes.max_nodes, place)


class JsonBackend(RendezvousBackend):
    """Stores the state of torch's dynamic rendezvous as JSON.

    torch's interface uses pickles. torch loads only pickles that this class makes, from JSON with all fields checked.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._key = store, f"rendezvous/{run_id}"

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        # This returns an empty value if there is no state. `get` would wait for the missing key.
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
            raise RendezvousConnectionError(f"The rendezvous store does not answer: {error}") from error


class MachinesRendezvous:
    """Wraps a RendezvousHandler so that its wait for other machines can be interrupted, and opens the workers' stores.

    torch waits in C++ for minutes, and Python calls no signal handlers meanwhile. So torch waits in a separate thread.

    Args:
        services: services of this launcher, closed together with the rendezvous.
        address: the address of the launcher that hosts all stores behind tunnels. None: there are no tunnels, and the
            first machine hosts the workers' stores.
    """

    def __init__(
        self, inner: RendezvousHandler, nodes: Nodes, *services: Service, address: tuple[str, int] | None = None
    ) -> None:
        self._inner, self._nodes = inner, nodes
        self._services, self._address = list(services), address
        self._workers: Service | TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        found: list[RendezvousInfo | BaseException] = []

        def join() -> None:
            try:
                found.append(self._inner.next_rendezvous())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        hint = _Hint(f"paceline: waiting for the other machines, at {self._nodes.endpoint}")
        while thread.is_alive():
            thread.join(0.05)
            hint.poll()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def relay_to_workers(self, starts: int) -> int | None:
        """Forward a loopback port to the workers' store of one round. Return the port, or None without tunnels."""
        if self._address is None:
            return None
        self._close_workers()
        self._workers = open_relay(self._address, self._nodes.key, f"workers/{starts}")
        return self._workers.port

    def open_workers_store(self, host: str) -> int:
        """Open a store for the workers of one round, on the first machine. Return its port.

        torch would reuse the store of the previous round, where gloo finds workers that have ended. With torch's
        rendezvous, the store listens on --local-addr if it is given, else on every interface, as torch's stores do.

        Args:
            host: the first machine's name for the other machines.
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
        self._workers = None  # a TCPStore stops listening when it is freed

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
    """Prints a line on stderr once if a wait takes longer than usual."""

    def __init__(self, text: str) -> None:
        self._text, self._due = text, time.monotonic() + _HINT_SECONDS

    def poll(self) -> None:
        if time.monotonic() > self._due:
            self._due = float("inf")
            print(self._text, file=sys.stderr, flush=True)


def make_rendezvous(nodes: Nodes, early: EarlyWorkers | None = None) -> LoopbackRendezvous | MachinesRendezvous:
    """Make the rendezvous of these machines.

    Args:
        early: workers that run already and wait for the first store.

    Raises:
        LaunchError: the endpoint cannot be reached, or is not a rendezvous.
    """
    if not nodes.several:
        return LoopbackRendezvous(nodes.port, early)
    # Hide torch's warnings: Paceline itself reports that another machine has closed the rendezvous, or is down.
    logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
    config: dict[str, Any] = {"timeout": int(JOIN_SECONDS), **nodes.conf}
    if nodes.rank is not None:
        config["rank"] = nodes.rank
    numbers = (nodes.min_nodes, nodes.max_nodes)
    parameters = RendezvousParameters(nodes.backend, nodes.endpoint, nodes.run_id, *numbers, nodes.local_addr, **config)
    services: list[Service] = []
    try:
        if not nodes.guarded:
            return MachinesRendezvous(rendezvous_handler_registry.create_handler(parameters), nodes)
        hosted = _host_stores(nodes)
        if hosted is not None:
            services.append(hosted)
        address = _reach(nodes, hosted)
        if nodes.tunnelled:
            services.append(open_relay(address, nodes.key, "rendezvous"))
        store = client(*((HOST, services[-1].port) if nodes.tunnelled else address))
        if nodes.backend == "static":
            inner: RendezvousHandler = NumberedRendezvous(nodes, store)
        else:
            inner = create_handler(store, JsonBackend(store, nodes.run_id), parameters)
        return MachinesRendezvous(inner, nodes, *services, address=address if nodes.tunnelled else None)
    except Exception as error:  # torch raises many types; some only wrap the informative exception
        for service in services:
            service.close()
        if isinstance(error, LaunchError):
            raise
        why = str(error.__cause__ or error).splitlines()[0]
        raise LaunchError(
            f"Cannot set up the rendezvous ({nodes.backend}, {nodes.endpoint}): {why}. Check --rdzv-backend, "
            "--rdzv-endpoint and --rdzv-conf, and that the port is free on the rendezvous host."
        ) from None


def client(host: str, port: int, timeout_seconds: float = JOIN_SECONDS) -> TCPStore:
    """Connect torch's client to a launcher's store."""
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def _host_stores(nodes: Nodes) -> Service | None:
    """Host the stores if this is the rendezvous host's launcher, else return None. Raises OSError."""
    if nodes.rank != 0 and (nodes.rank is not None or not is_local(nodes.host)):
        return None
    try:
        listener = listen(_named_address(nodes), nodes.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None  # another launcher of this machine may host them; if not, `_reach` reports it
    return open_rendezvous_host(listener, nodes.key) if nodes.tunnelled else open_store(listener)


def _named_address(nodes: Nodes) -> str:
    """Return the address to listen on: the given address, or all addresses if other machines cannot reach it.

    They cannot if its name resolves to loopback on this machine, as on Debian, or if it belongs to a NAT router.
    """
    for host in (nodes.host, nodes.local_addr):
        if host is not None and is_local(host):
            address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
            if nodes.loopback or not is_loopback(address):
                return address
    return "0.0.0.0"


def _reach(nodes: Nodes, hosted: Service | None) -> tuple[str, int]:
    """Wait until the rendezvous host answers and knows the secret. Return its address. Raises LaunchError.

    Launchers may be started in any order.
    """
    if hosted is not None:
        return hosted.host if hosted.host != "0.0.0.0" else HOST, nodes.port
    hint = _Hint(f"paceline: waiting for the launcher at {nodes.endpoint}")
    start, attempts = time.monotonic(), 0
    while True:
        try:
            host = str(socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)[0][4][0])
            (knock if nodes.tunnelled else _ask_store)((host, nodes.port), nodes.key, _PROBE_SECONDS)
            return host, nodes.port
        except (Refused, NotALauncher) as error:
            attempts += 1  # an old launcher may be ending there, and a new one starting
            if attempts >= _KNOCKS or (isinstance(error, NotALauncher) and attempts > 1):
                raise LaunchError(_refusal(nodes, error)) from None
        except OSError:
            if time.monotonic() - start > JOIN_SECONDS:
                raise LaunchError(
                    f"No answer from {nodes.endpoint} for {JOIN_SECONDS:.0f} s. Start the launcher there, and check "
                    "the name, the port and firewalls."
                ) from None
        hint.poll()
        time.sleep(0.2)


def _ask_store(address: tuple[str, int], secret: bytes, seconds: float) -> None:
    """Check that a store of this machine listens at the address. Raises NotALauncher or OSError. `secret` is unused."""
    with socket.create_connection(address, timeout=seconds) as sock:
        try:
            sock.sendall(PING)
            if sock.recv(len(PONG), socket.MSG_WAITALL) != PONG:
                raise NotALauncher("it does not speak a launcher's protocol")
        except OSError as error:
            raise NotALauncher(str(error)) from None


def _refusal(nodes: Nodes, problem: OSError) -> str:
    """Explain why the program at the endpoint does not accept this launcher, with the remedy."""
    if isinstance(problem, Refused):
        ours = f"the secret in {nodes.secret_file}" if nodes.secret_file else "this launcher, which has no secret"
        return (
            f"--rdzv-endpoint {nodes.endpoint}: the launcher there does not accept {ours} ({problem}). Give all "
            "machines the same file (--rdzv-secret-file), or start all with --rdzv-insecure."
        )
    return (
        f"--rdzv-endpoint {nodes.endpoint}: the program on port {nodes.port} is not a launcher of this version "
        f"({problem}). End it there (`ss -ltnp | grep {nodes.port}` names it), choose another port on all machines, or "
        "install the same version of Paceline on all."
    )
