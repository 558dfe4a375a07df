"""Accumulate the exact gradient of a global batch, over micro-batches and several backward calls.

The backward calls of a micro-batch are numbered from 0. The loss of a call is either a mean over examples or a sum over
counted items, such as tokens. The number of examples in the global batch is known from the start. The number of tokens
is known only at the last micro-batch. So gradients with different denominators are kept in separate accounts:

  Micro-batches before the last: autograd adds the gradients of sum / P to the account. P is a power of two near the
    first count, so its choice changes no bits. If the strategy reduces every micro-batch, all ranks use the same P.
  The last micro-batch: the counts are summed over all replicas into C, the account is multiplied by P / C, autograd
    adds the gradients of sum / C, and the strategy reduces the account over the replicas once.

`.grad` holds one account at a time; the others are stashed. In the usual case, one backward call per micro-batch,
accounts are never swapped. The account FINAL holds the reduced gradient: the exact, unscaled mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.mesh import Mesh, world_group
from paceline.comm.scalars import scalar, wide_dtype
from paceline.comm.tree_sums import Tree
from paceline.data.batch_plan import Request
from paceline.errors import UsageError
from paceline.step.messages import CLEARED_BETWEEN, DIRECT_BACKWARD
from paceline.strategies.base import Term, Weight, Weights
from paceline.strategies.gradient_store import GradientStore, Grads, any_gradient, scale_

Key = tuple[int, int]
"""(backward call number, term number). All means over examples share the term number MEANS."""

MEANS = -1
FINAL: Key = (-1, -1)


class Accounts:
    """The gradients of the open global batch, by account."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        self._counts = Counts(mesh, device, store.reduces_each)
        self._current: Key = FINAL  # the account in `.grad`
        self._final_is_exact = False  # whether this object completed the gradients in FINAL
        self._accumulated: Key | None = None  # the account in `.grad`, if earlier micro-batches have added to it
        self._stashed: dict[Key, Grads] = {}  # the accounts that are not in `.grad`
        self.used = False  # whether `start_global_batch` has something to clear
        self.unfinished = False  # whether gradients may wait for the last micro-batch of their global batch
        self.trees: dict[Key, Tree] = {}  # for each account: its incomplete tree of shards (tree_accounts.py)
        # The parameters that backward calls of the open global batch have reached. None with a single optimizer.
        self.reached: set[Tensor] | None = None

    def open(self, call: int) -> None:
        """Put the account of this call's means into `.grad`. A fast path for a call that has no other account."""
        if self._current == FINAL and not self._stashed and not self._store.replicas:
            for p in self._store.parameters:  # an inlined any_gradient
                if p.grad is not None:
                    break
            else:
                self._current, self._final_is_exact, self.unfinished = (call, MEANS), False, True
                return
        self.switch_to((call, MEANS))

    def passes(self, terms: list[list[Term]], request: Request, call: int) -> list[list[Key]]:
        """Add the counts of a backward call. Returns, for each backward pass of the call, its accounts.

        The caller calls `begin` before each pass and `end` after it. terms: for each piece, the terms of its loss.
        """
        keys = keys_of(terms, call)
        for key in keys:
            if key[1] != MEANS:
                self.used = True
                self._counts.add(key, [c for piece in terms if (c := piece[key[1]].count) is not None])
        return [keys] if request.final else [[key] for key in keys]

    def begin(self, keys: Sequence[Key], terms: list[list[Term]], request: Request, scale: float) -> Weights:
        """Put these accounts into `.grad`. Returns the weight of each term of each piece in this pass.

        scale: multiplies all weights.
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
        """Finish the backward pass over these accounts."""
        if request.final:
            self.complete(scale)
        else:
            self.accumulated(keys[0])

    def accumulated(self, key: Key) -> None:
        """Record that a micro-batch other than the last one has added gradients to this account, now in `.grad`."""
        self._accumulated = key if self._store.any() else None

    def switch_to(self, key: Key) -> None:
        """Stash the account that is now in `.grad`, and put the account `key` into `.grad`.

        Raises UsageError if the script has cleared the gradients of earlier micro-batches, or called backward() itself.
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
        """Multiply each account by its factor (None: 1), and put the sum into `.grad`."""
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
        """Unscale the reduced gradients in `.grad`, and add them to FINAL."""
        if scale != 1.0:
            self._store.scale(1.0 / scale)
        if self.reached is not None:
            self.reached.update([p for p in self._store.parameters if p.grad is not None])
        if self._stashed and (grads := self._stashed.pop(FINAL, None)) is not None:
            self._store.add(grads)
        self._current, self._accumulated, self._final_is_exact = FINAL, None, True
        self.unfinished = bool(self._stashed or self.trees)

    def unreduced(self, parameters: Collection[Tensor]) -> bool:
        """Whether these parameters have gradients of earlier micro-batches that are not reduced yet."""
        if self.trees:
            return True
        if self._current == FINAL and not self._stashed:
            return False
        wanted = set(self._store.of(parameters))
        if self._current != FINAL and any_gradient(wanted):
            return True
        return any(
            grad is not None and p in wanted
            for key, grads in self._stashed.items()
            if key != FINAL
            for p, grad in zip(self._store.parameters, grads, strict=False)
        )

    def start_global_batch(self) -> None:
        """Start a global batch that shares no update with an earlier one."""
        self.used = False
        self._counts.clear()
        if self.reached is not None:
            self.reached.clear()

    def drop_unreduced(self) -> None:
        """Drop the unreduced gradients of a global batch that the script has not completed."""
        self._accumulated = None
        self.trees.clear()
        if self._current != FINAL:
            self.switch_to(FINAL)
        for key in [key for key in self._stashed if key != FINAL]:
            del self._stashed[key]
        self.unfinished = False

    def clear(self) -> None:
        """Drop all gradients, including the reduced ones."""
        self._store.clear(self._store.parameters)
        self._stashed.clear()
        self.trees.clear()
        self._current, self._accumulated, self._final_is_exact = FINAL, None, False


