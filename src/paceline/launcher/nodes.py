"""The machines of a run and their rendezvous: read and check torchrun's options. Pure, except that it reads the secret.

A run on one machine listens on loopback only, regardless of the other options. Several machines use the rendezvous of
--rdzv-backend. The default is `static` if --node-rank numbers the launchers, else `c10d`. `static` and `c10d` need a
secret shared by all launchers, unless all launchers are on one machine.
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
        min_nodes, max_nodes: the number of machines. If they differ, machines may join and leave.
        backend: torch's rendezvous backend; "" on one machine.
        host, port: the address of the rendezvous. On one machine, `port` is the store's port; 0: any free port.
        rank: this machine's number; None if the rendezvous assigns it.
        run_id: the name of the run, the same on all machines.
        conf: options of the rendezvous.
        local_addr: this machine's address for the other machines; None: its host name.
        secret: the secret shared by the launchers of several machines, or None.
        secret_file: the file with the secret, for messages; "" if the secret was passed directly.
        insecure: accept launchers without a secret.
        unused: the options that were given but have no effect on one machine.
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
        """Whether machines may join and leave."""
        return self.min_nodes < self.max_nodes

    @property
    def guarded(self) -> bool:
        """Whether the run uses our own rendezvous, not one in an etcd server or a shared file."""
        return self.several and _can_be_guarded(self.backend, self.conf)

    @property
    def tunnelled(self) -> bool:
        """Whether the launchers connect through encrypted tunnels.

        Launchers on one machine need no tunnels, because the kernel knows the owner of each connection.
        """
        return self.guarded and not (self.secret is None and is_loopback(self.host))

    @property
    def key(self) -> bytes:
        """The secret as bytes. Without a secret it is empty, so everyone knows it."""
        return (self.secret or "").encode()

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether all processes run on this machine."""
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
    """Make Nodes from torchrun's options of the same names. Raises LaunchError if they are invalid."""
    min_nodes, max_nodes = _counts(nnodes)
    if master_port is not None and not 0 <= master_port <= 65535:
        raise LaunchError(f"--master-port {master_port} is not a TCP port. Give a free port from 1024 to 65535.")
    if standalone and max_nodes > 1:
        raise LaunchError(f"--standalone means only this machine, but --nnodes is {nnodes}. Leave out one of them.")
    if node_rank is not None and not 0 <= node_rank < max_nodes:
        numbers = "must be 0" if max_nodes == 1 else f"must be from 0 to {max_nodes - 1}"
        raise LaunchError(f"--node-rank {node_rank}: with --nnodes {nnodes}, a machine's number {numbers}.")
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
            f"--rdzv-backend static needs a fixed number of machines, and this machine's number: --nnodes {max_nodes} "
            f"--node-rank N, with N from 0 to {max_nodes - 1}. Or use --rdzv-backend c10d, which numbers the machines."
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
    """Return whether this is our own rendezvous, not one in an etcd server or a shared file."""
    return backend == "static" or (backend == "c10d" and conf.get("store_type", "tcp") == "tcp")


def _secret(file: str | None, insecure: bool, backend: str, conf: Mapping[str, str], host: str) -> str | None:
    """Return the secret of the run, or None if it needs none. Raises LaunchError if a required secret is missing."""
    if file is not None and insecure:
        raise LaunchError(
            f"--rdzv-secret-file {file} and --rdzv-insecure contradict each other. Leave out one of them."
        )
    ours = _can_be_guarded(backend, conf)
    if file is not None and not ours:
        raise LaunchError(
            f"--rdzv-secret-file {file} works only with --rdzv-backend c10d (with store_type tcp) and static. Leave it "
            "out."
        )
    if file is not None:
        return read_secret(file)
    if ours and not insecure and not is_loopback(host):
        raise LaunchError(
            "several machines need a shared secret. Without it, anyone who reaches the rendezvous could run code on "
            "all of them. Make a secret (`paceline secret FILE`), copy it to all machines or to a shared disk, and "
            "give --rdzv-secret-file FILE on each. (--hosts does this itself. --rdzv-insecure needs no secret; use it "
            "only on a network where you trust everyone.)"
        )
    return None


def _is_this_machine(place: str | None) -> bool:
    """Return whether HOST or HOST:PORT is this machine's loopback, which a run on one machine uses anyway."""
    return place is not None and is_loopback(place.removeprefix("[").partition("]")[0].partition(":")[0] or "::1")


def _unused(**given: object) -> tuple[str, ...]:
    """Return the options that are not None, formatted as on the command line."""
    return tuple(f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None)


def _counts(nnodes: str) -> tuple[int, int]:
    """Parse "2" as (2, 2) and "1:4" as (1, 4)."""
    parts = nnodes.split(":")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise LaunchError(f"--nnodes {nnodes}: give the number of machines, such as 2, or MIN:MAX, such as 1:4.")
    min_nodes, max_nodes = int(parts[0]), int(parts[-1])
    if not 1 <= min_nodes <= max_nodes:
        raise LaunchError(f"--nnodes {nnodes}: give at least one machine, and MIN not above MAX, such as 1:4.")
    return min_nodes, max_nodes


def _endpoint(nnodes: str, endpoint: str | None, addr: str | None, port: int | None, default: int) -> tuple[str, int]:
    """Return (host, port) of the rendezvous. Raises LaunchError."""
    if endpoint and addr and _split(endpoint, default)[0] != addr:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint} and --master-addr {addr} name two rendezvous hosts. Leave out one of them."
        )
    if endpoint:
        return _split(endpoint, default)
    if addr:
        return addr, port or default
    raise LaunchError(
        f"--nnodes {nnodes}: several machines need a rendezvous. Give the same --rdzv-endpoint HOST:{port or default} "
        "on each: the name or address of the first machine, and a free port there."
    )


def _split(endpoint: str, default: int) -> tuple[str, int]:
    """Parse "host:29400", "host" or "[::1]:29400" as (host, port)."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint.strip(), str(default)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise LaunchError(f"--rdzv-endpoint {endpoint}: write HOST:PORT, such as node0:29400, with a fixed port.")
    return host, int(port)


def _pairs(text: str) -> dict[str, str]:
    """Parse "a=1,b=2" as {"a": "1", "b": "2"}."""
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not key.strip() or not equals:
            raise LaunchError(f"--rdzv-conf {text}: {part!r} is not KEY=VALUE. Write, for example, join_timeout=900.")
        pairs[key.strip()] = value.strip()
    return pairs
