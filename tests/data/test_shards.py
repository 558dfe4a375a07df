"""Data sets of shards on real ranks: each example is read once, in an order that a formula gives and plain PyTorch
trains on, and a restart seeks."""

from __future__ import annotations

import os
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.checks import difference, started
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.data.shards import stream_count
from paceline.errors import SettingError, UsageError

EVEN, UNEVEN = [10] * 8, [7, 0, 23, 1, 12, 5, 0, 9, 4, 31]


class Files:
    """Shards of numbers, by names. Notes each example that any process reads, in files of a folder."""

    def __init__(self, lengths: Sequence[int], folder: Path | None = None) -> None:
        self.shards = [f"part-{number}" for number in range(len(lengths))]
        self._lengths, self._folder = lengths, folder

    def read(self, shard: str, position: int) -> Iterator[Tensor]:
        number = int(shard.removeprefix("part-"))
        for place in range(position, self._lengths[number]):
            if self._folder is not None:
                with (self._folder / f"{os.getpid()}.reads").open("a") as file:
                    file.write(f"{number * 1000 + place}\n")
            yield torch.tensor(number * 1000.0 + place)


def reads(folder: Path) -> Counter[int]:
    """example -> how many times it was read."""
    return Counter(int(line) for file in folder.glob("*.reads") for line in file.read_text().split())


def expected(lengths: Sequence[int], global_batch: int, shards: Sequence[int] | None = None) -> list[list[int]]:
    """The global batches, by the rule in docs/data.md."""
    shards = range(len(lengths)) if shards is None else shards
    count = stream_count(len(shards), global_batch)
    streams = [[s * 1000 + i for s in shards[stream::count] for i in range(lengths[s])] for stream in range(count)]
    sizes = [global_batch // count + (stream < global_batch % count) for stream in range(count)]
    everything: list[int] = []
    while any(streams):
        for stream, size in zip(streams, sizes, strict=True):
            everything += stream[:size]
            del stream[:size]
    return [everything[start : start + global_batch] for start in range(0, len(everything), global_batch)]


def steps(run: paceline.Run, loader: Any, until: int | None = None) -> list[list[int]]:
    """The examples of each global batch, in the order of their positions."""
    found: list[list[int]] = []
    for batch in loader:
        mine = list(zip(loader.rows, [int(number) for number in batch], strict=True))
        if not loader.current.micro:
            found.append([])
        found[-1] += [number for _, number in sorted(run.gather(mine))]
        if until is not None and len(found) == until:
            break
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.ranks(1, 2, conformance=(3, 4))
def test_each_example_is_read_once_in_an_order_that_depends_on_no_process_or_worker(folder: Path) -> None:
    with started(progress="off") as run:
        for workers in (0, 2):
            own = folder / f"{workers}"
            if run.main:
                own.mkdir()
            run.wait()
            loader = run.loader(Files(EVEN, own), global_batch=16, num_workers=workers, name=f"w{workers}", train=False)
            assert steps(run, loader) == expected(EVEN, 16)
            run.wait()
            found = reads(own)
            assert len(found) == sum(EVEN)
            if run.world_size in (1, 2, 4):
                assert set(found.values()) == {1}
            else:  # 8 streams on 3 processes: ranks 1 and 2 both have a position of one stream's block
                assert sum(found.values()) == sum(EVEN) + 10


@pytest.mark.ranks(1, 2, conformance=(3, 4))
def test_streams_of_different_lengths(folder: Path) -> None:
    with started(progress="off") as run:
        for number, (lengths, batch, workers) in enumerate(
            [
                (UNEVEN, 7, 0),
                (UNEVEN, 10, 2),
                (UNEVEN, 3, 0),
                (UNEVEN, 64, 0),
                ([0, 0, 5], 2, 0),
                ([40, 1], 9, 1),
                ([6], 4, 0),
            ]
        ):
            loader = run.loader(Files(lengths), global_batch=batch, num_workers=workers, name=f"l{number}", train=False)
            assert steps(run, loader) == expected(lengths, batch), (lengths, batch)
            dropping = run.loader(Files(lengths), global_batch=batch, drop_last=True, name=f"d{number}", train=False)
            assert steps(run, dropping) == [one for one in expected(lengths, batch) if len(one) == batch]
            limited = run.loader(Files(lengths), global_batch=batch, limit_batches=2, name=f"m{number}", train=False)
            assert steps(run, limited) == expected(lengths, batch)[:2]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    x = (batch / 1000).to(torch.float64)
    return (model(torch.stack([x, x.sin()], 1)) - x.cos()[:, None]).square().mean()


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plainly(batches: Sequence[Sequence[int]]) -> nn.Module:
    model, optimizer = a_model()
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, torch.tensor([float(number) for number in batch])).backward()
        optimizer.step()
    return model


