"""The record of what a Paceline job consumed and drew, and the arithmetic that says whether it is legal.

Each process notes, at each yield, the ids of its examples and whatever was drawn for them (crop offsets, masked
positions), and closes the step when `run.step` acted. `merge` puts the processes together in global order: a global
batch of n examples is cut contiguously over the shards, and each shard into micro-batches. `legal_epochs`
counts by itself, from the length of the data set and the global batch alone, so that a lost, doubled or misplaced
example is an error here, and is not replayed into a plain reference that agrees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Yield:
    """A micro-batch of one loader, of one shard."""

    stream: str
    shard: int
    ids: list[int]
    drawn: dict[str, list[Any]]  # an item per example
    shared: dict[str, Any] | None  # what the script drew in its loop; of a bundle the first part has it
    losses: dict[str, tuple[float, float]]  # mean, count


class Record:
    """Kept by one process while it trains."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[Yield]]] = []  # epoch, yields
        self._open: list[Yield] = []

    def note(
        self,
        loader: Any,
        batch: Any,
        *,
        stream: str = "train",
        shared: dict[str, Any] | None = None,
        losses: dict[str, Any] | None = None,
        count: Callable[[Any], Any] = lambda part: len(part["index"]),
        drawn: Callable[[Any], dict[str, list[Any] | Tensor]] = lambda part: {},
    ) -> None:
        """A batch was consumed, or a bundle of the batches of several shards or micro-batches. Its entry `index` holds
        the ids, which must be those of `loader.indices`. losses: this process's means, over as many things as `count`
        says of a batch. drawn: of a batch, what was drawn for its examples."""
        if hasattr(batch, "pieces"):
            parts = [(piece.shard, piece.batch) for piece in batch.pieces]
        else:
            parts = [(loader.current.parts[0].shard, batch)]
        ids = [i for _, part in parts for i in torch.as_tensor(part["index"]).tolist()]
        assert list(loader.indices) == ids, f"loader.indices says {list(loader.indices)}, the batch holds {ids}"
        with torch.no_grad():
            means = {name: float(mean) for name, mean in (losses or {}).items()}
        for number, (shard, part) in enumerate(parts):
            lists = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in drawn(part).items()}
            weighed = {name: (mean, float(count(part))) for name, mean in means.items()}
            self._open.append(
                Yield(
                    stream,
                    shard,
                    torch.as_tensor(part["index"]).tolist(),
                    lists,
                    None if number else shared or {},
                    weighed,
                )
            )

    def close_step(self, epoch: int) -> None:
        """`run.step` said True."""
        self.steps.append((epoch, self._open))
        self._open = []


@dataclass
class Batch:
    """A global batch of one loader, or a part of it, in global order."""

    ids: list[int]
    drawn: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def pick(self, positions: list[int]) -> Batch:
        return Batch([self.ids[i] for i in positions], {k: [v[i] for i in positions] for k, v in self.drawn.items()})


@dataclass
class Step:
    """One optimizer step over all shards."""

    epoch: int
    world: int  # shards
    batches: dict[str, Batch]  # by loader
    sizes: dict[str, list[list[int]]]  # by loader: [shard][micro-batch] number of examples
    shared: list[list[dict[str, Any]]]  # [shard][what its process got from the loader at once]
    losses: dict[str, float]

    @property
    def batch(self) -> Batch:
        return self.batches["train"]

    def parts(self, micro_batch: int | None, stream: str = "train") -> list[Batch]:
        """The global batch cut as the job computed it: one part for each yield, with micro-batch j of every process.

        Only for a job in which something depends on the cut, in plain gradient accumulation as well, such as (c), where
        one model learns between the micro-batches of another. All others take the whole batch.
        """
        batch = self.batches[stream]
        return [batch.pick(positions) for positions in together(len(batch), self.world, micro_batch)]


