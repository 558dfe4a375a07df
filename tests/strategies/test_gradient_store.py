"""Operations on all gradients at once: on tensors of every kind, as a CPU and as an accelerator does them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.strategies import gradient_store
from paceline.strategies.gradient_store import GradientStore, scale_

KINDS = {
    "float32": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "complex": [torch.complex64],
    "several": [torch.float32, torch.bfloat16, torch.float64],
}


def parameters(dtypes: list[torch.dtype]) -> list[Tensor]:
    """With gradients: two of each dtype, one of which has no elements."""
    made = []
    for dtype in dtypes:
        for size in (5, 0):
            p = torch.ones(size, dtype=dtype, requires_grad=True)
            p.grad = torch.full((size,), 2.0, dtype=dtype)
            made.append(p)
    return made


CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["fused", "by the greatest magnitude"])
def flag(request: pytest.FixtureRequest) -> Tensor | None:
    return torch.zeros(()) if request.param else None


@pytest.mark.parametrize("value", [1.0, -0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
def test_what_is_not_finite_is_found_and_nothing_changes(flag: Tensor | None, kind: str, value: float) -> None:
    if kind == "sparse":
        p = torch.ones(5, requires_grad=True)
        p.grad = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.tensor([1.0, value, 2.0]), (5,))
        places = [p]
    else:
        places = parameters(KINDS[kind])
        places[-2].grad[3] = value  # type: ignore[index]
    before = [p.grad.clone() for p in places]  # type: ignore[union-attr]
    versions = [p.grad._version for p in places]  # type: ignore[union-attr]
    found = GradientStore().found_inf(places, CPU, flag)
    assert (found.item() != 0.0) == (not math.isfinite(value))
    for p, own, version in zip(places, before, versions, strict=True):
        torch.testing.assert_close(p.grad, own, rtol=0, atol=0, equal_nan=True)
        if flag is None:
            assert p.grad._version == version, "the check has written to a gradient"  # type: ignore[union-attr]


def test_a_large_gradient_is_finite(flag: Tensor | None) -> None:
    """Its square, of which a 2-norm is made, is not."""
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.full((3,), 3e38)
    assert GradientStore().found_inf([p], CPU, flag).item() == 0.0


def test_a_process_without_gradients_has_found_nothing(flag: Tensor | None) -> None:
    assert GradientStore().found_inf([], CPU, flag).item() == 0.0


def test_a_tensor_factor_takes_one_operation_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(tensors: list[Tensor], factor: Tensor) -> None:
        calls.append(len(tensors))
        torch._foreach_mul_(tensors, factor)

    monkeypatch.setattr(gradient_store, "foreach_mul_", counted)
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.complex64]
    grads = [torch.randn(7, generator=generator).to(dtype) for dtype in dtypes]
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    one_by_one = [grad.clone().mul_(factor.to(grad.dtype)) for grad in grads]
    scale_(grads, factor)
    assert all(torch.equal(grad, own) for grad, own in zip(grads, one_by_one, strict=True))
    assert sorted(calls) == [1, 1, 2]
