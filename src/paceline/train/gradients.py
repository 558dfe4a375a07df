"""The gradient of a global batch, kept exact over micro-batches, several backward calls and unknown counts.

A backward call has a number in its micro-batch (0 where there is one). Its loss is a mean over examples, whose share of
the global batch the loader knows, or a sum over counted things (tokens), whose number in the whole global batch nobody
knows before its last micro-batch. Each such denominator has an account:

  micro-batches before the last: gradients of sum / P are added up locally, P a power of two near the first count, so
    that its choice changes no bits (where a strategy reduces every micro-batch at once, all ranks take one P);
  the last: the counts are summed over all replicas into C; the account is multiplied by P / C; the last gradients, of
    sum / C, are added by autograd; and the strategy reduces them over the replicas, once.

`.grad` holds one account at a time, the others wait beside it. With one backward call in a micro-batch, which is the
rule, it is never swapped. What has been reduced is the account FINAL: the exact, unscaled mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives, slices
from paceline.comm.canonical import Tree
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Weights
from paceline.train.messages import DIRECT_BACKWARD

Key = tuple[int, int]
"""(number of the backward call, number of the term; MEANS for all means over examples together)."""

MEANS = -1
FINAL: Key = (-1, -1)

Grads = list[Tensor | None]


class Accounts:
    """Gradients of `parameters` by account, and of what they have `copies` of on further replicas of this process
    (Strategy.copies). held: of parameters whose gradients are elsewhere (Strategy.held), where; `parameters` are then
    those places. `views`: whether a strategy reuses a gradient's memory for the next."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.copies: Sequence[Mapping[Tensor, Tensor]] = ()
        self.held: Mapping[Tensor, Tensor] = {}
        self.views = False
        # Those that backward calls of the open global batch have reached, where there are several optimizers.
        self.reached: set[Tensor] | None = None
        self._held: Key = FINAL
        self._settled = False  # whether FINAL has gradients, and they are ours
        self._local: Key | None = (
            None  # the account that `.grad` holds, while it has gradients of earlier micro-batches
        )
        self._waiting: dict[Key, Grads] = {}
        self.trees: dict[Key, Tree] = {}  # of shards that are computed in turn (canonical.py), not yet complete

    def of(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Takes these parameters. Returns their names, also as those of the places where gradients are held."""
        self.parameters = [self.held.get(p, p) for p in names]
        return {**names, **dict(zip(self.parameters, names.values(), strict=True))}

    def _everywhere(self) -> list[Tensor]:
        """The parameters, and each further replica's, always in this order."""
        if not self.copies:
            return self.parameters
        return [*self.parameters, *(copies[p] for copies in self.copies for p in self.parameters if p in copies)]

    def hold(self, key: Key) -> None:
        """Puts `.grad` away into its account, and brings this one's into it."""
        if key == self._held:
            if self._local == key and not any_gradient(self.parameters):
                raise UsageError(
                    "the gradients of earlier micro-batches of this global batch have been cleared, as by "
                    "model.zero_grad(). Delete that call: run.step clears the gradients when it has used them."
                )
            return
        everywhere = self._everywhere()
        if not any_gradient(everywhere):
            self._settled = self._settled and self._held != FINAL
        else:
            if self._held == FINAL and not self._settled:
                raise UsageError(DIRECT_BACKWARD)
            self._waiting[self._held] = [
                p.grad.clone() if self.views and p.grad is not None else p.grad for p in everywhere
            ]
            for p in everywhere:
                p.grad = None
        for p, grad in zip(everywhere, self._waiting.pop(key, ()), strict=False):
            p.grad = grad
        self._held = key

    def note(self, key: Key) -> None:
        """A micro-batch that is not the last has added to this account, which `.grad` holds."""
        self._local = key if any_gradient(self.parameters) else None

    def gather(self, keys: Sequence[Key], factors: Sequence[Weight | None]) -> None:
        """The sum of these accounts, each times its factor (None: as it is), in `.grad`."""
        self.hold(keys[0])
        if factors[0] is not None:
            scale_([p.grad for p in self._everywhere() if p.grad is not None], factors[0])
        for key, factor in zip(keys[1:], factors[1:], strict=True):
            grads = self._waiting.pop(key, None)
            if grads is not None and factor is not None:
                scale_([g for g in grads if g is not None], factor)
            self._add(grads)

    def bring(self, sums: Sequence[Grads]) -> None:
        """Puts the sum of these, which have been reduced, into `.grad`, which is empty."""
        for grads in sums:
            self._add(grads)

    def settle(self, unscale: float) -> None:
        """What `.grad` holds has been reduced: takes the loss scale out, and makes it part of FINAL."""
        if unscale != 1.0:
            scale_([p.grad for p in self._everywhere() if p.grad is not None], unscale)
        if self.reached is not None:
            self.reached.update([p for p in self.parameters if p.grad is not None])
        self._add(self._waiting.pop(FINAL, None))
        self._held, self._local, self._settled = FINAL, None, True

    def _add(self, grads: Grads | None) -> None:
        if grads is None:
            return
        both: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for p, grad in zip(self._everywhere(), grads, strict=False):
            if p.grad is None:
                p.grad = grad
            elif grad is not None:
                sums, addends = both.setdefault(grad.device, ([], []))
                sums.append(p.grad)
                addends.append(grad)
        for sums, addends in both.values():  # tensors of several devices would be added one by one
            torch._foreach_add_(list(map(slices.local, sums)), list(map(slices.local, addends)))

    def unreduced(self, parameters: Collection[Tensor]) -> bool:
        """Whether gradients that these have from earlier micro-batches wait for a backward call of the last one."""
        if self.trees:
            return True
        if self._held == FINAL and not self._waiting:
            return False
        asked = {self.held.get(p, p) for p in parameters}
        if self._held != FINAL and any_gradient(asked):
            return True
        return any(
            grad is not None and p in asked
            for key, grads in self._waiting.items()
            if key != FINAL
            for p, grad in zip(self.parameters, grads, strict=False)
        )

    def any_left(self) -> bool:
        """Whether a gradient is there that is not zero. It reads them on the device."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return any(bool(slices.local(grad).any()) for grad in grads)

    def clear(self) -> None:
        """Forgets everything, also what has been reduced."""
        for p in self.parameters:
            p.grad = None
        self._waiting.clear()
        self.trees.clear()
        self._held, self._local, self._settled = FINAL, None, False

    def drop_unreduced(self) -> None:
        """Forgets a global batch that was left before its end."""
        self._local = None
        self.trees.clear()
        if self._held != FINAL:
            self.hold(FINAL)
        for key in [key for key in self._waiting if key != FINAL]:
            del self._waiting[key]


class Counts:
    """The counts of one global batch: those of this process so far, by account. agreed: whether all ranks need the
    same P; one small all-reduce for each account of a global batch with micro-batches."""

    def __init__(self, agreed: bool = False) -> None:
        self._agreed = agreed
        self._sums: dict[Key, Weight] = {}
        self._scales: dict[Key, Weight] = {}

    def add(self, key: Key, counts: Sequence[Weight]) -> None:
        """Counts what a micro-batch has."""
        for count in counts:
            self._sums[key] = self._sums[key] + count if key in self._sums else count

    def scale(self, key: Key, device: torch.device) -> Weight:
        """P, the power of two by which this account's sums are divided for now; chosen when it is first asked for."""
        if key not in self._scales:
            first = collectives.all_reduce(self.vector([key], device))[0] if self._agreed else self._sums[key]
            self._scales[key] = _power_of_two(first)
        return self._scales[key]

    def vector(self, keys: Sequence[Key], device: torch.device) -> Tensor:
        """(len(keys),): this process's sums, in float64 where the device has it."""
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        return torch.stack([torch.as_tensor(self._sums[key], device=device).to(dtype).reshape(()) for key in keys])

    def clear(self) -> None:
        self._sums.clear()
        self._scales.clear()


def _power_of_two(count: Weight) -> Weight:
    if isinstance(count, Tensor):
        return torch.exp2(torch.round(torch.log2(count.detach().clamp(min=1).to(torch.float32))))
    return 2.0 ** round(math.log2(max(count, 1)))


def any_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether one of these has a gradient. A loop, since a generator takes twice as long, in every step."""
    for p in parameters:  # noqa: SIM110
        if p.grad is not None:
            return True
    return False


def scale_(grads: Sequence[Tensor], factor: Weight) -> None:
    """Multiplies gradients in place by a number or a 0-dim tensor."""
    if not grads:
        return
    parts = list(map(slices.local, grads))
    if isinstance(factor, Tensor):
        for grad in parts:
            grad.mul_(factor.to(grad.device, grad.dtype))
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in parts:
        by_device.setdefault(grad.device, []).append(grad)
    for part in by_device.values():
        torch._foreach_mul_(part, factor)


def share(examples: int, total: int) -> float:
    """Of a mean over these examples in the mean over the whole global batch of `total`."""
    return examples / total


def weigh(
    terms: list[list[Term]],
    counts: Sequence[int],
    total: int,
    scale: float,
    inverse: Mapping[int, Weight],
    only: int | None,
) -> Weights:
    """The weight of each term of each piece: its examples' share of the global batch, or 1 / the count of its term."""

    def weight(number: int, term: Term, count: int) -> Weight | None:
        if only is not None and only != (MEANS if term.count is None else number):
            return None
        return (share(count, total) if term.count is None else inverse[number]) * scale

    return [
        [weight(i, term, count) for i, term in enumerate(piece)] for piece, count in zip(terms, counts, strict=True)
    ]
