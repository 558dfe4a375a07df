"""Sums over V shards in an order of additions that depends on V only, not on which process computes which shard.

The order is a binary tree over [0, V): the sum over [lo, hi) is the sum over [lo, mid) plus the sum over [mid, hi), mid
rounded down. IEEE addition of two numbers is commutative, so the tree determines all bits.

Phase 1, in a process: each computed shard is a leaf. Two siblings are added into their parent at once, as in a binary
  counter, so a process holds about log2(its number of shards) partial sums. At the end it holds the smallest number of
  subtrees that cover its shards.
Phase 2, between processes: each of n processes adds up one n-th of the elements. It receives this piece of all other
  processes' subtrees, and completes the tree.
Phase 3: each process sends its finished piece to all others.
  (With two processes, each sends the other all subtrees and completes the tree: the same bytes, in one round.)

With s subtrees a process sends s (n - 1) / n of the tensor's bytes in phase 2, and (n - 1) / n in phase 3. If n is a
power of two, or V = n, then s = 1: 2 (n - 1) / n in total, the same as in a ring. Otherwise s is at most
2 log2(V / n) + 2.

If a shard gives a parameter no gradient, -0.0 takes its place, which changes no sum. A message contains the parameters
that had a gradient in the last step, and a mask of the parameters with a gradient on the sender. If the masks show
further parameters with a gradient, all processes send a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.codec_sums import NativeSums
from paceline.comm.devices import add_tensors
from paceline.comm.group import buckets
from paceline.comm.mesh import world_group
from paceline.comm.scalars import upload
from paceline.comm.threads import ThreadCollectives, ThreadReplicas
from paceline.torch_private.core import foreach_copy_

T = TypeVar("T")
Node = tuple[int, int]
"""(lo, hi): the shards from lo to hi - 1."""

MISSING = -0.0
MESSAGE_BYTES = 2**25  # bytes per subtree in a message


def middle(lo: int, hi: int) -> int:
    """The shard at which the tree splits a node of at least two shards."""
    return (lo + hi) // 2


def ranges(shards: int, n: int) -> list[Node]:
    """The range of shards that each of n processes computes. If n is a power of two, the ranges are the tree nodes of
    one depth. Otherwise they are the most even split."""
    if n & (n - 1):
        return [(shards * r // n, shards * (r + 1) // n) for r in range(n)]
    nodes = [(0, shards)]
    while len(nodes) < n:
        nodes = [half for lo, hi in nodes for half in ((lo, middle(lo, hi)), (middle(lo, hi), hi))]
    return nodes


def subtrees(owned: Node, node: Node) -> list[Node]:
    """The fewest nodes at or below `node` that cover the shards of `owned` within `node`, in order."""
    (lo, hi), (start, stop) = node, owned
    if stop <= lo or hi <= start:
        return []
    if start <= lo and hi <= stop:
        return [node]
    mid = middle(lo, hi)
    return subtrees(owned, (lo, mid)) + subtrees(owned, (mid, hi))


def complete(node: Node, sums: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum over `node`. sums: the sums over lower nodes that together cover it."""
    if node in sums:
        return sums[node]
    lo, hi = node
    mid = middle(lo, hi)
    return add(complete((lo, mid), sums, add), complete((mid, hi), sums, add))


class Tree:
    """Phase 1, for lists of tensors that arrive in shard order. `put` may overwrite the tensors of earlier shards."""

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
        """Add the next shard's tensors."""
        self.partial.append(((shard, shard + 1), tensors))
        while len(self.partial) > 1:
            (left, sums), (right, addends) = self.partial[-2:]
            parent = self._siblings.get((left, right))
            if parent is None:
                return
            self.partial[-2:] = [(parent, add_lists(sums, addends))]


