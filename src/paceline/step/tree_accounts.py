"""The gradient of a global batch of V shards in sequence, whose bits depend on V alone (`reproducible=V`).

1. Each account (gradients.py) has a tree. Each backward pass belongs to one account.
2. After the last micro-batch of a shard, the gradient that `.grad` holds becomes the shard's leaf. Sums over counted
   things are divided by P in every micro-batch. P is the power of two nearest to the number of examples of the global
   batch.
3. The complete tree gives the sum over the shards. A sum over counted things is multiplied by P / C. C, the count of
   all shards, is added in the same tree.
4. The accounts are added in the order of the backward calls.

A shard without examples has no leaf, and neither have the zero-length batches of a process that has fewer shards than
others. Where batch norm lets the shards of a process compute together, the gradient of each shard's replica is its
leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.scalars import scalar, wide_dtype
from paceline.comm.tree_sums import TreeSums
from paceline.data.batch_plan import Request, cut
from paceline.errors import UsageError
from paceline.step.gradients import MEANS, Accounts, Key, keys_of, weigh
from paceline.strategies.base import Term, Weight, Weights
from paceline.strategies.gradient_store import GradientStore, Grads, scale_

UPDATED_BETWEEN = (
    "reproducible: a backward call came after an update within one yield of the loader. The shards that are computed "
    "one after the other would see different weights. Make all backward calls before the first run.step of a global "
    "batch, or leave reproducible out."
)


class TreeAccounts:
    """Yields the backward passes of shards in sequence, in place of `Accounts.passes`."""

    def __init__(self, sums: TreeSums, accounts: Accounts, store: GradientStore, device: torch.device) -> None:
        self._sums, self._accounts, self._store, self._device = sums, accounts, store, device
        self._counts: dict[Key, dict[int, Tensor]] = {}  # by account and shard: how many things its sum is over

    def passes(
        self, terms: list[list[Term]], request: Request, call: int, retain: bool, scale: float
    ) -> Iterator[tuple[Weights, bool]]:
        """See `Accounts.passes`."""
        shards, parts = self._sums.shards, request.parts
        empty = [p.shard >= shards or len(range(*cut(request.total, shards, p.shard))) == 0 for p in parts]
        power = 2.0 ** round(math.log2(max(request.total, 1)))
        keys = keys_of(terms, call)
        for key in keys:
            if request.micro == 0:
                self._counts.pop(key, None)
            for part, its, nothing in zip(parts, terms, empty, strict=True):
                if key[1] != MEANS and not nothing and (count := its[key[1]].count) is not None:
                    self._count(key, part.shard, count)
        last = parts[0].micro == request.micro_batches - 1
        for number, key in enumerate(keys):
            self._accounts.switch_to(key)
            yield weigh(terms, request, scale, {key[1]: 1 / power}, only=key[1]), retain or number < len(keys) - 1
            for place, (part, nothing) in enumerate(zip(parts, empty, strict=True)):
                if last and part.shard < shards:
                    self._leaf(key, part.shard, place, nothing)
                elif nothing:
                    self._take(place)
            self._accounts.mark_accumulated(key)
        if request.final:
            self._complete(keys, power, scale)

    def _count(self, key: Key, shard: int, count: Weight) -> None:
        value = scalar(count, wide_dtype(self._device), self._device)
        mine = self._counts.setdefault(key, {})
        mine[shard] = mine[shard] + value if shard in mine else value

    def _take(self, place: int) -> list[Tensor | None]:
        """Remove the gradients of one of this process's replicas from it, and return them."""
        grads = self._store.pop_replica(place)
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise UsageError(
                "reproducible: a parameter has a sparse gradient, as of nn.Embedding(sparse=True), whose entries are "
                "added in no fixed order. Set sparse=False."
            )
        return grads

    def _leaf(self, key: Key, shard: int, place: int, empty: bool) -> None:
        grads = self._take(place)
        tree = self._accounts.trees.get(key)
        if tree is None:
            tree = self._accounts.trees[key] = self._sums.tree()
        tree.put(shard, [None] * len(grads) if empty else grads)

    def _complete(self, keys: Sequence[Key], power: float, scale: float) -> None:
        accounts = self._accounts
        counted = [key for key in keys if key[1] != MEANS]
        factors = dict(zip(counted, self._factors(counted, power), strict=True))
        whole: list[Grads] = []
        for key in keys:
            found = self._sums.gradients(accounts.trees.pop(key), self._store.parameters, key)
            if key in factors:
                scale_([grad for grad in found if grad is not None], factors[key])
            whole.append(found)
        for found in whole:
            self._store.add(found)
        accounts.complete(scale)

    def _factors(self, counted: Sequence[Key], power: float) -> list[Tensor]:
        """P / C for each of these accounts; 0 where C is 0."""
        if not counted:
            return []
        wide = wide_dtype(self._device)
        shards = sorted({shard for key in counted for shard in self._counts.get(key, ())})
        nothing = torch.zeros((), dtype=wide, device=self._device)
        rows = {i: torch.stack([self._counts.get(key, {}).get(i, nothing) for key in counted]) for i in shards}
        counts = self._sums.numbers(rows, len(counted), self._device, wide)
        inverse = torch.where(counts > 0, 1 / counts.clamp(min=torch.finfo(wide).tiny), 0)
        return list((power * inverse).unbind())
