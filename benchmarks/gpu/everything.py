"""All checks: importing this registers them."""

from __future__ import annotations

from benchmarks.gpu import costs, data, precisions, ranks, right, several, soak, steps, tools
from benchmarks.gpu.check import CHECKS as CHECKS

MODULES = (right, precisions, data, ranks, tools, costs, steps, soak, several)
