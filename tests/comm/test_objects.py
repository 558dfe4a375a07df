"""Python values as messages: what comes is what was sent, and bytes from elsewhere run nothing."""

from __future__ import annotations

import argparse
import datetime
import decimal
import json
import pathlib
import pickle
import random
import struct
import types
import uuid
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import run_ranks

from paceline.comm import objects
from paceline.comm.mesh import world_group
from paceline.errors import UsageError, WorldError


class Point(NamedTuple):
    x: int


def values() -> list[Any]:
    """One of each kind that a run exchanges, small and large."""
    generator = torch.Generator().manual_seed(3)
    return [
        None,
        {"loss": 0.1, "ok": True, "steps": 2**70, "bad": float("inf"), (1, "two"): [1, (2, 3)], 5: {1, 2}},
        [pathlib.Path("runs") / "ä", datetime.datetime(2024, 2, 29, 12, 30, 1, 5), b"\x00\xff", 1 - 2j],
        OrderedDict(a=torch.float16, b=torch.device("cpu"), c=torch.Size([2, 3])),
        np.random.RandomState(4).get_state(),
        random.Random(4).getstate(),
        {"weights": torch.randn(300, 70, generator=generator), "empty": torch.zeros(0, 3), "one": torch.tensor(2.0)},
        {"bf16": torch.arange(5).bfloat16(), "bool": torch.tensor([True, False]), "complex": torch.ones(2) * 1j},
        torch.randn(4, 6, generator=generator).t(),
        "x" * 100_000,
        argparse.Namespace(lr=0.1, layers=[argparse.Namespace(width=3)]),
        [types.SimpleNamespace(a=(1, 2)), datetime.timedelta(-1, 2, 3), range(3, 9, 2)],
        [uuid.UUID(int=5), decimal.Decimal("-1.20"), bytes(range(256)) * 8],
        {"scores": [0.1, -0.0, float("inf")] * 500, "labels": [-(2**63), 2**63 - 1] * 500, "wide": [2**63] * 1000},
        {"mixed": [1, 2.0] * 500, "flags": [True, False] * 500, "none": [None] * 1000},
        [{"box": [1.5, 2.5], "label": "cat"}] * 500,
    ]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return type(one) is type(two) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (argparse.Namespace, types.SimpleNamespace)):
        return type(one) is type(two) and same(vars(one), vars(two))
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(type(one) is type(two) and one == two)


@pytest.mark.parametrize("number", range(len(values())))
def test_a_message_brings_back_what_was_sent(number: int) -> None:
    value = values()[number]
    assert same(objects.from_bytes(memoryview(objects.to_bytes(value, "a value")), 0), value)


def test_tensors_of_a_message_have_memory_of_their_own() -> None:
    received = objects.from_bytes(memoryview(objects.to_bytes({"a": torch.zeros(3)}, "a value")), 0)
    received["a"].add_(1)  # bytes objects cannot be written to
    assert received["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [Point(1), object(), lambda: 0, torch.nn.Linear(1, 1)])
def test_what_has_no_plain_form_is_refused_by_place_with_a_remedy(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^run\.gather\(values\) at scores\[1\]: .* cannot be sent\. Use|It has a"):
        objects.to_bytes({"scores": [0, value]}, "run.gather(values)")


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


def test_pickles_and_documents_that_name_code_run_nothing(tmp_path: pathlib.Path) -> None:
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(Bomb(touched)))
    assert touched.exists()  # so the bomb works
    touched.unlink()
    documents = [
        {"$": "pickle", "base64": "gASV"},
        {"$": "torch.dtype", "name": "load"},
        {"$": "defaultdict", "default": "eval", "items": []},
        {"$": "numpy.scalar", "dtype": "O", "hex": "00" * 8},
        {"$": "tensor", "name": "x", "dtype": "load", "shape": [1]},
    ]
    messages = [pickle.dumps(Bomb(touched)), b"", b"\xff" * 9]
    for document in documents:
        head = json.dumps({"document": document, "tensors": [["x", "uint8", [1]]]}).encode()
        messages.append(struct.pack("<Q", len(head)) + head + b"\0")
    for message in messages:
        with pytest.raises(WorldError, match="data from rank 1 is not a Paceline message"):
            objects.from_bytes(memoryview(message), 1)
    assert not touched.exists()


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_message_with_changed_bytes_is_a_value_or_an_error(draws: random.Random, count: int) -> None:
    message = bytearray(objects.to_bytes({"a": [1, 2.5, "x"], "t": torch.ones(2, 3), 7: (None, b"y")}, "a value"))
    for _ in range(count):
        message[draws.randrange(len(message))] = draws.randrange(256)
    try:
        objects.from_bytes(memoryview(bytes(message)), 0)
    except WorldError as error:
        assert "is not a Paceline message" in str(error)


def on_ranks() -> int:
    """Every value from every rank, and from each one in turn."""
    rank, size = world_group().rank, world_group().size
    for value in values():
        for other, received in enumerate(world_group().gather((rank, value))):
            assert same(received, (other, value))
        for source in range(size):
            assert same(world_group().broadcast(value if rank == source else object(), source), value)
    lengths = [0, 400, 450, 504, 505, 100_000]  # around what goes in the first piece; another on each rank
    for length in lengths:
        received = world_group().gather("y" * (length * (rank + 1)))
        assert received == ["y" * (length * (other + 1)) for other in range(size)]
    return rank


@pytest.mark.parametrize("size", [2, 3])
def test_objects_come_as_they_were_sent_on_real_ranks(size: int) -> None:
    assert run_ranks(size, "tests.comm.test_objects:on_ranks", deadline=60) == list(range(size))


def count_collectives() -> list[int]:
    """How many collectives a small object costs, a large one, and torch's own way."""
    import torch.distributed as dist

    calls = [0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return function(*arguments, **named)

        return call

    dist.all_gather, dist.broadcast = counted(dist.all_gather), counted(dist.broadcast)
    found = []
    for value in ({"loss": 0.1}, "x" * 5000):
        calls[0] = 0
        world_group().gather(value)
        world_group().broadcast(value)
        found.append(calls[0])
    return found


def test_a_small_object_costs_one_collective_and_a_large_one_two() -> None:
    assert run_ranks(2, "tests.comm.test_objects:count_collectives") == [[2, 4], [2, 4]]


def refused() -> list[str]:
    """What this rank is told of a value that rank 0 alone cannot send, by each way."""
    bad, told = Point(1) if world_group().rank == 0 else None, []
    for send in (world_group().gather, world_group().broadcast):
        try:
            send(bad, what="run.broadcast(value)")
        except UsageError as error:
            told.append(str(error))
    return [*told, *map(str, world_group().gather(1))]


def test_all_ranks_are_told_which_value_of_one_cannot_be_sent() -> None:
    for *told, _, _ in run_ranks(2, "tests.comm.test_objects:refused"):
        assert len(told) == 2
        for text in told:
            assert text.startswith("run.broadcast(value): a namedtuple"), text
            assert "Use tuple(value) or value._asdict()" in text
    assert "from rank 0" in text


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(UserDict(a=1), r"Use dict\(value\)"), (np.array([None]), "of dtype object"), (np.zeros(1, "i4,f4"), "tolist")],
)
def test_the_remedy_fits_the_type(value: Any, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        objects.to_bytes(value, "a value")