def cut(n: int, world: int, micro_batch: int | None) -> list[list[range]]:
    """Positions of a global batch of n examples: [process][micro-batch]."""
    shards = dealt_out(range(n), world)
    k = -(-max(map(len, shards)) // micro_batch) if micro_batch else 1
    return [dealt_out(shard, k) for shard in shards]


def dealt_out(positions: range, parts: int) -> list[range]:
    """In order, the first parts having one more each where some are left over."""
    found, start = [], 0
    for part in range(parts):
        size = -(-(len(positions) - start) // (parts - part))
        found.append(positions[start : start + size])
        start += size
    return found


def together(n: int, world: int, micro_batch: int | None) -> list[list[int]]:
    """Positions that are computed at once, over all processes: one list for each yield."""
    return [[i for part in parts for i in part] for parts in zip(*cut(n, world, micro_batch), strict=True)]


def merge(records: list[Record]) -> list[Step]:
    """The records of all processes of one run as steps in global order."""
    assert len({len(record.steps) for record in records}) == 1, "processes made different numbers of steps"
    steps = []
    for on_ranks in zip(*(record.steps for record in records), strict=True):
        epochs = {epoch for epoch, _ in on_ranks}
        assert len(epochs) == 1, f"processes are in different epochs in one step: {epochs}"
        steps.append(_merge_step(epochs.pop(), _by_shard([yields for _, yields in on_ranks])))
    return steps


def _by_shard(on_ranks: list[list[Yield]]) -> list[list[Yield]]:
    """[shard][yield]. Where several processes compute one shard together, all must have seen the same of it."""
    shards: dict[int, list[Yield]] = {}
    for yields in on_ranks:
        for shard in {y.shard for y in yields}:
            mine = [y for y in yields if y.shard == shard]
            first = shards.setdefault(shard, mine)
            alike = [(y.stream, y.ids, y.drawn) for y in mine] == [(y.stream, y.ids, y.drawn) for y in first]
            assert alike, f"two processes saw different examples of shard {shard}"
    assert sorted(shards) == list(range(len(shards))), f"shards {sorted(shards)}: one is missing"
    return [shards[shard] for shard in sorted(shards)]


def _merge_step(epoch: int, shards: list[list[Yield]]) -> Step:
    batches: dict[str, Batch] = {}
    sizes: dict[str, list[list[int]]] = {}
    weighted: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stream in {y.stream: None for y in shards[0]}:
        mine = [[y for y in yields if y.stream == stream] for yields in shards]
        sizes[stream] = [[len(y.ids) for y in yields] for yields in mine]
        batch = batches[stream] = Batch([i for yields in mine for y in yields for i in y.ids])
        for y in (y for yields in mine for y in yields):
            for name, items in y.drawn.items():
                assert len(items) == len(y.ids), f"{name}: {len(items)} items for {len(y.ids)} examples"
                batch.drawn.setdefault(name, []).extend(items)
    for y in (y for yields in shards for y in yields):
        for name, (mean, count) in y.losses.items():
            weighted[name].append((mean * count if count else 0.0, count))  # the mean over nothing is NaN
    losses = {name: sum(s for s, _ in items) / sum(c for _, c in items) for name, items in weighted.items()}
    shared = [[y.shared for y in yields if y.shared is not None] for yields in shards]
    return Step(epoch, len(shards), batches, sizes, shared, losses)


def legal_epochs(
    steps: list[Step],
    *,
    n: int,
    global_batch: int,
    epochs: int,
    micro_batch: int | None,
    stream: str = "train",
    taken: Iterable[int] | None = None,
) -> list[list[Step]]:
    """The steps by epoch, if they are what a loader over n examples must give; AssertionError if not.

    `taken`: how many steps of each epoch the job consumed, where it left epochs early.
    """
    full = -(-n // global_batch)
    counts = list(taken) if taken is not None else [full] * epochs
    assert len(steps) == sum(counts), f"{len(steps)} steps, expected {sum(counts)}"
    result, orders = [], []
    for epoch, count in enumerate(counts):
        here = steps[sum(counts[:epoch]) : sum(counts[: epoch + 1])]
        assert [step.epoch for step in here] == [epoch] * count, f"steps of epoch {epoch} are noted elsewhere"
        ids = [i for step in here for i in step.batches[stream].ids]
        assert all(0 <= i < n for i in ids), f"epoch {epoch}: an id outside of the data set"
        assert len(set(ids)) == len(ids), f"epoch {epoch}: an example came twice"
        for k, step in enumerate(here):
            size = min(global_batch, n - k * global_batch)
            expected = [[len(part) for part in shard] for shard in cut(size, step.world, micro_batch)]
            assert step.sizes[stream] == expected, f"epoch {epoch} step {k}: {step.sizes[stream]}, not {expected}"
        if count == full:
            assert sorted(ids) == list(range(n)), f"epoch {epoch}: examples are missing"
        result.append(here)
        orders.append(tuple(ids))
    if n > 10:  # few examples come in the same order again by chance
        assert all(list(order) != sorted(order) for order in orders), "not shuffled"
        assert len(set(orders)) == len(orders), "two epochs have one order"
    return result
