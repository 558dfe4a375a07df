"""Which machines take part and where they meet: torchrun's options, read and checked. Pure, but for the file with
the secret.

One machine meets nobody and listens on loopback only, whatever else is said. Several machines meet by a rendezvous:
`static` where each launcher is told its number (--node-rank), or else `c10d`, or what --rdzv-backend names. These two
need a secret that all of them share, unless they all are on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import LaunchError
from paceline.launcher.secret import read_secret
from paceline.world import is_loopback

_C10D_PORT = 29400  # torch's defaults
_STATIC_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run.

    Attributes:
        min_nodes, max_nodes: how many there may be. If they differ, machines may come and go.
        backend: torch's rendezvous; "" on one machine.
        host, port: where several machines meet. On one machine, the port of its store, 0 for any.
        rank: this machine's number; None where the rendezvous gives the numbers.
        run_id: the name of the run, alike on all machines.
        conf: options of the rendezvous.
        local_addr: the address by which others reach this machine; None: its name.
        secret: what the launchers of several machines share; None: nothing.
        secret_file: where it is from, for messages; "": handed over.
        insecure: may everybody enter?
        unused: options that were given and mean nothing on one machine.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    backend: str = ""
    host: str = ""
    port: int = 0
    rank: int | None = None
    run_id: str = "paceline"
    conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str = ""
    insecure: bool = False
    unused: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        return self.max_nodes > 1

    @property
    def may_change(self) -> bool:
        """May machines come and go?"""
        return self.min_nodes < self.max_nodes

    @property
    def guarded(self) -> bool:
        """Do the machines meet by our own rendezvous? (Not by one in an etcd server, or in a file that they share.)"""
        return self.several and _can_be_guarded(self.backend, self.conf)

    @property
    def tunnelled(self) -> bool:
        """Do they meet over the network? Launchers of one machine do not: the kernel tells whose they are."""
        return self.guarded and not (self.secret is None and is_loopback(self.host))

    @property
    def key(self) -> bytes:
        """The secret as bytes. Without one everybody knows it."""
        return (self.secret or "").encode()

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Do all processes run on this machine?"""
        return not self.several or is_loopback(self.host)


ALONE = Nodes()


def read_nodes(
    *,
    nnodes: str = "1",
    node_rank: int | None = None,
    rdzv_backend: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    rdzv_conf: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    local_addr: str | None = None,
    standalone: bool = False,
    rdzv_secret_file: str | None = None,
    rdzv_insecure: bool = False,
) -> Nodes:
    """Nodes from torchrun's options of the same names. Raises LaunchError where they contradict each other."""
    min_nodes, max_nodes = _counts(nnodes)
    if master_port is not None and not 0 <= master_port <= 65535:
        raise LaunchError(f"--master-port {master_port} is no TCP port. Give a free one from 1024 to 65535.")
    if standalone and max_nodes > 1:
        raise LaunchError(f"--standalone means this machine alone, but --nnodes is {nnodes}. Leave one of them out.")
    if node_rank is not None and not 0 <= node_rank < max_nodes:
        numbers = "is 0, the only one" if max_nodes == 1 else f"is from 0 to {max_nodes - 1}"
        raise LaunchError(f"--node-rank {node_rank}: with --nnodes {nnodes} a machine's number {numbers}.")
    if max_nodes == 1:
        return Nodes(
            port=0 if standalone else master_port or 0,
            run_id=rdzv_id or "paceline",
            unused=_unused(
                rdzv_backend=None if rdzv_backend == "c10d" else rdzv_backend,
                rdzv_endpoint=rdzv_endpoint if not _is_this_machine(rdzv_endpoint) else None,
                rdzv_conf=rdzv_conf,
                master_addr=master_addr if not _is_this_machine(master_addr) else None,
                master_port=master_port if standalone else None,
                local_addr=local_addr if not _is_this_machine(local_addr) else None,
                rdzv_secret_file=rdzv_secret_file,
            ),
        )
    fixed = min_nodes == max_nodes
    backend = rdzv_backend or ("static" if node_rank is not None and fixed else "c10d")
    if backend == "static" and (node_rank is None or not fixed):
        raise LaunchError(
            f"--rdzv-backend static needs a fixed number of machines and the number of this one: --nnodes {max_nodes} "
            f"--node-rank N, with N from 0 to {max_nodes - 1}. Or use --rdzv-backend c10d, which numbers them itself."
        )
    default = _STATIC_PORT if backend == "static" else _C10D_PORT
    host, port = _endpoint(nnodes, rdzv_endpoint, master_addr, master_port, default)
    conf = _pairs(rdzv_conf or "")
    secret = _secret(rdzv_secret_file, rdzv_insecure, backend, conf, host)
    return Nodes(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        backend=backend,
        host=host,
        port=port,
        rank=node_rank,
        run_id=rdzv_id or "paceline",
        conf=conf,
        local_addr=local_addr or ("127.0.0.1" if is_loopback(host) else None),
        secret=secret,
        secret_file=rdzv_secret_file or "",
        insecure=rdzv_insecure,
    )


