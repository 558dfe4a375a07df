"""Of how many parts a loss consists that share no forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.step.loss_parts import separate_parts

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
WORDS = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
A, B, LABEL, TOKENS = torch.randn(5, 4), torch.randn(6, 4), torch.ones(5).long(), torch.tensor([1, 2])


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def of_a() -> Tensor:
    return F.cross_entropy(NET(A), LABEL)


def of_b() -> Tensor:
    return NET(B).square().mean()


def in_one_block() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # casts each weight once for both
        return of_a() + of_b()


def decay() -> Tensor:
    norms = torch.stack([p.norm() for p in NET.parameters()]).sum()
    return norms + sum(0.1 * (p**2).sum() for p in NET.parameters())


def two_criteria() -> Tensor:
    out = NET(A)
    return F.cross_entropy(out, LABEL) + 0.1 * out.square().mean() - out.softmax(1).std() / 3


def two_heads() -> Tensor:
    trunk = NET[1](NET[0](A))
    return NET[2](trunk).mean() * 2 + trunk.square().sum()


def agreement() -> Tensor:
    return F.mse_loss(NET(A), NET(A + 0.1))


def joined() -> Tensor:
    out = NET(torch.cat([A, B]))
    return out[:5].mean() + 0.5 * out[5:].mean()


@pytest.mark.parametrize(
    ("parts", "loss"),
    [
        (1, of_a),
        (1, two_criteria),
        (1, two_heads),
        (1, agreement),
        (1, joined),
        (1, lambda: of_a() + decay()),
        (1, lambda: of_a() * of_b().detach()),
        (1, lambda: checkpoint(NET, A, use_reentrant=False).mean()),
        (1, lambda: checkpoint(NET, A.clone().requires_grad_(), use_reentrant=True).mean()),
        (0, decay),
        (0, lambda: NET[0].weight.pow(2).mean()),
        (2, lambda: of_a() + of_b()),
        (2, lambda: of_a() + 0.5 * of_b() + decay()),
        (2, lambda: (of_a() + (of_b() - 1) / 3).exp()),
        (2, lambda: of_a() * of_b()),
        (2, lambda: torch.stack([of_a(), of_b()]).mean()),
        (2, lambda: (torch.stack([of_a(), of_b()]) * torch.tensor([1.0, 0.5])).sum()),
        (2, lambda: torch.cat([of_a()[None], of_b().reshape(1)]) @ torch.tensor([1.0, 0.5])),
        (2, lambda: _Doubled.apply(of_a()) + of_b()),
        (2, in_one_block),
        (2, lambda: WORDS(TOKENS).mean() + WORDS(TOKENS + 1).mean()),
        (2, lambda: WORDS[0](TOKENS).mean() + WORDS[0](TOKENS + 1).mean()),
        (3, lambda: of_a() + of_b() + agreement()),
    ],
)
def test_parts(parts: int, loss: Callable[[], Tensor]) -> None:
    assert separate_parts([loss()]) == parts


def test_several_losses_are_a_sum() -> None:
    assert separate_parts([of_a(), of_b()]) == 2
    assert separate_parts([of_a(), torch.ones(())]) == 1
    assert separate_parts([]) == 0


def test_a_deep_network_is_no_recursion() -> None:
    x = NET(A)
    for _ in range(5000):
        x = x.sin()
    assert separate_parts([x.mean() + x.sum()]) == 1
