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
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.comm.tree_sums import Tree
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Weights
from paceline.strategies.batch_plan import Request
from paceline.strategies.gradient_store import GradientStore, Grads, any_gradient, scale_
from paceline.train.messages import CLEARED_BETWEEN, DIRECT_BACKWARD

Key = tuple[int, int]
"""(number of the backward call, number of the term; MEANS for all means over examples together)."""

MEANS = -1
FINAL: Key = (-1, -1)


class Accounts:
    """The gradient of the open global batch, by account. store: where gradients lie."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        self._counts = Counts(mesh, device, store.reduces_each)
        self._held: Key = FINAL  # the account that `.grad` holds
        self._exact = False  # whether FINAL has gradients, and they are ours
        self._earlier: Key | None = None  # the account in `.grad`, if it has gradients of earlier micro-batches
        self._waiting: dict[Key, Grads] = {}
        self.trees: dict[Key, Tree] = {}  # of shards, not yet complete (tree_accounts.py)
        # Those that backward calls of the open global batch have reached, where there are several optimizers.
        self.reached: set[Tensor] | None = None

    def passes(
        self, terms: list[list[Term]], request: Request, call: int, retain: bool, scale: float
    ) -> Iterator[tuple[Weights, bool]]:
        """The backward passes of one call: for each, the weights of all terms of all pieces, and whether the graph must
        be kept. The caller makes the pass, and comes back. retain: whether the graph must be kept after the last.
        scale: the loss scale."""
        if request.final and len(terms) == 1 and len(terms[0]) == 1 and terms[0][0].count is None:
            # What most steps are, without the lists: this runs between a forward and its backward.
            self.hold((call, MEANS))
            yield [[request.examples / request.mean_over * scale]], retain
            self.complete(scale)
            return
        keys = keys_of(terms, call)
        counted = [key for key in keys if key[1] != MEANS]
        for key in counted:
            self._counts.add(key, [c for piece in terms if (c := piece[key[1]].count) is not None])
        if not request.final:
            for number, key in enumerate(keys):
                self.hold(key)
                inverse: dict[int, Weight] = {key[1]: 1 / self._counts.power(key)} if key[1] != MEANS else {}
                yield weigh(terms, request, scale, inverse, only=key[1]), retain or number < len(keys) - 1
                self.note(key)
            return
        inverse = self._counts.inverse(counted)
        factors: list[Weight | None] = [
            self._counts.power(key) * inverse[key[1]] if key in counted and request.micros > 1 else None for key in keys
        ]
        self._gather(keys, factors)
        yield weigh(terms, request, scale, inverse, only=None), retain
        self.complete(scale)

    def hold(self, key: Key) -> None:
        """Puts `.grad` away into its account, and brings this one's into it."""
        if key == self._held:
            if self._earlier == key and not self._store.any():
                raise UsageError(CLEARED_BETWEEN)
            return
        grads = self._store.pop()
        if grads is None:
            self._exact = self._exact and self._held != FINAL
        else:
            if self._held == FINAL and not self._exact:
                raise UsageError(DIRECT_BACKWARD)
            self._waiting[self._held] = grads
        if self._waiting:
            self._store.restore(self._waiting.pop(key, ()))
        self._held = key

    def note(self, key: Key) -> None:
        """A micro-batch that is not the last has added to this account, which `.grad` holds."""
        self._earlier = key if self._store.any() else None

    def _gather(self, keys: Sequence[Key], factors: Sequence[Weight | None]) -> None:
        """The sum of these accounts, each times its factor (None: as it is), in `.grad`."""
        self.hold(keys[0])
        if factors[0] is not None:
            self._store.scale(factors[0])
        for key, factor in zip(keys[1:], factors[1:], strict=True):
            grads = self._waiting.pop(key, None)
            if grads is not None and factor is not None:
                scale_([g for g in grads if g is not None], factor)
            if grads is not None:
                self._store.add(grads)

    def complete(self, scale: float) -> None:
        """What `.grad` holds has been reduced: takes the loss scale out, and makes it part of FINAL."""
        if scale != 1.0:
            self._store.scale(1.0 / scale)
        if self.reached is not None:
            self.reached.update([p for p in self._store.parameters if p.grad is not None])
        if self._waiting and (grads := self._waiting.pop(FINAL, None)) is not None:
            self._store.add(grads)
        self._held, self._earlier, self._exact = FINAL, None, True

    def unreduced(self, parameters: Collection[Tensor]) -> bool:
        """Whether gradients that these have from earlier micro-batches wait for a backward call of the last one."""
        if self.trees:
            return True
        if self._held == FINAL and not self._waiting:
            return False
        asked = set(self._store.of(parameters))
        if self._held != FINAL and any_gradient(asked):
            return True
        return any(
            grad is not None and p in asked
            for key, grads in self._waiting.items()
            if key != FINAL
            for p, grad in zip(self._store.parameters, grads, strict=False)
        )

    def begin(self) -> None:
        """Another global batch begins, which shares no update with the last one."""
        self._counts.clear()
        if self.reached is not None:
            self.reached.clear()

    def drop_unreduced(self) -> None:
        """Forgets a global batch that was left before its end."""
        self._earlier = None
        self.trees.clear()
        if self._held != FINAL:
            self.hold(FINAL)
        for key in [key for key in self._waiting if key != FINAL]:
            del self._waiting[key]

    def clear(self) -> None:
        """Forgets everything, also what has been reduced."""
        self._store.clear(self._store.parameters)
        self._waiting.clear()
        self.trees.clear()
        self._held, self._earlier, self._exact = FINAL, None, False


