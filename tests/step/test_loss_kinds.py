"""What may be a loss, and what is said of anything else."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.checks import started
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.step.loss import Total, mean_term


def test_a_total_in_a_loop_names_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"run\.backward\(total=sum, count=count\)"):
        mean_term(Total(torch.ones((), requires_grad=True), 3), None)


def test_losses_of_one_element_have_any_shape_in_any_order() -> None:
    """As `loss.backward()` takes them. The weight is kept as a tensor from one step to the next."""
    x = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    with started() as run:
        model = nn.Linear(2, 1).double()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for (batch,), shape in zip(run.loader(TensorDataset(x), global_batch=1), ((), (1,), (), (1, 1), (1,), ())):
            model.zero_grad()
            model(batch).mean().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            run.backward(model(batch).mean().reshape(shape))
            for p, gradient in zip(model.parameters(), expected, strict=True):
                assert p.grad is not None
                assert torch.equal(p.grad, gradient)
            run.step(optimizer)
