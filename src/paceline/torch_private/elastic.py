"""The agent of torch.distributed.elastic, whose rendezvous and ranks the launcher's agent uses.

torch means these methods to be overridden, and names them with an underscore.
"""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from paceline.torch_private.support import require

OVERRIDDEN = (
    "_rendezvous",
    "_assign_worker_ranks",
    "_start_workers",
    "_stop_workers",
    "_restart_workers",
    "_monitor_workers",
    "_exit_barrier",
    "_shutdown",
)
"""The methods that launcher/agent.py has of its own."""
USED = ("_remaining_restarts", "_store")
"""The attributes that it reads and sets: how often it may start again; the store of the round at hand."""

require("the launcher", SimpleElasticAgent, *OVERRIDDEN)

__all__ = ["OVERRIDDEN", "USED", "SimpleElasticAgent"]
