"""What may be a loss, and what is said of anything else."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.step.loss import Total, mean_term


def test_a_total_in_a_loop_names_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"run\.backward\(total=the sum, count=its count\)"):
        mean_term(Total(torch.ones((), requires_grad=True), 3), None)
