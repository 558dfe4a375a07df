"""Observers leave the script's tensors as they are."""

from __future__ import annotations

import torch

from paceline.observe.digests import digest, projections, row_digests, sample
from paceline.verify.plain_worker.examples import content_key, dump


def test_a_storage_can_be_resized_after_it_was_read() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    digest(tensor), row_digests(tensor), sample(tensor), projections(tensor), content_key(tensor), dump([tensor])
    tensor.untyped_storage().resize_(0)  # FSDP frees weights in this way
    assert not tensor.untyped_storage().nbytes()
