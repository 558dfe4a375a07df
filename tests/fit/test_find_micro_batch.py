"""The largest micro-batch that fits: on all processes, whichever runs out of memory; and what it leaves as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import TRAIN, X, Y, adamw, equal, loss_fn, near, net, started, unchanged, weighted
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline
from paceline import session
from paceline.errors import ModelError, SettingError, UsageError
from paceline.fitting.memory_trial import is_out_of_memory
from paceline.fitting.micro_batch_finder import MicroBatch, MicroBatches, search

pytestmark = pytest.mark.timeout(240)
WANT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. Error code 12 (Cannot allocate)"


@pytest.fixture(autouse=True)
def no_run_is_open() -> None:
    """A test of another file may have left one, in pytest's own process, which is the one rank of some of these tests.
    `paceline.start` would end it by itself."""
    session._close_all()


def find(model: nn.Module, loss: Any = loss_fn, **options: Any) -> MicroBatches:
    given: dict[str, Any] = {"global_batch": 20, "optimizer": adamw(model), "settings": {"device": "cpu"}, **options}
    return paceline.find_micro_batch(model, loss, given.pop("train_set", TRAIN), **given)


def limited(*limits: int, backward: bool = False, error: type[Exception] = torch.OutOfMemoryError) -> Any:
    """A loss that fails above a limit of examples; limits: of each rank. backward: in the backward."""
    import os

    limit = limits[int(os.environ.get("RANK", "0")) % len(limits)]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise error(WANT)

    def loss(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) <= limit:
            return loss_fn(model, batch)
        if backward:
            return Fails.apply(loss_fn(model, batch))  # type: ignore[no-any-return]
        raise error(WANT)

    return loss


def test_the_search_is_that_of_trying_all() -> None:
    for count in range(1, 40):
        sizes = sorted({-(-count // parts) for parts in range(1, count + 1)})
        for limit in range(count + 2):
            asked: list[int] = []

            def fits(size: int, limit: int = limit, asked: list[int] = asked) -> bool:
                asked.append(size)
                return size <= limit

            assert search(sizes, fits) == max((size for size in sizes if size <= limit), default=None)
            assert len(asked) == len(set(asked)) <= 2 * count.bit_length()


@pytest.mark.ranks(2, full=1)
@pytest.mark.parametrize(("error", "backward"), [(torch.OutOfMemoryError, True), (RuntimeError, False)])
def test_the_largest_that_fits_on_all_processes(error: type[Exception], backward: bool) -> None:
    """On two processes only rank 1 fails; a shard of 10 can be cut into 10, 5, 4, 3, 2, 1."""
    import os

    two = os.environ.get("WORLD_SIZE") == "2"
    found = find(net(), limited(1000, 4, backward=backward, error=error) if two else limited(9, backward=backward))
    assert found.shard == (10 if two else 20)
    assert found.largest == (4 if two else 7)
    tried = {one.micro_batch: one.fits for one in found.tried}
    assert tried == ({1: True, 2: True, 4: True, 10: False, 5: False} if two else tried)
    assert all((one.examples_per_second or 0) > 0 for one in found.tried if one.fits)
    assert found.suggestion <= found.largest
    if two:
        import torch.distributed as dist

        every: list[Any] = [None, None]
        dist.all_gather_object(every, found)
        assert every[0] == every[1]


@pytest.mark.ranks(2, full=1)
def test_all_stays_as_it_was_and_the_model_does_not_depend_on_what_was_found() -> None:
    model = net(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn(model, [X, Y]).backward()
    optimizer.step()
    with unchanged(model, optimizer):
        found = find(model, limited(3), optimizer=optimizer)

    def trained(**options: Any) -> nn.Module:
        with started() as run:
            other = net()
            options = {"global_batch": 20, "epochs": 2, "run": run, **options}
            paceline.fit(other, weighted, TRAIN, optimizer=adamw(other), **options)
            return other

    first = trained()
    find(model, weighted)
    equal(trained(), first)
    near(trained(micro_batch=found.largest), first, 1e-12)


@pytest.mark.ranks(2, full=1)
def test_another_error_is_raised_and_tells_the_other_processes() -> None:
    import os

    two = os.environ.get("WORLD_SIZE") == "2"
    if two and os.environ["RANK"] == "0":
        with pytest.raises(UsageError, match=r"rank 1 failed at micro_batch=4: ZeroDivisionError: .*line \d+"):
            find(net(), limited(1000, 2, error=ZeroDivisionError))
    else:
        with pytest.raises(ZeroDivisionError):
            find(net(), limited(1000, 2, error=ZeroDivisionError) if two else limited(2, error=ZeroDivisionError))
    assert find(net(), limited(1)).largest == 1  # the processes are where they were, together


@pytest.mark.ranks(2)
def test_nobody_waits_in_the_middle_of_a_forward() -> None:
    """Rank 1 runs out of memory where rank 0 would wait for it: in a loss that gathers, in torch's SyncBatchNorm."""

    from paceline import session

    inner = limited(1000, 4)

    def gathers(model: Any, batch: Any) -> Tensor:
        loss = inner(model, batch)
        session.current().gather(batch[0])  # type: ignore[union-attr]
        return loss  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match=r"each process computes alone: .*run\.gather"):
        find(net(), gathers)
    model = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3)).double()
    found = find(model, inner, settings={"device": "cpu", "batch_norm": "shard"})
    assert found.largest == 4
    assert type(model[1]) is nn.SyncBatchNorm


