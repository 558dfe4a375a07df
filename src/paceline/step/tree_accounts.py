"""Accumulate the gradient of a global batch of V shards so that its bits depend on V alone (`reproducible=V`).

1. Each account (accounts.py) has a tree. Each backward pass belongs to one account.
2. After the last micro-batch of a shard, the gradient in `.grad` becomes the shard's leaf. Sums over counted items are
   divided by P in every micro-batch. P is the power of two nearest to the number of examples in the global batch.
3. The complete tree gives the sum over the shards. A sum over counted items is multiplied by P / C. C is the count of
   all shards. The shards' counts are added in the same tree order.
4. The accounts are added in the order of the backward calls.

The leaf of a shard without examples is empty. A process with fewer shards than others also computes zero-length
batches, which have no leaf. With batch norm a process computes its shards together, each on its own replica, and the
gradient of the replica is the leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.scalars import scalar, wide_dtype
from paceline.comm.tree_sums import TreeSums
from paceline.data.batch_plan import Request, cut
from paceline.data.shard_sizes import bounds
from paceline.errors import UsageError
from paceline.step.accounts import MEANS, Accounts, Key, keys_of, weigh
from paceline.strategies.base import Term, Weight, Weights
from paceline.strategies.gradient_store import GradientStore, Grads, scale_

UPDATED_BETWEEN = (
    "reproducible: a backward call came after an update within one iteration of the loop. The shards are computed in "
    "sequence, so they would see different weights. Make all backward calls before the first run.step of a global "
    "batch, or leave reproducible out."
)


class TreeAccounts:
    """The accounts of a reproducible run. `passes`, `begin` and `end` replace the methods of Accounts."""

    def __init__(self, sums: TreeSums, accounts: Accounts, store: GradientStore, device: torch.device) -> None:
        self._sums, self._accounts, self._store, self._device = sums, accounts, store, device
        self._counts: dict[Key, dict[int, Tensor]] = {}  # by account and shard: the number of counted items
        self._keys: list[Key] = []  # the accounts of the latest call

    def passes(self, terms: list[list[Term]], request: Request, call: int) -> list[list[Key]]:
        """See `Accounts.passes`. Here each pass has one account."""
        keys = keys_of(terms, call)
        if request.micro == 0:
            self._sums.assign(bounds(self._sums.shards, request.weights) if request.weights else None)
        for key in keys:
            if request.micro == 0:
                self._counts.pop(key, None)
            for part, its, nothing in zip(request.parts, terms, self._empty(request), strict=True):
                if key[1] != MEANS and not nothing and (count := its[key[1]].count) is not None:
                    self._count(key, part.shard, count)
        self._keys = keys
        return [[key] for key in keys]

    def begin(self, keys: Sequence[Key], terms: list[list[Term]], request: Request, scale: float) -> Weights:
        """See `Accounts.begin`."""
        (key,) = keys
        self._accounts.switch_to(key)
        return weigh(terms, request, scale, {key[1]: 1 / _power(request)}, only=key[1])

    def end(self, keys: Sequence[Key], request: Request, scale: float) -> None:
        """Finish the pass over this account.

        After a shard's last micro-batch the shard's gradient becomes a leaf. After the last pass of a global batch the
        trees are complete.
        """
        (key,) = keys
        last = request.parts[0].micro == request.micro_batches - 1
        for replica, (part, nothing) in enumerate(zip(request.parts, self._empty(request), strict=True)):
            if last and part.shard < self._sums.shards:
                self._leaf(key, part.shard, replica, nothing)
            elif nothing:
                self._take(replica)
        self._accounts.accumulated(key)
        if request.final and key == self._keys[-1]:
            self._complete(self._keys, _power(request), scale)

    def _empty(self, request: Request) -> list[bool]:
        """For each part of a request, whether its shard has no examples."""
        shards = self._sums.shards
        return [p.shard >= shards or len(range(*cut(request.total, shards, p.shard))) == 0 for p in request.parts]

    def _count(self, key: Key, shard: int, count: Weight) -> None:
        value = scalar(count, wide_dtype(self._device), self._device)
        mine = self._counts.setdefault(key, {})
        mine[shard] = mine[shard] + value if shard in mine else value

    def _take(self, replica: int) -> list[Tensor | None]:
        """Remove and return the gradients of this replica of the process."""
        grads = self._store.pop_replica(replica)
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise UsageError(
                "reproducible: a parameter has a sparse gradient, for example of nn.Embedding(sparse=True). The order "
                "in which its entries are added is not fixed. Set sparse=False."
            )
        return grads

    def _leaf(self, key: Key, shard: int, replica: int, empty: bool) -> None:
        grads = self._take(replica)
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


def _power(request: Request) -> float:
    """P: the sums over counted items are divided by it in every micro-batch."""
    return 2.0 ** round(math.log2(max(request.total, 1)))
