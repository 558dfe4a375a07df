"""In the ranks of several machines that share a secret: the way to the launcher's store. Imports no torch.

MASTER_ADDR and MASTER_PORT are the first machine's address and a port, alike on all machines, as torchrun's: scripts
use them for more than torch's store. The store is not there: who comes from another machine must know the secret. The
launcher does, and a rank finds the store behind a port of its own machine's loopback. So where torch's rendezvous
(`env://`, `tcp://`) would connect to MASTER_ADDR:MASTER_PORT, it is led to that port.
"""

from __future__ import annotations

from typing import Any

from paceline.world import store_place

MODULE = "torch.distributed.rendezvous"  # which `redirect` changes, as soon as it is loaded


def redirect(module: Any) -> None:
    """Lead this module's TCPStore to the launcher's port, where it would connect to MASTER_ADDR:MASTER_PORT."""
    original = module.TCPStore

    def tcp_store(host_name: str, port: int, *args: Any, **options: Any) -> Any:
        return original(*store_place(host_name, port), *args, **options)

    module.TCPStore = tcp_store
