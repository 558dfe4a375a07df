"""A worker's view of the parameters on servers: the owner of each parameter, and requests to send or pull them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.strategies.servers.served_parameters import Setting
from paceline.strategies.servers.worker_links import Links
from paceline.torch_private.core import version_of

Answers = dict[int, tuple[dict[str, Any], dict[str, Tensor]]]


class RemoteParameters:
    """The parameters of the model, each owned by a server. servers: number of servers."""

    def __init__(self, servers: int) -> None:
        self.names: dict[str, Tensor] = {}  # this process's copies, by name
        self.owner: dict[str, int] = {}  # name -> server
        # Server 0's counts, as sent with the last weights: updates of each optimizer, and chunks without examples.
        self.versions: dict[str, int] = {}
        self.empty = 0
        self.links: Links | None = None  # in a worker
        self.servers = range(servers)
        self._load = [0] * servers  # bytes that each server owns
        self._as_pulled: dict[str, int] = {}  # name -> version of the tensor when its weights arrived

    def assign(self, names: dict[str, Tensor]) -> None:
        """Assign whole parameters, largest first, each to the server that owns the fewest bytes. A parameter keeps its
        owner."""
        self.names = names
        new = [(name, p.numel() * p.element_size()) for name, p in names.items() if name not in self.owner]
        for name, size in sorted(new, key=lambda item: -item[1]):
            self.owner[name] = server = self._load.index(min(self._load))
            self._load[server] += size

    def owned(self, server: int) -> dict[str, Tensor]:
        return {name: p for name, p in self.names.items() if self.owner[name] == server}

    def by_owner(self, tensors: Mapping[str, Tensor]) -> dict[int, list[tuple[str, Tensor]]]:
        found: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            found.setdefault(self.owner[name], []).append((name, tensor))
        return found

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.names.items() if p in mine}

    # --- to the servers

    def ask_all(self, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Answers:
        """Send each server a request with the tensors that it owns. Returns the answers."""
        assert self.links is not None
        parts = self.by_owner(tensors or {})
        return self.links.ask({server: (header, parts.get(server, ())) for server in self.servers})

    def send(self, tensors: Mapping[str, Tensor], header: dict[str, Any]) -> None:
        """Send tensors to their owners."""
        assert self.links is not None
        self.links.ask({server: (header, own) for server, own in self.by_owner(tensors).items()})

    def send_state(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Replace the servers' state of an optimizer by the state in this process."""
        assert self.links is not None
        plain: dict[int, dict[str, dict[str, Any]]] = {server: {} for server in self.servers}
        tensors: dict[int, list[tuple[str, Tensor]]] = {server: [] for server in self.servers}
        names = {p: name for name, p in self.names.items()}
        for p, values in optimizer.state.items():
            name = names[p]
            plain[self.owner[name]][name] = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
            tensors[self.owner[name]] += [(f"{name}\n{k}", v) for k, v in values.items() if isinstance(v, Tensor)]
        header = {"op": "set", "optimizer": number}
        self.links.ask({server: ({**header, "plain": plain[server]}, tensors[server]) for server in self.servers})

    # --- from them

    @torch.no_grad()
    def store(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights from servers into this process's copies."""
        for name, weight in weights.items():
            self.names[name].copy_(weight)
        self.note_pulled(weights)

    def note_pulled(self, names: Iterable[str]) -> None:
        """Record that these copies are equal to the servers' weights."""
        self._as_pulled.update((name, version_of(self.names[name])) for name in names)

    def changed(self) -> dict[str, Tensor]:
        """Weights that the script has changed since they arrived."""
        return {name: p for name, p in self.names.items() if version_of(p) != self._as_pulled[name]}

    def pull(self, names: Iterable[str]) -> None:
        """Fetch the newest weights. The first server is asked first, so that no weights are older than the version that
        this server reports."""
        assert self.links is not None
        wanted: dict[int, list[str]] = {0: []}
        for name in names:
            wanted.setdefault(self.owner[name], []).append(name)
        for server in sorted(wanted):
            header, weights = self.links.ask({server: ({"op": "pull", "names": wanted[server]}, ())})[server]
            if server == 0:
                self.note_versions(header)
            self.store(weights)

    def note_versions(self, header: Mapping[str, Any]) -> None:
        """Store the counts that the first server sends with weights."""
        self.versions, self.empty = header["versions"], header["empty"]

    def state(self, number: int) -> dict[str, dict[str, Any]]:
        """An optimizer's state from all servers: {parameter: {key: value}}."""
        found: dict[str, dict[str, Any]] = {}
        for header, tensors in self.ask_all({"op": "state", "optimizer": number}).values():
            found |= {name: dict(values) for name, values in header["plain"].items()}
            for key, tensor in tensors.items():
                name, _, part = key.partition("\n")
                found[name][part] = tensor
        return {name: found[name] for name in self.names if name in found}


def setting_of(optimizer: torch.optim.Optimizer) -> Setting:
    """The options of an optimizer's groups, sent with each update."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _travels(value)}
        for group in optimizer.param_groups
    ]


def _travels(value: Any) -> bool:
    """Whether an option can be sent: None, a number, a string, a 0-dim tensor, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(_travels(item) for item in value)
    return (
        value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, Tensor) and value.dim() == 0)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value
