"""Sums over V shards whose order of additions depends on V alone, and not on which process computes which shard.

The order is a binary tree over [0, V): the sum over [lo, hi) is the sum over [lo, mid) plus that over [mid, hi), mid
the lower middle. IEEE addition of two numbers is commutative, so that the tree says all.

Phase 1, in a process: each computed shard is a leaf. Two siblings become their parent at once, as in a binary counter,
  so that partial sums of about log2 of the process's shards wait at a time. The fewest subtrees of its range remain.
Phase 2, between processes: each of n processes adds up one n-th of the elements. It receives that piece of every
  subtree of the others, and completes the tree.
Phase 3: the finished pieces go to all.
  (Two processes send each other all subtrees, and each completes the tree: as many bytes, in one round.)

A process sends s (n - 1) / n of the bytes in phase 2, s the number of its subtrees, and (n - 1) / n in phase 3. Where n
is a power of two, or V = n, s is 1: 2 (n - 1) / n together, what a ring sends. Else s is at most 2 log2(V / n) + 2.

A shard that gives a parameter no gradient is left out of its sum; on the wire it sends -0.0, which changes no sum. A
message has room for the parameters that had a gradient in the last step, and a mask of those that its sender has. Where
a process has others too, all processes see it in the masks, and send once more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.codec_sums import NativeSums
from paceline.comm.devices import add_tensors
from paceline.comm.scalars import upload
from paceline.comm.threads import Meeting, ThreadReplicas
from paceline.torch_private.core import foreach_copy_

T = TypeVar("T")
Node = tuple[int, int]
"""(lo, hi): the shards from lo to hi - 1."""

MISSING = -0.0
MESSAGE_BYTES = 2**25  # of each subtree in a message


def middle(lo: int, hi: int) -> int:
    """Where the tree splits a node of at least two shards."""
    return (lo + hi) // 2


def ranges(shards: int, n: int) -> list[Node]:
    """Which shards each of n processes computes. For a power of two these are nodes of the tree, all of one depth; else
    the most even cut."""
    if n & (n - 1):
        return [(shards * r // n, shards * (r + 1) // n) for r in range(n)]
    nodes = [(0, shards)]
    while len(nodes) < n:
        nodes = [half for lo, hi in nodes for half in ((lo, middle(lo, hi)), (middle(lo, hi), hi))]
    return nodes


def subtrees(owned: Node, node: Node) -> list[Node]:
    """The fewest nodes at or below `node` that make up its part of a range, in order."""
    (lo, hi), (start, stop) = node, owned
    if stop <= lo or hi <= start:
        return []
    if start <= lo and hi <= stop:
        return [node]
    mid = middle(lo, hi)
    return subtrees(owned, (lo, mid)) + subtrees(owned, (mid, hi))


def complete(node: Node, sums: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum over a node, from sums over nodes below it that make it up."""
    if node in sums:
        return sums[node]
    lo, hi = node
    mid = middle(lo, hi)
    return add(complete((lo, mid), sums, add), complete((mid, hi), sums, add))


class Tree:
    """Phase 1, for lists of tensors that come shard by shard, in order. `put` may change tensors that it was given."""

    def __init__(self, shards: int) -> None:
        self._siblings: dict[tuple[Node, Node], Node] = {}
        self._note((0, shards))
        self.partial: list[tuple[Node, list[Tensor | None]]] = []  # the subtrees so far, in order

    def _note(self, node: Node) -> None:
        lo, hi = node
        if hi - lo > 1:
            left, right = (lo, middle(lo, hi)), (middle(lo, hi), hi)
            self._siblings[left, right] = node
            self._note(left)
            self._note(right)

    def put(self, shard: int, tensors: list[Tensor | None]) -> None:
        """The next shard's."""
        self.partial.append(((shard, shard + 1), tensors))
        while len(self.partial) > 1:
            (left, sums), (right, addends) = self.partial[-2:]
            parent = self._siblings.get((left, right))
            if parent is None:
                return
            self.partial[-2:] = [(parent, add_lists(sums, addends))]


