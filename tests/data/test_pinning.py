"""Which tensors of a batch are pinned, and what torch's DataLoader is spared walking through."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.data.batch_plan import Request
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


class Elsewhere(Dataset[tuple[Tensor, Tensor]]):
    """Images on the CPU, labels on another device."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(2), torch.ones(3, device="meta")


def stay(batch: Any, device: torch.device) -> Any:
    return batch


def test_a_data_set_on_the_device_is_read_with_pinning(
    run: paceline.Run, asked: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.loader.move", stay)  # a meta tensor cannot come to the CPU
    found = list(run.loader(Elsewhere(), global_batch=3, pin_memory=True))
    assert [(images.shape, labels.device.type) for images, labels in found] == [((3, 2), "meta")] * 2
    assert [tensor.shape for tensor in asked] == [(3, 2)] * 2


def test_the_request_is_not_walked_into(
    run: paceline.Run, asked: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's collating and pinning make each tuple that they walk through anew, and turn plain ones into lists."""
    loader = run.loader(TensorDataset(torch.arange(6.0)), global_batch=3, pin_memory=True)
    made: list[Request] = []
    plan = type(loader._source.plan())
    requests = plan._requests

    def noted(*args: Any, **kwargs: Any) -> Iterator[Request]:
        for request in requests(*args, **kwargs):
            made.append(request)
            yield request

    monkeypatch.setattr(plan, "_requests", noted)
    seen = [loader.current for _ in loader]
    assert [id(request) for request in seen] == [id(request) for request in made]
    assert len(asked) == 2


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
