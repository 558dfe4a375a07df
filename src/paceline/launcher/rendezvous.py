"""Where the workers of one machine meet: a store that listens on loopback only.

torch's own rendezvous opens a TCPStore, which listens on every interface even when it is told 127.0.0.1. Here the
socket is bound first and handed over. The workers use the same store (TORCHELASTIC_USE_AGENT_STORE), so that none of
them opens one.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "paceline-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """torch's rendezvous interface for one agent, which never waits for another."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: Store | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store at each call: what a former set of workers left in theirs would confuse the next."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        # The store takes the descriptor over and closes it.
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, RendezvousStoreInfo(host, port))

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


def loopback_rendezvous(run_id: str) -> RendezvousHandler:
    """By way of torch's registry, as its agent's other rendezvous are made."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    return rendezvous_handler_registry.create_handler(RendezvousParameters(BACKEND, "", run_id, 1, 1))