def _can_be_guarded(backend: str, conf: Mapping[str, str]) -> bool:
    """Is it a rendezvous that we have of our own? (Not one in an etcd server, or in a file that machines share.)"""
    return backend == "static" or (backend == "c10d" and conf.get("store_type", "tcp") == "tcp")


def _secret(file: str | None, insecure: bool, backend: str, conf: Mapping[str, str], host: str) -> str | None:
    """The machines' secret; None where they need none. Raises LaunchError where it is missing."""
    if file is not None and insecure:
        raise LaunchError(
            f"--rdzv-secret-file {file} and --rdzv-insecure contradict each other. Leave one of them out."
        )
    ours = _can_be_guarded(backend, conf)
    if file is not None and not ours:
        raise LaunchError(
            f"--rdzv-secret-file {file} is for --rdzv-backend c10d (with store_type tcp) and static. Leave it out."
        )
    if file is not None:
        return read_secret(file)
    if ours and not insecure and not is_loopback(host):
        raise LaunchError(
            "several machines need a secret that they share: whoever reaches the place where they meet could otherwise "
            "run code on all of them. Make one (`paceline secret FILE`), copy it to all machines or put it on a disk "
            "that they share, and give --rdzv-secret-file FILE on each. (--hosts does it by itself. --rdzv-insecure "
            "goes without: on a network where everybody may do everything.)"
        )
    return None


def _is_this_machine(place: str | None) -> bool:
    """Does HOST or HOST:PORT name this machine's loopback, where all processes of one machine meet anyway?"""
    return place is not None and is_loopback(place.removeprefix("[").partition("]")[0].partition(":")[0] or "::1")


def _unused(**given: object) -> tuple[str, ...]:
    """The options that were given, as they were typed."""
    return tuple(f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None)


def _counts(nnodes: str) -> tuple[int, int]:
    """ "2" is (2, 2), "1:4" is (1, 4)."""
    parts = nnodes.split(":")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise LaunchError(f"--nnodes {nnodes}: give the number of machines, such as 2, or MIN:MAX, such as 1:4.")
    min_nodes, max_nodes = int(parts[0]), int(parts[-1])
    if not 1 <= min_nodes <= max_nodes:
        raise LaunchError(f"--nnodes {nnodes}: at least one machine, and MIN not above MAX, such as 1:4.")
    return min_nodes, max_nodes


def _endpoint(nnodes: str, endpoint: str | None, addr: str | None, port: int | None, default: int) -> tuple[str, int]:
    """(host, port) where the machines meet. Raises LaunchError."""
    if endpoint and addr and _split(endpoint, default)[0] != addr:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint} and --master-addr {addr} name two places to meet. Leave one of them out."
        )
    if endpoint:
        return _split(endpoint, default)
    if addr:
        return addr, port or default
    raise LaunchError(
        f"--nnodes {nnodes}: the machines need a place to meet. Give --rdzv-endpoint HOST:{port or default} on each of "
        "them, alike: the first machine's name or address, and a port that is free there."
    )


def _split(endpoint: str, default: int) -> tuple[str, int]:
    """ "host:29400", "host" and "[::1]:29400"."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint.strip(), str(default)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise LaunchError(f"--rdzv-endpoint {endpoint}: write HOST:PORT, such as node0:29400, with a fixed port.")
    return host, int(port)


def _pairs(text: str) -> dict[str, str]:
    """ "a=1,b=2" as {"a": "1", "b": "2"}."""
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not key.strip() or not equals:
            raise LaunchError(f"--rdzv-conf {text}: {part!r} is not KEY=VALUE. Write, for example, join_timeout=900.")
        pairs[key.strip()] = value.strip()
    return pairs
