"""The gradient of a global batch, kept exact over micro-batches, several backward calls and unknown counts.

A backward call has a number in its micro-batch, from 0. Its loss is either a mean over examples or a sum over counted
things, such as tokens. The loader knows which share of the global batch the examples are. Nobody knows the number of
tokens in the global batch before its last micro-batch. So the gradients of each denominator have an account of their
own:

  Micro-batches before the last: autograd adds the gradients of sum / P into the account. P is a power of two near the
    first count, so that the choice of P changes no bits. Where a strategy reduces each micro-batch, all ranks agree on
    one P.
  The last micro-batch: the counts are summed over all replicas into C, the account is multiplied by P / C, autograd
    adds the gradients of sum / C, and the strategy reduces the account over the replicas once.

`.grad` holds one account at a time; the others are stashed beside it. With one backward call in each micro-batch, the
usual case, accounts are never swapped. The account FINAL holds what has been reduced: the exact, unscaled mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.comm.scalars import scalar, wide_dtype
from paceline.comm.tree_sums import Tree
from paceline.data.batch_plan import Request
from paceline.errors import UsageError
from paceline.step.messages import CLEARED_BETWEEN, DIRECT_BACKWARD
from paceline.strategies.base import Term, Weight, Weights
from paceline.strategies.gradient_store import GradientStore, Grads, any_gradient, scale_

Key = tuple[int, int]
"""(number of the backward call, number of the term). All means over examples share the term number MEANS."""

MEANS = -1
FINAL: Key = (-1, -1)


class Accounts:
    """The gradients of the open global batch, by account."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        self._counts = Counts(mesh, device, store.reduces_each)
        self._current: Key = FINAL  # the account that `.grad` holds
        self._final_is_exact = False  # FINAL holds gradients that this object has completed
        self._accumulated: Key | None = None  # the account in `.grad`, if earlier micro-batches have added to it
        self._stashed: dict[Key, Grads] = {}  # the accounts that `.grad` does not hold
        self.used = False  # whether `start_global_batch` has something to clear
        self.unfinished = False  # whether gradients may wait for the last micro-batch of their global batch
        self.trees: dict[Key, Tree] = {}  # for each account: the tree of shards that is not complete (tree_accounts.py)
        # The parameters that backward calls of the open global batch have reached. None with a single optimizer.
        self.reached: set[Tensor] | None = None

    def open(self, call: int) -> None:
        """Put the account of this call's means into `.grad`, for the usual pass: `passes` returns one account."""
        if self._current == FINAL and not self._stashed and not self._store.replicas:
            for p in self._store.parameters:  # an inlined any_gradient
                if p.grad is not None:
                    break
            else:
                self._current, self._final_is_exact, self.unfinished = (call, MEANS), False, True
                return
        self.switch_to((call, MEANS))

    def passes(self, terms: list[list[Term]], request: Request, call: int) -> list[list[Key]]:
        """The accounts of each backward pass of one call. Adds what the call's sums are over.

        The caller brackets each pass by `begin` and `end`. terms: the terms of the loss of each piece.
        """
        keys = keys_of(terms, call)
        for key in keys:
            if key[1] != MEANS:
                self.used = True
                self._counts.add(key, [c for piece in terms if (c := piece[key[1]].count) is not None])
        return [keys] if request.final else [[key] for key in keys]

    def begin(self, keys: Sequence[Key], terms: list[list[Term]], request: Request, scale: float) -> Weights:
        """Put these accounts into `.grad`. Returns the weight of each term of each piece for this pass.

        scale: a factor of all weights.
        """
        if not request.final:
            (key,) = keys
            self.switch_to(key)
            inverse: dict[int, Weight] = {key[1]: 1 / self._counts.power(key)} if key[1] != MEANS else {}
            return weigh(terms, request, scale, inverse, only=key[1])
        inverse = self._counts.inverse([key for key in keys if key[1] != MEANS])
        in_parts = request.micros > 1
        factors = [
            self._counts.power(key) * inverse[key[1]] if in_parts and key[1] in inverse else None for key in keys
        ]
        self._merge(keys, factors)  # P / C
        return weigh(terms, request, scale, inverse, only=None)

    def end(self, keys: Sequence[Key], request: Request, scale: float) -> None:
        """The pass over these accounts was made."""
        if request.final:
            self.complete(scale)
        else:
            self.accumulated(keys[0])

    def accumulated(self, key: Key) -> None:
        """A micro-batch before the last has added to this account, which `.grad` holds."""
        self._accumulated = key if self._store.any() else None

    def switch_to(self, key: Key) -> None:
        """Stash the account that `.grad` holds, and put this account in its place.

        Raises UsageError if the script has cleared earlier micro-batches, or has called backward() itself.
        """
        if key == self._current:
            if self._accumulated == key and not self._store.any():
                raise UsageError(CLEARED_BETWEEN)
            return
        grads = self._store.pop()
        if grads is None:
            self._final_is_exact = self._final_is_exact and self._current != FINAL
        else:
            if self._current == FINAL and not self._final_is_exact:
                raise UsageError(DIRECT_BACKWARD)
            self._stashed[self._current] = grads
        if self._stashed:
            self._store.restore(self._stashed.pop(key, ()))
        self._current, self.unfinished = key, True

    def _merge(self, keys: Sequence[Key], factors: Sequence[Weight | None]) -> None:
        """Put the sum of these accounts, each times its factor (None: 1), into `.grad`."""
        self.switch_to(keys[0])
        if factors[0] is not None:
            self._store.scale(factors[0])
        for key, factor in zip(keys[1:], factors[1:], strict=True):
            grads = self._stashed.pop(key, None)
            if grads is not None and factor is not None:
                scale_([g for g in grads if g is not None], factor)
            if grads is not None:
                self._store.add(grads)

    def complete(self, scale: float) -> None:
        """Unscale what `.grad` holds, which has been reduced, and add it to FINAL."""
        if scale != 1.0:
            self._store.scale(1.0 / scale)
        if self.reached is not None:
            self.reached.update([p for p in self._store.parameters if p.grad is not None])
        if self._stashed and (grads := self._stashed.pop(FINAL, None)) is not None:
            self._store.add(grads)
        self._current, self._accumulated, self._final_is_exact = FINAL, None, True
        self.unfinished = bool(self._stashed or self.trees)

    def unreduced(self, parameters: Collection[Tensor]) -> bool:
        """Whether these parameters have gradients of earlier micro-batches that no backward call has reduced yet."""
        if self.trees:
            return True
        if self._current == FINAL and not self._stashed:
            return False
        asked = set(self._store.of(parameters))
        if self._current != FINAL and any_gradient(asked):
            return True
        return any(
            grad is not None and p in asked
            for key, grads in self._stashed.items()
            if key != FINAL
            for p, grad in zip(self._store.parameters, grads, strict=False)
        )

    def start_global_batch(self) -> None:
        """Start a global batch that shares no update with the last one."""
        self.used = False
        self._counts.clear()
        if self.reached is not None:
            self.reached.clear()

    def drop_unreduced(self) -> None:
        """Drop the unreduced gradients of a global batch that the script has left before its end."""
        self._accumulated = None
        self.trees.clear()
        if self._current != FINAL:
            self.switch_to(FINAL)
        for key in [key for key in self._stashed if key != FINAL]:
            del self._stashed[key]
        self.unfinished = False

    def clear(self) -> None:
        """Drop all gradients, also the reduced ones."""
        self._store.clear(self._store.parameters)
        self._stashed.clear()
        self.trees.clear()
        self._current, self._accumulated, self._final_is_exact = FINAL, None, False