@pytest.mark.ranks(1, 2, conformance=(3, 4))
def test_the_model_is_that_of_plain_pytorch_on_the_same_order() -> None:
    for micro in (None, 2):
        with started(progress="off") as run:
            model, optimizer = run.prepare(*a_model())
            loader = run.loader(Files(UNEVEN), global_batch=8, micro_batch=micro)
            for _ in range(2):
                for batch in loader:
                    run.forward_backward(loss_fn, model, batch)
                    run.step(optimizer)
            assert difference(model, plainly(expected(UNEVEN, 8) * 2)) < 1e-12


def order_of_epoch(run: paceline.Run, loader: Any) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append([n for _, n in sorted(run.gather(list(zip(loader.rows, batch.tolist(), strict=True))))])
        loader.mark_stepped(loader.current)
    return found


@pytest.mark.ranks(2, conformance=(1, 3))
def test_shuffling_follows_the_epoch_and_is_the_same_on_any_number_of_processes(folder: Path) -> None:
    with started(progress="off") as run:
        loader = run.loader(Files(UNEVEN), global_batch=8, shuffle=True, shuffle_buffer=30, num_workers=1)
        epochs = [order_of_epoch(run, loader) for _ in range(2)]
    everything = sorted(chain(*expected(UNEVEN, 8)))
    assert [sorted(chain(*epoch)) for epoch in epochs] == [everything] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != expected(UNEVEN, 8)
    assert zlib.crc32(repr(epochs).encode()) == SHUFFLED


SHUFFLED = 3605624383
"""Digest of the order of these two epochs, the same on any number of processes."""


