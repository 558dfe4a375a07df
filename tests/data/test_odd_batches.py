"""Batches of unusual kinds: moved to a device, and made empty for a shard without examples."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.data.batch_plan import one_shard
from paceline.data.batch_rows import empty_batch
from paceline.data.placement import move
from paceline.data.sources import LoaderArguments, make_source
from paceline.errors import EmptyShardError, SettingError


class Attributes(dict[str, Any]):
    """A dict whose entries are attributes too, and that raises KeyError for others."""

    __getattr__ = dict.__getitem__


class Titled(dict[str, Any]):
    """A dict that cannot be made from a dict alone, and holds more than its entries."""

    def __init__(self, title: str, **items: Any) -> None:
        super().__init__(**items)
        self.title = title


META = torch.device("meta")
EXAMPLE = torch.ones(3)
KINDS = {
    "attributes": lambda n: Attributes(x=torch.ones(n, 3)),
    "defaultdict": lambda n: defaultdict(list, x=torch.ones(n, 3)),
    "ordered": lambda n: OrderedDict(x=torch.ones(n, 3)),
    "user": lambda n: UserDict(x=torch.ones(n, 3)),
    "titled": lambda n: Titled("a", x=torch.ones(n, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mappings_of_many_kinds(kind: str) -> None:
    for made, device in (
        (move(KINDS[kind](4), META), META),
        (empty_batch(lambda e: KINDS[kind](len(e)), EXAMPLE), None),
    ):
        assert type(made) is type(KINDS[kind](1))
        assert made["x"].device == (device or torch.device("cpu"))
        assert made["x"].shape == ((4, 3) if device else (0, 3))
        if kind == "defaultdict":
            assert made["other"] == []
        if kind == "titled":
            assert made.title == "a"


def test_a_mapping_that_nothing_can_make_becomes_a_dict() -> None:
    class Fixed(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__(x=torch.ones(2, 3))

        def __copy__(self) -> Any:
            raise TypeError("not this one")

    assert move(Fixed(), META)["x"].device == META
    proxied = move(MappingProxyType({"x": torch.ones(2)}), META)
    assert proxied["x"].device == META


def test_what_moves_itself_is_asked_by_its_type() -> None:
    class Own:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, device: torch.device) -> Own:
            return Own(self.x.to(device))

    class Loud:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    assert move(Own(torch.ones(1)), META).x.device == META
    loud = Loud()
    assert move([loud], META)[0] is loud


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0


class Odd:
    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples


VOCABULARY = {"a": 1}.keys()


@pytest.mark.parametrize(
    "value",
    [{1, 2}, frozenset({1}), 1 + 2j, torch.float32, torch.device("cpu"), VOCABULARY, range(3), len, "x", None, 0.5],
    ids=repr,
)
def test_what_does_not_depend_on_the_examples_passes_an_empty_shard(value: Any) -> None:
    batch = empty_batch(lambda examples: {"x": torch.ones(len(examples), 3), "value": value}, EXAMPLE)
    assert batch["x"].shape == (0, 3)
    assert batch["value"] == value


@pytest.mark.parametrize("make", [object, Settings])
def test_so_does_an_object_that_is_made_anew_each_time(make: Any) -> None:
    batch = empty_batch(lambda examples: (torch.ones(len(examples), 3), make()), EXAMPLE)
    assert batch[0].shape == (0, 3)
    assert type(batch[1]) is make


@pytest.mark.parametrize("make", [Odd, lambda examples: {id(e) + i for i, e in enumerate(examples)}])
def test_what_depends_on_them_is_named(make: Any) -> None:
    with pytest.raises(EmptyShardError, match=r"a zero-length (Odd|set), .* that collate_fn returns, cannot be made"):
        empty_batch(make, EXAMPLE)


def test_the_order_of_a_loader_is_keyed_by_the_seed() -> None:
    given = LoaderArguments(name="a", global_batch=2, shuffle=True, options={"generator": torch.Generator()})
    with pytest.raises(
        SettingError, match=r"run\.loader\(generator=.*keyed by the seed.*paceline\.start\(seed=.*sampler"
    ):
        make_source([1, 2], given, seed=0, plan=partial(one_shard, 1, 0))