class Counts:
    """How many things the sums of one global batch are over, on this process so far.

    agreed: all ranks need the same P. That costs one small all-reduce for each account of a global batch with
    micro-batches.
    """

    def __init__(self, mesh: Mesh, device: torch.device, agreed: bool) -> None:
        self._mesh, self._device, self._agreed = mesh, device, agreed
        self._sums: dict[Key, Weight] = {}  # by account: this process's count so far
        self._powers: dict[Key, Weight] = {}  # by account: P

    def add(self, key: Key, counts: Sequence[Weight]) -> None:
        """Add the counts of a micro-batch to this account."""
        for count in counts:
            self._sums[key] = self._sums[key] + count if key in self._sums else count

    def power(self, key: Key) -> Weight:
        """P, the power of two by which this account's sums are divided; chosen at the first call."""
        if key not in self._powers:
            first = collectives.all_reduce(self._vector([key]))[0] if self._agreed else self._sums[key]
            self._powers[key] = _power_of_two(first)
        return self._powers[key]

    def inverse(self, keys: Sequence[Key]) -> dict[int, Weight]:
        """1 / C for each of these accounts, by its term number; 0 where C is 0. C: the sum of the account's counts over
        the gradient group."""
        if not keys:
            return {}
        counts = collectives.all_reduce(self._vector(keys), group=self._mesh.gradient)
        inverse = torch.where(counts > 0, 1 / counts.clamp(min=torch.finfo(counts.dtype).tiny), 0)
        return {key[1]: value for key, value in zip(keys, inverse.unbind(), strict=True)}

    def _vector(self, keys: Sequence[Key]) -> Tensor:
        """(len(keys),): this process's sums, in float64 where the device has it."""
        dtype = wide_dtype(self._device)
        return torch.stack([scalar(self._sums[key], dtype, self._device) for key in keys])

    def clear(self) -> None:
        """Start another global batch."""
        self._sums.clear()
        self._powers.clear()


def _power_of_two(count: Weight) -> Weight:
    if isinstance(count, Tensor):
        return torch.exp2(torch.round(torch.log2(count.detach().clamp(min=1).to(torch.float32))))
    return 2.0 ** round(math.log2(max(count, 1)))


def keys_of(terms: list[list[Term]], call: int) -> list[Key]:
    """The accounts of a backward call, in the order of its terms."""
    return list(dict.fromkeys((call, MEANS if term.count is None else i) for i, term in enumerate(terms[0])))


def weigh(
    terms: list[list[Term]], request: Request, scale: float, inverse: Mapping[int, Weight], only: int | None
) -> Weights:
    """The weight of each term of each piece, times the loss scale.

    A mean over examples weighs as much as their share of the global batch; a sum over counted things weighs
    `inverse[number of its term]`. only: give weights to the terms of this account alone, and None to the others.
    """

    def weight(number: int, term: Term, examples: int) -> Weight | None:
        if only is not None and only != (MEANS if term.count is None else number):
            return None
        return (examples / request.mean_over if term.count is None else inverse[number]) * scale

    return [
        [weight(i, term, len(part.indices)) for i, term in enumerate(piece)]
        for piece, part in zip(terms, request.parts, strict=True)
    ]
