"""Who computes on which device, and which backends follow: as tables of cases, for machines that are not here."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import device_choice
from paceline.errors import SettingError
from paceline.world import World


def world(local_rank: int, local_size: int) -> World:
    return World(local_rank, local_size, local_rank, local_size, 0, 1, "torchrun", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("name", "accelerator", "count", "local_rank", "expected"),
    [
        (None, None, 0, 3, "cpu"),
        ("cpu", "cuda", 4, 3, "cpu"),
        (None, "cuda", 4, 3, "cuda:3"),
        ("cuda", "cuda", 4, 3, "cuda:3"),
        ("cuda:1", "cuda", 4, 3, "cuda:1"),
        (None, "cuda", 1, 0, "cuda:0"),
        (None, "cuda", 1, 3, "cuda:0"),  # srun --gpus-per-task=1: each task sees its own GPU as number 0
        ("cuda", "cuda", 1, 3, "cuda:0"),
        ("cuda:0", "cuda", 1, 3, "cuda:0"),
        (None, "xpu", 2, 1, "xpu:1"),
    ],
)
def test_the_device_of_a_process(
    name: str | None, accelerator: str | None, count: int, local_rank: int, expected: str
) -> None:
    assert device_choice.choose(name, accelerator, count, world(local_rank, 4)) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "accelerator", "count", "said"),
    [
        (None, "cuda", 2, r"device cuda:3: local rank 3 \(of 4 on this machine\) sees only 2 devices\."),
        ("cuda:5", "cuda", 4, r"device cuda:5: local rank .* sees only 4 devices\."),
        ("cuda", None, 0, r"device='cuda': this machine has no accelerator\. Use device='cpu'"),
        ("cuda", "xpu", 1, r"device='cuda': this machine has xpu"),
        ("gpu", "cuda", 1, r"device='gpu' is not a device"),
    ],
)
def test_a_device_that_is_not_there(name: str | None, accelerator: str | None, count: int, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        device_choice.choose(name, accelerator, count, world(3, 4))


@pytest.mark.parametrize(
    ("kind", "cards", "expected"),
    [
        ("cpu", [], "gloo"),
        ("cuda", ["a", "b"], "cpu:gloo,cuda:nccl"),
        ("cuda", ["a", "a"], "cpu:gloo,cuda:gloo"),
        ("cuda", ["a", "b", "c", "b"], "cpu:gloo,cuda:gloo"),
        ("cuda", [None, None], "cpu:gloo,cuda:nccl"),  # not known: NCCL will say
        ("cuda", [], "cpu:gloo,cuda:nccl"),
        ("xpu", [], "cpu:gloo,xpu:xccl"),
        ("mps", [], None),
    ],
)
def test_the_backends_of_a_group(kind: str, cards: list[str | None], expected: str | None) -> None:
    assert device_choice.backend(kind, cards) == expected


def test_ranks_that_share_a_gpu_are_named() -> None:
    shared = device_choice.sharing(["a", "b", "a", None, "b", "c", None])
    assert shared == [[0, 2], [1, 4]]
    assert "(ranks 0, 2; ranks 1, 4)" in device_choice.note(shared)


def test_places_follow_from_the_machines_that_joined() -> None:
    """As `start(init_method=..., rank=..., world_size=...)` makes its world: which rank is where, nobody has said."""
    hosts = ["n0", "n0", "n1", "n0", "n1"]
    worlds = [World(rank, 5, rank, 5, 0, 1, "start()") for rank in range(5)]
    found = [device_choice.placed(own, hosts) for own in worlds]
    assert [(w.local_rank, w.local_size, w.node, w.nodes) for w in found] == [
        (0, 3, 0, 2),
        (1, 3, 0, 2),
        (0, 2, 1, 2),
        (2, 3, 0, 2),
        (1, 2, 1, 2),
    ]
    assert device_choice.choose(None, "cuda", 4, found[2]) == torch.device("cuda:0"), "the first of the second machine"
