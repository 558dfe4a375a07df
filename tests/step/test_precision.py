"""16 bits: a closure computes what the same code computes under torch.autocast, operation for operation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 1, 0, 2])
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}


class Net(nn.Module):
    """Returns what models return: a tensor, and a dictionary with more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.first(x))
        return {"logits": self.last(hidden), "hidden": hidden}


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    out = model(batch[0])
    loss = F.cross_entropy(out["logits"], batch[1]) + (out["hidden"] * out["hidden"]).mean()  # the product in 16 bits
    return loss / 256  # so that fp16's first scale, 2**16, overflows nothing


class Operators(TorchDispatchMode):
    """Notes each operator with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), tuple(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))


def made(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    return model.bfloat16() if precision == "bf16-params" else model


@contextlib.contextmanager
def prepared(precision: str, **settings: Any) -> Iterator[tuple[paceline.Run, nn.Module, Any]]:
    run = paceline.start(device="cpu", progress="off", precision=precision, **settings)
    try:
        torch.manual_seed(0)
        model = run.prepare(Net())
        yield run, model, iter(run.batches(lambda rows: [X, Y], global_batch=6))
    finally:
        run.close()


def by_hand(precision: str, scale: float) -> tuple[list[Any], Tensor, list[Tensor]]:
    """(operators of the forward, loss, gradients)."""
    model = made(precision)
    with torch.autocast("cpu", PRECISIONS[precision]), Operators() as operators:
        loss = loss_fn(model, [X, Y])
    (loss * scale).backward()
    return operators.calls, loss.detach(), [p.grad / scale for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_closure_computes_what_torch_autocast_does(precision: str) -> None:
    with prepared(precision) as (run, model, batches):
        noted: list[Any] = []

        def noting(model: nn.Module, batch: list[Tensor]) -> Tensor:
            with Operators() as operators:
                loss = loss_fn(model, batch)
            noted.extend(operators.calls)
            return loss

        loss = run.forward_backward(noting, model, next(batches))
        calls, expected, gradients = by_hand(precision, 2.0**16 if precision == "fp16" else 1.0)
        assert noted == calls
        assert torch.equal(loss, expected)
        for p, expected_gradient in zip(model.parameters(), gradients, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, expected_gradient)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_model_returns_depends_on_where_it_is_called(precision: str) -> None:
    """In the loop fp32, for a loss outside of autocast; under autocast what autocast makes of it."""
    low = PRECISIONS[precision]
    with prepared(precision) as (run, model, _):
        assert [tensor.dtype for tensor in model(X).values()] == [torch.float32] * 2
        with run.autocast():
            assert [tensor.dtype for tensor in model(X).values()] == [low] * 2
    with prepared(precision, fp32_outputs=False) as (_, model, _):
        assert [tensor.dtype for tensor in model(X).values()] == [low] * 2


def test_predictions_are_fp32() -> None:
    with prepared("bf16") as (run, model, _):
        data = torch.utils.data.TensorDataset(X, Y)
        found = run.predict(model, data, global_batch=4)
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        own = run.predict(model, data, fn=lambda model, batch: model(batch[0])["logits"], global_batch=4)
        assert own.dtype == torch.float32
        with torch.no_grad():
            torch.testing.assert_close(own, model(X)["logits"])


# --- a cross-entropy in fp32 that never holds the logits whole (docs/loop.md)


def chunked_cross_entropy(hidden: Tensor, head: nn.Linear, targets: Tensor, rows: int = 4) -> Tensor:
    """As in docs/loop.md."""
    from torch.utils.checkpoint import checkpoint

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), targets, reduction="sum")

    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return sum(checkpoint(part, h, t, use_reentrant=False) for h, t in parts) / len(targets)  # type: ignore[return-value]


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x)))


def test_a_loss_in_fp32_without_the_logits() -> None:
    """In a closure under autocast: the loss and gradients of fp32 logits."""
    x, y = torch.randn(10, 8), torch.randint(50, (10,))

    def in_parts(model: Any, batch: list[Tensor]) -> Tensor:
        return chunked_cross_entropy(F.gelu(model.body(batch[0])), model.head, batch[1])

    def whole(model: Any, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    found = []
    for loss_fn in (in_parts, whole):
        run = paceline.start(device="cpu", progress="off", precision="bf16")
        try:
            torch.manual_seed(0)
            model = run.prepare(Large())
            batches = iter(run.batches(lambda rows: [x, y], global_batch=10))
            loss = run.forward_backward(loss_fn, model, next(batches))
            found.append((float(loss), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        finally:
            run.close()
    (loss, gradients), (expected, theirs) = found
    assert math.isclose(loss, expected, rel_tol=1e-6)
    assert len(gradients) == len(theirs) == 4
    for ours, reference in zip(gradients, theirs, strict=True):  # sums of bf16 gradients in another order
        assert (ours - reference).norm() <= 2 * torch.finfo(torch.bfloat16).eps * reference.norm()
