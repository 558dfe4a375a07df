"""torch.distributed.pipelining's internals."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import microbatch

from paceline.torch_private.support import needed_for

with needed_for("strategy pipeline"):
    NOT_CUT: Any = microbatch._Replicate  # the class: an object of it too, but not in older versions
    """Stands for an argument of a schedule that is not cut into micro-batches."""