@pytest.mark.ranks(conformance=1, full=2)
def test_what_does_not_fit_at_all() -> None:
    said = r"global_batch=20\): not even micro_batch=1 fits(.|\n)*rank \d: (OutOf|Runtime)"
    with pytest.raises(SettingError, match=said):
        find(net(), limited(1000, 0) if torch.distributed.is_initialized() else limited(0))
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with pytest.raises(ModelError, match="batch norm over the global batch"):
        find(normed, limited(5))
    found = find(normed, limited(5), settings={"device": "cpu", "batch_norm": "shard"})
    assert found.tried[0].micro_batch == 2
    assert found.largest in (4, 5)
    whole = find(normed)
    assert [one.micro_batch for one in whole.tried] == [20]  # on any number of processes: a smaller one is refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([TRAIN[number] for number in range(len(TRAIN))])


def test_what_training_takes_is_tried() -> None:
    """The examples' order, a sampler, a stream, a collate function, the precision, and loss_fn=None."""
    seen: list[Tensor] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append(batch[0])
        return loss_fn(model, batch)

    find(net(), loss, shuffle=False, global_batch=2)
    assert torch.equal(seen[0], X[:1])
    seen.clear()
    find(net(), loss, sampler=range(21, -1, -1), global_batch=30)
    assert torch.equal(seen[0], X[21:])
    assert max(map(len, seen)) == 30  # more than there are: they come again
    seen.clear()
    find(net(), loss, train_set=Stream(), global_batch=2)
    assert torch.equal(seen[0], X[:1])
    seen.clear()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net().float()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            assert torch.is_autocast_enabled("cpu")
            logits = self.inner(x)
            return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}

    def collate(rows: Any) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows]).float(), "labels": torch.stack([y for _, y in rows])}

    found = find(Named(), None, collate_fn=collate, settings={"device": "cpu", "precision": "bf16"})
    assert found.largest == 20


def test_the_suggestion_and_the_table() -> None:
    speeds = [(1, 10.0), (2, 19.0), (4, 20.0), (8, 19.5)]
    found = MicroBatches([*(MicroBatch(n, True, s, 2**30) for n, s in speeds), MicroBatch(16, False, None, None)], 16)
    assert (found.largest, found.suggestion) == (8, 2)
    assert str(found).splitlines()[1:] == [
        "          1                    16        10.0  1.00 GiB",
        "          2                     8        19.0  1.00 GiB",
        "          4                     4        20.0  1.00 GiB",
        "          8                     2        19.5  1.00 GiB",
        "         16                     1  does not fit",
        "largest 8, suggestion 2",
    ]


def test_what_cannot_be() -> None:
    model = net()
    for options, said in (
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": {0: 4}}, "a whole number"),
        ({"reserve_mb": -1}, "reserve_mb=-1"),
        ({"micro_batch": 4}, "Remove the argument"),
        ({"batch_sampler": [[1]]}, "and a sampler"),
        ({"train_set": []}, "no example"),
        ({"colate_fn": len}, "Did you mean 'collate_fn'"),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
    ):
        with pytest.raises(SettingError, match=said):
            find(model, **options)
    with started(), pytest.raises(UsageError, match=r"Call it before paceline\.start"):
        find(model)
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError(WANT))
    assert is_out_of_memory(MemoryError())


REAL = """
import resource, sys
import torch
import paceline
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 64))

class Big(torch.nn.Module):  # 16 MB of activations for each example
    def forward(self, x):
        return x.repeat(1, 1 << 16).tanh()

model = torch.nn.Sequential(Big(), torch.nn.AdaptiveAvgPool1d(64), model)
loss_fn = lambda model, batch: model(batch[0]).mean()
optimizer = torch.optim.Adam(model.parameters())
paceline.find_micro_batch(model, loss_fn, data, optimizer=optimizer, global_batch=2)  # libraries are loaded by now
taken = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (taken + 900 * 2**20, -1))
found = paceline.find_micro_batch(model, loss_fn, data, optimizer=optimizer, global_batch=64, reserve_mb=100)
print(found)  # 100 MB are for what training keeps besides, and for holes between allocations
less = paceline.find_micro_batch(model, loss_fn, data, optimizer=optimizer, global_batch=64, reserve_mb=500)
print("less", less.largest)
paceline.fit(model, loss_fn, data, optimizer=optimizer, global_batch=64, micro_batch=found.largest, epochs=1)
print("trained")
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space is Linux's")
def test_a_real_limit_on_a_cpu(tmp_path: Path) -> None:
    """A process with an address space of 900 MB more than it has: what is found fits, and what it refuses does not."""
    (tmp_path / "real.py").write_text(REAL)
    # The limit counts address space. Of that malloc keeps 64 MB, and for a moment 128, for each thread that allocates,
    # used or not: with one arena for all it counts what the trial does.
    environ = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "real.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    refused = min(int(line.split()[0]) for line in lines if "does not fit" in line)
    assert lines[-1] == "trained"
    largest = int(lines[-3].split()[1].rstrip(","))
    assert 4 <= largest < refused <= 64
    # 400 MB hold no more than half of what did not fit into 800 MB.
    assert 1 <= int(lines[-2].split()[1]) <= refused / 2
