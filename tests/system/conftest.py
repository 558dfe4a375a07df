"""The fixtures of the system tests, each in the file that is named for what it starts."""

from __future__ import annotations

from tests.system.slurm_cluster import cluster

__all__ = ["cluster"]
