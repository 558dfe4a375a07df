"""The agent of torch.distributed.elastic, the base of the launcher's agent.

torch intends these methods to be overridden, although their names begin with an underscore.
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
"""The methods that launcher/agent.py overrides."""
USED = ("_remaining_restarts", "_store")
"""The attributes that launcher/agent.py uses: the number of remaining restarts; the store of the current round."""

require("the launcher", SimpleElasticAgent, *OVERRIDDEN)

__all__ = ["OVERRIDDEN", "USED", "SimpleElasticAgent"]
