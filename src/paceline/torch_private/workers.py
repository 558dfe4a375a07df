"""The private name of torch's DataLoader workers that Paceline uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.torch_private.support import needed_for

with needed_for("reading shards in workers"):
    from torch.utils.data._utils import worker

    worker._worker_info  # noqa: B018 (an AttributeError here names the use)


@contextmanager
def as_in_the_main_process() -> Iterator[None]:
    """Inside, `torch.utils.data.get_worker_info()` returns None.

    A data set of Hugging Face splits its shards by the worker that reads it. Paceline has already given each worker its
    own shards.
    """
    before = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = before
