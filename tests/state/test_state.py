"""What a checkpoint says of the program that wrote it: classes of optimizers and schedulers, and the order of data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import RandomSampler, SequentialSampler, Subset, TensorDataset

import paceline
from paceline.errors import CheckpointError, UsageError
from paceline.state import checkpoint

DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)


def train(
    directory: Path,
    *,
    optimizer: Any = torch.optim.AdamW,
    scheduler: Any = StepLR,
    steps: int | None = 2,
    restore: bool = False,
    data: Any = DATA,
    **order: Any,
) -> list[int]:
    """Saves after `steps` steps of the second epoch. Returns the examples of that epoch, or of what was left of it."""
    seen: list[int] = []
    run = paceline.start(device="cpu", progress="off")
    try:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        own = optimizer(model.parameters(), lr=0.1)
        run.prepare(model, own, scheduler(own, 3))
        loader = run.loader(data, global_batch=8, **order)
        if restore:
            assert run.restore(directory)
        for epoch in run.epochs(2):
            for batch in loader:
                seen += loader.indices if epoch else ()
                run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
                run.step(own)
                if epoch == 1 and not restore and loader.step + 1 == steps:
                    run.save(directory)
                    return seen
        return seen
    finally:
        run.close()


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer number 0 is AdamW in the checkpoint, but SGD in this script"):
        train(tmp_path, optimizer=torch.optim.SGD, restore=True)


def test_another_scheduler_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(CheckpointError, match="scheduler number 0 is StepLR in the checkpoint, but Cosine"):
        train(tmp_path, scheduler=CosineAnnealingLR, restore=True)


ADDED = {"class", "schedulers", "shuffle", "sampler", "subset"}


def as_before(directory: Path) -> None:
    """Writes the checkpoint anew as it was before classes and orders were named in it."""

    def older(node: Any) -> Any:
        if isinstance(node, dict):
            return type(node)((key, older(value)) for key, value in node.items() if key not in ADDED)
        return [older(item) for item in node] if isinstance(node, list) else node

    found = checkpoint.find(directory)
    _, parts = checkpoint.read(found.path)
    changed = {name: older(part) if name.startswith(("run", "optimizer")) else part for name, part in parts.items()}
    assert json.dumps(changed["run"]["loaders"]) != json.dumps(parts["run"]["loaders"])
    checkpoint.write(directory, step=found.step, parts=changed)


def test_a_checkpoint_without_the_names_is_still_read(tmp_path: Path) -> None:
    first = train(tmp_path, shuffle=True)
    as_before(tmp_path)
    assert sorted(first + train(tmp_path, shuffle=True, restore=True)) == list(range(40))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"shuffle": False}, r"shuffle=True, but .* shuffle=False"),
        ({"sampler": SequentialSampler(DATA)}, "shuffle=True"),
    ],
)
def test_another_order_in_mid_epoch_is_refused(tmp_path: Path, order: dict[str, Any], words: str) -> None:
    train(tmp_path, shuffle=True)
    with pytest.raises(UsageError, match=words):
        train(tmp_path, restore=True, **order)


def test_another_sampler_or_subset_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "a", sampler=RandomSampler(DATA))
    with pytest.raises(UsageError, match=r"sampler=RandomSampler, but .* sampler=SequentialSampler"):
        train(tmp_path / "a", restore=True, sampler=SequentialSampler(DATA))
    train(tmp_path / "b", data=Subset(DATA, range(24)))
    with pytest.raises(UsageError, match="subset="):
        train(tmp_path / "b", data=Subset(DATA, range(1, 25)), restore=True)
    assert len(train(tmp_path / "b", data=Subset(DATA, list(range(24))), restore=True)) == 8


class Own:
    """A sampler that keeps generators of its own, of one kind."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Any:
        kind = type(self.generator).__module__.split(".")[0]
        draw = self.generator.randrange if kind == "random" else None
        draw = draw or getattr(self.generator, "integers", None) or self.generator.randint
        for _ in range(40):
            yield int(draw(0, 40))


class Sized(Own):
    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("kind", [Own, Sized])
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, __import__("random").Random])
def test_a_samplers_own_generator_is_keyed_by_the_epoch(tmp_path: Path, kind: Any, make: Any) -> None:
    expected = train(tmp_path, sampler=kind(make(1)), steps=None)
    first = train(tmp_path, sampler=kind(make(2)))
    generator = make(3)
    assert first + train(tmp_path, sampler=kind(generator), restore=True) == expected
    state = np.random.RandomState(3).randint(1 << 30) if make is np.random.RandomState else make(3).random()
    found = generator.randint(1 << 30) if make is np.random.RandomState else generator.random()
    assert found == state, "the program finds its generator as it left it"


def test_torchs_own_samplers_with_a_generator_go_on(tmp_path: Path) -> None:
    def sampler() -> Any:
        return RandomSampler(DATA, generator=torch.Generator().manual_seed(4))

    expected = train(tmp_path, sampler=sampler(), steps=None)
    assert sorted(expected) == list(range(40))
    first = train(tmp_path, sampler=sampler())
    assert first + train(tmp_path, sampler=sampler(), restore=True) == expected

    class Batches:
        """As torch's BatchSampler, which holds the sampler that draws."""

        def __init__(self) -> None:
            self.sampler = sampler()

        def __iter__(self) -> Any:
            indices = iter(self.sampler)
            while batch := [i for i, _ in zip(indices, range(8))]:
                yield batch

        def __len__(self) -> int:
            return 5

    from paceline.data.batch_plan import one_shard
    from paceline.data.loader import Loader
    from paceline.data.sources import LoaderArguments, make_source

    def indices(start: int) -> list[list[int]]:
        given = LoaderArguments(name="a", batch_sampler=Batches())
        source = make_source(DATA, given, seed=0, plan=partial(one_shard, 1, 0))
        made = Loader(source, device=torch.device("cpu"), on_yield=lambda _: None)
        made.load_state_dict({"epoch": 1, "step": start, **source.identity()})
        return [list(made.indices) for _ in made]

    assert indices(2) == indices(0)[2:]


def test_a_restored_run_that_counts_epochs_by_itself_is_told(tmp_path: Path) -> None:
    train(tmp_path)
    run = paceline.start(device="cpu", progress="off")
    model = nn.Linear(4, 3)
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.prepare(model, own, StepLR(own, 3))
    loader = run.loader(DATA, global_batch=8)
    run.restore(tmp_path)
    with pytest.warns(UserWarning, match=r"has already completed 1 epochs.*run\.epochs"):
        next(iter(loader))
    for wrong in ("3", -1, True):
        with pytest.raises(UsageError, match=r"run\.epochs\(.*an integer"):
            run.epochs(wrong)  # type: ignore[arg-type]
    run.close()


def test_what_fails_once_a_checkpoint_is_saved_is_a_warning_at_the_scripts_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(checkpoint, "_replace_pointer", fail)
    with pytest.warns(UserWarning, match="is saved, but tidying up after it failed: input/output error") as told:
        train(tmp_path)
    assert [warning.filename for warning in told] == [__file__]