class Counts:
    """The counts of the open global batch on this process, by account.

    agreed: whether all ranks need the same P. If so, each account of a global batch with several micro-batches costs
    one small all-reduce.
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
        """P: this account's sums are divided by this power of two. It is chosen at the first call."""
        if key not in self._powers:
            first = world_group().all_reduce(self._vector([key]))[0] if self._agreed else self._sums[key]
            self._powers[key] = _power_of_two(first)
        return self._powers[key]

    def inverse(self, keys: Sequence[Key]) -> dict[int, Weight]:
        """1 / C for each of these accounts, by term number; 0 where C is 0.

        C: the sum of the account's counts over the gradient group.
        """
        if not keys:
            return {}
        counts = self._mesh.gradient.all_reduce(self._vector(keys))
        inverse = torch.where(counts > 0, 1 / counts.clamp(min=torch.finfo(counts.dtype).tiny), 0)
        return {key[1]: value for key, value in zip(keys, inverse.unbind(), strict=True)}

    def _vector(self, keys: Sequence[Key]) -> Tensor:
        """(len(keys),): this process's counts so far, in float64 if the device supports it."""
        dtype = wide_dtype(self._device)
        return torch.stack([scalar(self._sums[key], dtype, self._device) for key in keys])

    def clear(self) -> None:
        """Reset for the next global batch."""
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

    The weight of a mean over examples is the examples' share of the global batch. The weight of a sum over counted
    items is `inverse[term number]`. only: the term number of one account; terms of other accounts get None.
    """

    def weight(number: int, term: Term, examples: int) -> Weight | None:
        if only is not None and only != (MEANS if term.count is None else number):
            return None
        return (examples / request.mean_over if term.count is None else inverse[number]) * scale

    return [
        [weight(i, term, len(part.indices)) for i, term in enumerate(piece)]
        for piece, part in zip(terms, request.parts, strict=True)
    ]
