"""Connect ranks to the launcher's store through a local port, on several machines with a secret. Does not import torch.

As under torchrun, MASTER_ADDR and MASTER_PORT are the same on all machines: an address and a port of the first machine.
Scripts use them for more than torch's store. But the store does not listen at this address, because remote clients must
know the secret. Each launcher knows the secret, and forwards a loopback port of its machine to the store. So when
torch's rendezvous (`env://`, `tcp://`) would connect to MASTER_ADDR:MASTER_PORT, it connects to the loopback port.
"""

from __future__ import annotations

from typing import Any

from paceline.world import store_address

MODULE = "torch.distributed.rendezvous"  # the module that `redirect` patches after its import


def redirect(module: Any) -> None:
    """Redirect the module's TCPStore to the launcher's port if it would connect to MASTER_ADDR:MASTER_PORT."""
    original = module.TCPStore

    def tcp_store(host_name: str, port: int, *args: Any, **options: Any) -> Any:
        return original(*store_address(host_name, port), *args, **options)

    module.TCPStore = tcp_store
