"""The kind of a gradient's difference: which sum of the ranks' gradients is the gradient of the subject run? Pure.

For each rank r, one process has computed the gradient g_r of this rank's examples alone, from the same weights. C is
the gradient of all examples together, and A is the gradient that the subject run used. Hypotheses are tried in this
order, on all parameters that differ:

    factor          A = s C
    not reduced     A = s g_0, so rank 0 used its own gradient only
    mean of means   A = mean of all g_r, and C = a weighted mean of them, or of the gradients of their backwards
    batch-level     A = mean of all g_r, but C is no combination of them: the loss of a batch is no mean over examples
    weights         A = sum of c_r g_r
    stale           A = sum of c_r g_r + c A', where A' is the gradient of the previous update

Gradients may be sketches (observe/sketches.py), since sketches are linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Grads = Mapping[str, Tensor]
_DIGITS = 2e-3  # relative: a coefficient that differs by less from a simple number is this number


@dataclass(frozen=True)
class Explanation:
    """The hypothesis that holds."""

    key: str
    sentence: str
    coefficients: Sequence[float] = ()
    accused: bool = True  # False: a property of data parallelism that scripts rely on
    names: Sequence[str] = field(default_factory=tuple)  # the parameters that it explains


def explain(
    names: Sequence[str],
    ours: Grads,
    whole: Grads,
    pieces: Sequence[Sequence[Grads]],
    before: Grads,
    allowed: Callable[[str], float],
) -> Explanation | None:
    """Find the hypothesis that explains the gradients of these parameters; None if there is none.

    Args:
        names: the parameters with different gradients.
        ours, whole: A and C, by name.
        pieces: for each rank, the gradient that each backward has added; g_r is their sum.
        before: A of the previous update; empty if there is none.
        allowed: returns the largest difference that rounding explains, for a name.
    """

    parts, each = [total(rank) for rank in pieces], [one for rank in pieces for one in rank]
    sums = _Sums(names, allowed, (ours, whole, *parts))
    fit, holds = sums.fit, sums.holds
    n = len(parts)
    factor = fit(ours, [whole])
    if factor is not None and abs(factor[0]) > 1e-9:
        return Explanation("factor", f"{_times(factor[0], n)} the gradient of one process", factor, names=names)
    if factor is not None:
        return Explanation("no-gradient", "zero, although one process has a gradient", factor, names=names)
    own = fit(ours, [parts[0]])
    if own is not None:
        times = "" if _near(own[0], 1) else f"{_times(own[0], n)} "
        text = f"{times}the gradient of rank 0's examples alone: the other ranks contribute nothing"
        return Explanation("not-reduced", text, own, names=names)
    if holds(ours, parts, [1 / n] * n):
        weights = fit(whole, parts)
        if weights is not None:
            said = ", ".join(f"{w:.4g}" for w in weights)
            text = (
                f"the plain mean of the ranks' gradients, each a mean over its own examples or tokens. One process "
                f"weights them by {said}"
            )
            return Explanation("mean-of-means", text, [1 / n] * n, names=names)
        by_backward = fit(whole, each) if len(each) > n else None
        if by_backward is not None:
            low, high = min(by_backward), max(by_backward)
            text = (
                "the plain mean of the gradients of all backwards, each a mean over its own examples or tokens. One "
                f"process weights them by {low:.4g} to {high:.4g}"
            )
            return Explanation("mean-of-means", text, by_backward, names=names)
        text = "the mean of the ranks' gradients, and the loss of all examples together is no mean of the ranks' losses"
        return Explanation("batch-level", text, [1 / n] * n, accused=False, names=names)
    found = fit(ours, parts)
    if found is not None:
        return _from_weights(found, fit(whole, parts), names)
    found = fit(ours, each) if len(each) > n else None
    if found is not None:
        return _by_backward(names, found, pieces)
    if before:
        stale = fit(ours, [before])
        if stale is None:
            stale = fit(ours, [*parts, before])
        if stale is not None and abs(stale[-1]) > _DIGITS:
            return Explanation("stale", "made from the gradient of the previous update", stale, names=names)
    return None


def total(grads: Sequence[Grads]) -> dict[str, Tensor]:
    """The sum of gradients, by name."""
    found: dict[str, Tensor] = {}
    for one in grads:
        found |= {name: found[name] + value if name in found else value for name, value in one.items()}
    return found


def _by_backward(names: Sequence[str], found: Sequence[float], pieces: Sequence[Sequence[Grads]]) -> Explanation:
    """The explanation that the gradient of the subject run is this sum of the gradients of the backwards."""
    weights = iter(found)
    by_rank = [[next(weights) for _ in rank] for rank in pieces]
    said = "; ".join(f"rank {r}: " + ", ".join(f"{w:.4g}" for w in rank) for r, rank in enumerate(by_rank))
    lost = any(abs(w) < _DIGITS for w in found)
    text = f"a sum of the backwards of the ranks with these weights: {said}" + (". Weight 0 is lost" if lost else "")
    return Explanation("backward-lost" if lost else "weights", text, found, names=names)


class _Sums:
    """Sums of gradients, for some parameters.

    Args:
        allowed: the largest difference that rounding explains, for a name.
        like: gradients that have all of these parameters between them.
    """

    def __init__(self, names: Sequence[str], allowed: Callable[[str], float], like: Sequence[Grads]) -> None:
        self._names, self._allowed, self._like = names, allowed, like

    def fit(self, target: Grads, basis: Sequence[Grads]) -> list[float] | None:
        """The coefficients of `target` as a sum of the basis, if the sum holds for each parameter."""
        columns = torch.stack([torch.cat([self._of(one, name) for name in self._names]) for one in basis], 1)
        right = torch.cat([self._of(target, name) for name in self._names])
        if not bool(columns.isfinite().all() and right.isfinite().all()):
            return None
        solved = torch.linalg.lstsq(columns, right.unsqueeze(1), driver="gelsd").solution
        found: list[float] = solved.squeeze(1).tolist()
        return found if self.holds(target, basis, found) else None

    def holds(self, target: Grads, basis: Sequence[Grads], coefficients: Sequence[float]) -> bool:
        """Whether the target is this sum of the basis, for each parameter."""
        scale = max(1.0, *map(abs, coefficients))
        for name in self._names:
            own = self._of(target, name)
            rest = own - sum(c * self._of(one, name) for c, one in zip(coefficients, basis, strict=True))
            if not float(rest.norm()) <= max(2 * scale * self._allowed(name), 1e-5 * float(own.norm())):
                return False
        return True

    def _of(self, grads: Grads, name: str) -> Tensor:
        """The gradient, flat and in float64. Zeros if there is none."""
        value = grads.get(name)
        if value is None:
            some = next(one[name] for one in self._like if name in one)
            return torch.zeros(some.numel(), dtype=torch.float64)
        return value.double().reshape(-1)


def _from_weights(found: Sequence[float], whole: Sequence[float] | None, names: Sequence[str]) -> Explanation:
    said = " + ".join(f"{c:.4g} g{r}" for r, c in enumerate(found))
    text = f"{said}, where gR is the gradient of rank R's examples"
    missing = [r for r, c in enumerate(found) if abs(c) < _DIGITS]
    if missing:
        ranks = ", ".join(map(str, missing))
        return Explanation("rank-missing", f"{text}: rank {ranks} contributes nothing", found, names=names)
    if whole is not None:
        text += f". For one process it is {' + '.join(f'{c:.4g} g{r}' for r, c in enumerate(whole))}"
    return Explanation("weights", text, found, names=names)


def is_multiple(value: Tensor, other: Tensor, allowed: float) -> bool:
    """Whether a gradient is a positive multiple of another one. allowed: the norm of the rest."""
    a, b = value.double().reshape(-1), other.double().reshape(-1)
    size = float(b @ b)
    factor = float(a @ b) / size if size else 0.0
    return (factor > 0 or not float(a.norm())) and float((a - factor * b).norm()) <= allowed


def _near(value: float, number: float) -> bool:
    return abs(value - number) <= _DIGITS * abs(number)


def _times(factor: float, n: int) -> str:
    known = {f"{n}": n, f"1/{n}": 1 / n, f"{n * n}": n * n, f"1/{n * n}": 1 / n**2, "-1": -1}
    name = next((name for name, value in known.items() if _near(factor, value)), f"{factor:.6g}")
    return f"{name} times" + (f" ({n} is the number of processes)" if str(n) in name else "")
