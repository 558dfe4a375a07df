"""All checks: importing this registers them."""

from __future__ import annotations

from benchmarks.gpu import costs, data, precisions, ranks, right, several, soak, steps, tools, zero_rows
from benchmarks.gpu.check import CHECKS as CHECKS

MODULES = (right, precisions, zero_rows, data, ranks, tools, costs, steps, soak, several)