@torch.no_grad()
def add_lists(sums: list[Tensor | None], addends: list[Tensor | None]) -> list[Tensor | None]:
    """sums + addends, in place where both are there, on the device of the sums."""
    both = [(a, b) for a, b in zip(sums, addends, strict=True) if a is not None and b is not None]
    devices: dict[tuple[torch.device, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in both:
        mine, its = devices.setdefault((a.device, b.device), ([], []))
        mine.append(a)
        its.append(b)
    for mine, its in devices.values():
        add_tensors(its, mine)
    return [b if a is None else a for a, b in zip(sums, addends, strict=True)]


class TreeSums:
    """Sums over `shards` shards, which the processes of the world compute as `ranges` says. Its constructor and methods
    are collective."""

    def __init__(self, shards: int) -> None:
        self.shards, self.size, self.rank = shards, collectives.size_of(), collectives.rank_of()
        self.ranges = ranges(shards, self.size)
        self.mine = tuple(range(*self.ranges[self.rank]))
        self._native = NativeSums() if self.size > 1 else None
        self._known: dict[Hashable, list[bool]] = {}  # name of a sum -> which tensors any process had in the last step

    def tree(self) -> Tree:
        return Tree(self.shards)

    @torch.no_grad()
    def gradients(self, tree: Tree, like: Sequence[Tensor], name: Hashable) -> list[Tensor | None]:
        """The sums over all shards; None for a tensor that no shard has. like: tensors of the same form. name:
        identifies this sum in every step."""
        if self.size == 1:
            ((_, sums),) = tree.partial
            return [None if a is None else _laid_out(a, p) for a, p in zip(sums, like, strict=True)]
        mine = [any(sums[i] is not None for _, sums in tree.partial) for i in range(len(like))]
        layout = self._known.get(name, [])
        if len(layout) != len(like) or not any(layout):
            layout = list(map(bool, collectives.all_reduce(torch.tensor(mine, dtype=torch.int32), op="max").tolist()))
        found, union = self._travel(tree, like, layout, mine)
        if any(there and not sent for there, sent in zip(union, layout, strict=True)):
            found, union = self._travel(tree, like, union, mine)
        self._known[name] = union
        return [tensor if there else None for tensor, there in zip(found, union, strict=True)]

    def _travel(
        self, tree: Tree, like: Sequence[Tensor], layout: Sequence[bool], mine: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[bool]]:
        """The sums of the tensors in the layout; and which tensors any process has."""
        found: list[Tensor | None] = [None] * len(like)
        union = list(mine)
        sent = [place for place, there in enumerate(layout) if there]
        for number, bucket in enumerate(collectives.buckets([like[place] for place in sent], MESSAGE_BYTES)):
            places = [sent[position] for position in bucket]
            some = like[places[0]]
            flats = {node: _flat([sums[i] for i in places], [like[i] for i in places]) for node, sums in tree.partial}
            mask = upload(torch.tensor([] if number else mine, dtype=some.dtype), some.device)
            whole, everyone = self.add(flats, mask)
            if not number:
                union = [any(column) for column in zip(*(row.tolist() for row in everyone), strict=True)]
            parts = whole.split([like[i].numel() for i in places])
            totals = [torch.empty_like(like[i], requires_grad=False) for i in places]
            foreach_copy_(totals, [part.view(t.shape) for part, t in zip(parts, totals, strict=True)])
            for place, total in zip(places, totals, strict=True):
                found[place] = total
        return found, union

    def add(self, flats: dict[Node, Tensor], mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Phases 2 and 3 for this process's subtrees: flat tensors, of one length on all processes. Returns the sum,
        and the masks of all processes."""
        n, root, length, words = self.size, (0, self.shards), next(iter(flats.values())).numel(), mask.numel()
        if n == 2:
            (mine,) = flats.values()  # a whole half of the tree
            arrived = self._to_others([torch.cat([mine, mask])] * n, [length + words] * n)[1 - self.rank]
            total = mine + arrived[:length]
            return total, [mask, arrived[length:]]

        # Phase 2. Pieces are equally long; of a short tensor the last ones have less, or nothing.
        piece = -(-length // n)
        bounds = [(min(i * piece, length), min((i + 1) * piece, length)) for i in range(n)]
        sizes = [hi - lo for lo, hi in bounds]
        own = sizes[self.rank]
        sent = [torch.cat([*(flat[lo:hi] for flat in flats.values()), mask]) for lo, hi in bounds]
        theirs = [subtrees(owned, root) for owned in self.ranges]
        sums = {node: flat[slice(*bounds[self.rank])] for node, flat in flats.items()}
        everyone = [mask] * n
        for source, message in enumerate(self._to_others(sent, [len(nodes) * own + words for nodes in theirs])):
            if source != self.rank:
                *parts, everyone[source] = message.split([own] * len(theirs[source]) + [words])
                sums.update(zip(theirs[source], parts, strict=True))
        total = complete(root, sums, torch.add)

        # Phase 3.
        pieces = self._to_others([total] * n, sizes)
        pieces[self.rank] = total
        return torch.cat(pieces), everyone

    def _to_others(self, messages: list[Tensor], lengths: list[int]) -> list[Tensor]:
        """All-to-all: sends message i to process i, and receives from it `lengths[i]` elements; nothing to itself.
        (Gloo's all-gather takes three times as long for as many bytes.)"""
        assert self._native is not None
        messages, lengths = list(messages), list(lengths)
        messages[self.rank], lengths[self.rank] = messages[self.rank][:0], 0
        return self._native.to_each(messages, lengths)

    def numbers(self, rows: dict[int, Tensor], columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(columns,): the sum of all shards' rows. rows: of this process's shards, by their number. The rows are
        gathered, and every process adds them."""
        leaves = {(i, i + 1): row for i, row in enumerate(self.table(rows, columns, device, dtype).unbind())}
        return complete((0, self.shards), leaves, torch.add)

    def table(self, rows: dict[int, Tensor], columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(shards, columns): all shards' rows. Each element of the sum has one addend that is not missing."""
        table = torch.full((self.shards, columns), MISSING, device=device, dtype=dtype)
        for shard, row in rows.items():
            table[shard] = row
        if self._native is not None:
            collectives.all_reduce(table, group=self._native.group)
        return table


class ShardReplicas(ThreadReplicas):
    """The replica of one shard, which a thread of this process computes; its replicas are all V shards. The threads of
    all processes call `sum` and `rows` equally often and in the same order."""

    def __init__(self, meeting: Meeting, thread: int, sums: TreeSums) -> None:
        super().__init__(meeting, thread)
        self._sums = sums
        self.size, self.rank = sums.shards, sums.mine[thread]

    def sum(self, tensor: Tensor) -> Tensor:
        return self._meeting.meet(self._thread, tensor.detach(), self._added)

    def rows(self, row: Tensor) -> Tensor:
        return self._meeting.meet(self._thread, row.detach(), self._gathered)

    def _added(self, tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        return self._sums.numbers(self._flat(tensors), first.numel(), first.device, first.dtype).view(first.shape)

    def _gathered(self, tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        table = self._sums.table(self._flat(tensors), first.numel(), first.device, first.dtype)
        return table.view(-1, *first.shape)

    def _flat(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self._sums.mine, (tensor.reshape(-1) for tensor in tensors), strict=True))


def _flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Joins tensors in the logical order of their elements, whatever their strides."""
    parts = [
        torch.full((p.numel(),), MISSING, dtype=p.dtype, device=p.device) if t is None else t.reshape(-1)
        for t, p in zip(tensors, like, strict=True)
    ]
    return torch.cat(parts)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the memory layout, and on the device, of one that has travelled: a norm adds in the order of
    memory, in aligned blocks."""
    if tensor.stride() == like.stride() and not tensor.storage_offset() and tensor.device == like.device:
        return tensor
    return torch.empty_like(like, requires_grad=False).copy_(tensor)