@pytest.mark.ranks(2, conformance=(1, 3))
def test_a_restart_reads_at_most_one_shard_of_a_stream_again(folder: Path) -> None:
    """Also in the tail, where the streams are of different lengths, and with the streams shuffled."""
    for shuffle, at in ((False, 3), (False, 9), (True, 5)):
        own = folder / f"{shuffle}{at}"
        with started(progress="off") as run:
            if run.main:
                own.mkdir()
            run.wait()
            model, optimizer = run.prepare(*a_model())
            loader = run.loader(Files(UNEVEN), global_batch=8, shuffle=shuffle)
            whole: list[list[int]] = []
            for batch in loader:
                whole.append([n for _, n in sorted(run.gather(list(zip(loader.rows, batch.tolist(), strict=True))))])
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
                if run.steps == at:
                    run.save(own / "checkpoint")
        reading = own / f"reads{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}"
        reading.mkdir()
        with started(progress="off") as run:
            again, optimizer = run.prepare(*a_model())
            loader = run.loader(Files(UNEVEN, reading), global_batch=8, shuffle=shuffle)
            run.restore(own / "checkpoint")
            rest = []
            for batch in loader:
                rest.append([n for _, n in sorted(run.gather(list(zip(loader.rows, batch.tolist(), strict=True))))])
                run.forward_backward(loss_fn, again, batch)
                run.step(optimizer)
        assert rest == whole[at:]
        assert difference(again, model) == 0
        read, due = set(reads(reading)), {number for batch in rest for number in batch}
        again_read = read - due
        assert len({number // 1000 for number in again_read}) <= 5, "one shard of each stream"
        if not shuffle:
            assert len(again_read) < 8, "fewer than a global batch"


@pytest.mark.ranks(2)
def test_a_data_set_with_fewer_streams_than_data_shards_is_named() -> None:
    class Plain(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return map(torch.tensor, [1.0, 2.0, 3.0])

    def warnings_of(strategy: str) -> list[str]:
        with started(strategy=strategy, progress="off") as run, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run.loader(Plain(), global_batch=2, name="plain")
            run.loader(Files([4]), global_batch=2, name="one")
            run.loader(Files([4, 4]), global_batch=2, name="two")
        return [str(one.message) for one in said if "run.loader" in str(one.message)]

    lines = warnings_of("ddp")
    assert not warnings_of("tensor"), "both processes need all examples"
    if world_group().rank:
        assert not lines
        return
    assert len(lines) == 2
    assert "name='plain', dataset=Plain): the data set is one stream, so each of the 2 processes" in lines[0]
    assert "name='one', dataset=Files): 1 shard(s) make 1 stream(s) for 2 processes, so several" in lines[1]


@pytest.mark.conformance
@pytest.mark.ranks(1, 2, 3)
def test_a_stream_of_hugging_face_with_shards() -> None:
    """Workers read their shards whole, though the data set splits itself by worker."""
    import datasets

    rows = datasets.Dataset.from_dict({"n": list(range(45))})
    plain = rows.to_iterable_dataset(num_shards=6)
    mapped = plain.map(lambda row: {"twice": 2 * row["n"]}).filter(lambda row: row["n"] % 7 != 3)
    for data, workers in ((plain, 0), (mapped, 2), (mapped.shuffle(seed=1, buffer_size=5), 0)):
        shards = [[row["n"] for row in data.shard(6, shard)] for shard in range(6)]
        with started(progress="off") as run:
            loader = run.loader(data, global_batch=12, num_workers=workers)
            found: list[list[int]] = []
            states = []
            for batch in loader:
                mine = list(zip(loader.rows, batch["n"].tolist(), strict=True))
                found.append([number for _, number in sorted(run.gather(mine))])
                loader.mark_stepped(loader.current)
                states.append(loader.state_dict())
            numbers = [[shards[n // 1000][n % 1000] for n in one] for one in expected([len(s) for s in shards], 12)]
            assert found == numbers
            again = run.loader(data, global_batch=12, name="again")
            again.load_state_dict(states[1])
            rest = [list(zip(again.rows, batch["n"].tolist(), strict=True)) for batch in again]
            assert [[number for _, number in sorted(run.gather(mine))] for mine in rest] == found[2:]


def test_a_data_set_with_rows_is_read_by_its_rows() -> None:
    class Rows(list[int]):
        shards = 4

        def read(self, shard: int, position: int) -> None:
            raise AssertionError("not the protocol of shards")

    with started(progress="off") as run:
        found = [batch.tolist() for batch in run.loader(Rows(range(6)), global_batch=2)]
    assert found == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.conformance
def test_a_split_of_hugging_face_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    split = split_dataset_by_node(datasets.Dataset.from_dict({"n": [*range(8)]}).to_iterable_dataset(4), 0, 2)
    with started(progress="off") as run, pytest.raises(SettingError, match="split_dataset_by_node"):
        run.loader(split, global_batch=2)


def test_what_is_refused() -> None:
    with started(progress="off") as run:
        with pytest.raises(SettingError, match="`shards` is empty"):
            run.loader(Files([]), global_batch=2)
        with pytest.raises(SettingError, match="no batch"):
            list(run.loader(Files([0, 0]), global_batch=2))
        loader = run.loader(Files([4, 4]), global_batch=2, name="other")
        state = loader.state_dict() | {"step": 1}
        with pytest.raises(UsageError, match="shards=2"):
            run.loader(Files([4, 4, 4]), global_batch=2, name="more").load_state_dict(state)