class Counts:
    """The counts of one global batch: those of this process so far, by account. agreed: whether all ranks need the
    same P; one small all-reduce for each account of a global batch with micro-batches."""

    def __init__(self, mesh: Mesh, device: torch.device, agreed: bool) -> None:
        self._mesh, self._device, self._agreed = mesh, device, agreed
        self._sums: dict[Key, Weight] = {}
        self._powers: dict[Key, Weight] = {}

    def add(self, key: Key, counts: Sequence[Weight]) -> None:
        """Counts what a micro-batch has."""
        for count in counts:
            self._sums[key] = self._sums[key] + count if key in self._sums else count

    def power(self, key: Key) -> Weight:
        """P, the power of two by which this account's sums are divided for now; chosen when it is first asked for."""
        if key not in self._powers:
            first = collectives.all_reduce(self._vector([key]))[0] if self._agreed else self._sums[key]
            self._powers[key] = _power_of_two(first)
        return self._powers[key]

    def inverse(self, keys: Sequence[Key]) -> dict[int, Weight]:
        """1 / C for each of these accounts, by its term; C its count in all that the gradient is a mean over. 0 where
        that is 0."""
        if not keys:
            return {}
        counts = collectives.all_reduce(self._vector(keys), group=self._mesh.gradient)
        inverse = torch.where(counts > 0, 1 / counts.clamp(min=torch.finfo(counts.dtype).tiny), 0)
        return {key[1]: value for key, value in zip(keys, inverse.unbind(), strict=True)}

    def _vector(self, keys: Sequence[Key]) -> Tensor:
        """(len(keys),): this process's sums, in float64 where the device has it."""
        dtype = torch.float64 if self._device.type in ("cpu", "cuda") else torch.float32
        sums = [torch.as_tensor(self._sums[key], device=self._device) for key in keys]
        return torch.stack([count.to(dtype).reshape(()) for count in sums])

    def clear(self) -> None:
        """Another global batch begins."""
        self._sums.clear()
        self._powers.clear()


def _power_of_two(count: Weight) -> Weight:
    if isinstance(count, Tensor):
        return torch.exp2(torch.round(torch.log2(count.detach().clamp(min=1).to(torch.float32))))
    return 2.0 ** round(math.log2(max(count, 1)))


def keys_of(terms: list[list[Term]], call: int) -> list[Key]:
    """The accounts of a call, in the order of its terms."""
    return list(dict.fromkeys((call, MEANS if term.count is None else i) for i, term in enumerate(terms[0])))


def weigh(
    terms: list[list[Term]], request: Request, scale: float, inverse: Mapping[int, Weight], only: int | None
) -> Weights:
    """The weight of each term of each piece: its examples' share of the global batch, or 1 / the count of its term.
    only: of this account alone; others have None."""

    def weight(number: int, term: Term, examples: int) -> Weight | None:
        if only is not None and only != (MEANS if term.count is None else number):
            return None
        return (examples / request.mean_over if term.count is None else inverse[number]) * scale

    return [
        [weight(i, term, len(part.indices)) for i, term in enumerate(piece)]
        for piece, part in zip(terms, request.parts, strict=True)
    ]