@torch.no_grad()
def add_lists(sums: list[Tensor | None], addends: list[Tensor | None]) -> list[Tensor | None]:
    """Return sums + addends, item by item. If both tensors exist, the addend is added to the sum in place."""
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
    """Sums over `shards` shards, which the processes of the world compute according to `ranges`. The constructor and
    the methods are collective."""

    def __init__(self, shards: int) -> None:
        self.shards, self.size, self.rank = shards, world_group().size, world_group().rank
        self.ranges = self._first = ranges(shards, self.size)
        self.mine = tuple(range(*self.ranges[self.rank]))
        self._native = NativeSums() if self.size > 1 else None
        self._known: dict[Hashable, list[bool]] = {}  # name of a sum -> which tensors any process had in the last step

    def assign(self, owned: Sequence[Node] | None) -> None:
        """Set the range of shards that each process computes in the coming sums; None: as at the start."""
        self.ranges = self._first if owned is None else list(owned)

    def tree(self) -> Tree:
        return Tree(self.shards)

    @torch.no_grad()
    def gradients(self, tree: Tree, like: Sequence[Tensor], name: Hashable) -> list[Tensor | None]:
        """The sums over all shards; None for a tensor that no shard has. like: gives the shape, dtype and layout of
        each sum. name: identifies this sum across steps."""
        if self.size == 1:
            ((_, sums),) = tree.partial
            return [None if a is None else _laid_out(a, p) for a, p in zip(sums, like, strict=True)]
        mine = [any(sums[i] is not None for _, sums in tree.partial) for i in range(len(like))]
        layout = self._known.get(name, [])
        if len(layout) != len(like) or not any(layout):
            layout = list(map(bool, world_group().all_reduce(torch.tensor(mine, dtype=torch.int32), op="max").tolist()))
        found, union = self._travel(tree, like, layout, mine)
        if any(there and not sent for there, sent in zip(union, layout, strict=True)):
            found, union = self._travel(tree, like, union, mine)
        self._known[name] = union
        return [tensor if there else None for tensor, there in zip(found, union, strict=True)]

    def _travel(
        self, tree: Tree, like: Sequence[Tensor], layout: Sequence[bool], mine: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[bool]]:
        """Return the sums of the tensors that `layout` marks, and for each tensor whether any process has it."""
        found: list[Tensor | None] = [None] * len(like)
        union = list(mine)
        sent = [place for place, there in enumerate(layout) if there]
        for number, bucket in enumerate(buckets([like[place] for place in sent], MESSAGE_BYTES)):
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
        """Run phases 2 and 3 for this process's subtrees: flat tensors, of one length on all processes. Returns the
        sum, and the masks of all processes."""
        n, root, length, words = self.size, (0, self.shards), next(iter(flats.values())).numel(), mask.numel()
        theirs = [subtrees(owned, root) for owned in self.ranges]
        if n == 2 and len(theirs[0]) == len(theirs[1]) == 1:
            (mine,) = flats.values()  # one subtree: half of the tree
            arrived = self._to_others([torch.cat([mine, mask])] * n, [length + words] * n)[1 - self.rank]
            total = mine + arrived[:length]
            return total, [mask, arrived[length:]]

        # Phase 2. Pieces are equally long, except that the last pieces of a short tensor are shorter or empty.
        piece = -(-length // n)
        bounds = [(min(i * piece, length), min((i + 1) * piece, length)) for i in range(n)]
        sizes = [hi - lo for lo, hi in bounds]
        own = sizes[self.rank]
        sent = [torch.cat([*(flat[lo:hi] for flat in flats.values()), mask]) for lo, hi in bounds]
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
        """All-to-all: send message i to process i, and receive `lengths[i]` elements from it, for all other processes.
        (Gloo's all-gather is three times slower for the same bytes.)"""
        assert self._native is not None
        messages, lengths = list(messages), list(lengths)
        messages[self.rank], lengths[self.rank] = messages[self.rank][:0], 0
        return self._native.to_each(messages, lengths)

    def numbers(self, rows: dict[int, Tensor], columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(columns,): the sum of all shards' rows. rows: shard number -> row, for the shards of this process. Every
        process gathers all rows and adds them."""
        leaves = {(i, i + 1): row for i, row in enumerate(self.table(rows, columns, device, dtype).unbind())}
        return complete((0, self.shards), leaves, torch.add)

    def table(self, rows: dict[int, Tensor], columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(shards, columns): all shards' rows, by an all-reduce. Each element has one addend that is not MISSING."""
        table = torch.full((self.shards, columns), MISSING, device=device, dtype=dtype)
        for shard, row in rows.items():
            table[shard] = row
        if self._native is not None:
            self._native.group.all_reduce(table)
        return table


class ShardReplicas(ThreadReplicas):
    """The replica of one shard, computed by a thread of this process. `size` is the number of all shards, and `rank` is
    the shard's number. The threads of all processes make the same calls of `sum` and `rows`, in the same order."""

    def __init__(self, collectives: ThreadCollectives, thread: int, sums: TreeSums) -> None:
        super().__init__(collectives, thread)
        self._sums = sums
        self.size, self.rank = sums.shards, sums.mine[thread]

    def sum(self, tensor: Tensor) -> Tensor:
        return self._collectives.exchange(self._thread, tensor.detach(), self._added)

    def rows(self, row: Tensor) -> Tensor:
        return self._collectives.exchange(self._thread, row.detach(), self._gathered)

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
    """Join tensors in the logical order of their elements, whatever their strides."""
    parts = [
        torch.full((p.numel(),), MISSING, dtype=p.dtype, device=p.device) if t is None else t.reshape(-1)
        for t, p in zip(tensors, like, strict=True)
    ]
    return torch.cat(parts)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the memory layout and device of `like`, the same as after a sum over several processes.
    The bits of a norm depend on them, because it adds in memory order, in aligned blocks."""
    if tensor.stride() == like.stride() and not tensor.storage_offset() and tensor.device == like.device:
        return tensor
    return torch.empty_like(like, requires_grad=False).copy_(tensor)
