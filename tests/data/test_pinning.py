"""Which tensors of a batch are pinned, and what torch's DataLoader is spared walking through."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.placement import move, pinned


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that are asked to be pinned, on a machine that seems to have an accelerator. As torch does, one that
    is not on the CPU refuses."""
    found: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        found.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    return found


@pytest.fixture
def run() -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", progress="off")
    yield run
    run.close()


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping that has more than its items, as transformers' BatchEncoding."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Graph:
    """An object that pins itself, as PyG's Data."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def pin_memory(self) -> Graph:
        return Graph(self.x.pin_memory())


def test_whatever_a_batch_is_made_of(asked: list[Tensor]) -> None:
    far = torch.ones(1, device="meta")
    batch = {
        "pair": Pair(torch.zeros(1), far),
        "list": [torch.zeros(2), "text", 3, None, b"x", (torch.zeros(3),)],
        "mapping": OrderedDict(a=torch.zeros(4)),
        "encoding": Encoding({"ids": torch.zeros(5)}, encodings="kept"),
        "graph": Graph(torch.zeros(6)),
        "far graph": Graph(far),
    }
    made = pinned(batch)
    assert [tensor.numel() for tensor in asked] == [1, 2, 3, 4, 5, 6]
    assert made["pair"].y is far
    assert made["far graph"] is batch["far graph"]
    assert isinstance(made["pair"], Pair)
    assert isinstance(made["mapping"], OrderedDict)
    assert made["list"][1:5] == ["text", 3, None, b"x"]
    assert isinstance(made["list"][5], tuple)
    assert (made["encoding"].encodings, list(made["encoding"])) == ("kept", ["ids"])
    assert made["encoding"]["ids"] is not batch["encoding"]["ids"], "the batch itself is left as it was"


def test_an_error_of_the_objects_own_pinning_is_the_users() -> None:
    class Broken:
        def pin_memory(self) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pinned([Broken()])


@pytest.mark.parametrize("chosen", [True, False])
def test_a_prepared_dataloader_keeps_its_choice_about_pinning(
    run: paceline.Run, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    monkeypatch.setattr(run, "device", torch.device("cuda", 0))  # where run.loader pins by default
    loader = run.prepare(DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, pin_memory=chosen))
    assert loader._source.options["pin_memory"] is chosen


# --- moving


class Modern:
    def to(self, device: Any, *, non_blocking: bool = False) -> Any:
        return device.type, non_blocking


class Passing:
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return args[0].type, kwargs.get("non_blocking", False)


class Old:
    def to(self, device: Any) -> Any:
        return device.type, False


@pytest.mark.parametrize(("kind", "waits"), [(Modern, False), (Passing, False), (Old, True)])
def test_objects_that_can_are_moved_without_waiting(kind: type, waits: bool) -> None:
    assert move(kind(), torch.device("cuda", 0)) == ("cuda", not waits)


@pytest.mark.parametrize("kind", [Modern, Passing, Old])
def test_a_copy_to_the_host_waits(kind: type) -> None:
    """Else the host would read memory that the copy has not reached."""
    assert move(kind(), torch.device("cpu")) == ("cpu", False)
