"""torch's mesh and its groups, made of the run's dimensions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from paceline.comm.mesh import Mesh, forget, group_of
from paceline.errors import SettingError

SIZES = ({"replicate": 1, "tensor": 2}, {"replicate": 2, "shard": 1}, {"shard": 2})


@pytest.mark.ranks(2)
def test_torchs_mesh_has_the_groups_of_the_dimensions() -> None:
    rank = dist.get_rank()
    for sizes in SIZES:
        mesh = Mesh(torch.device("cpu"), rank, sizes)
        whole = mesh.along(*sizes)
        assert whole.mesh_dim_names == tuple(sizes)
        assert whole.mesh.flatten().tolist() == [0, 1]
        for name, size in sizes.items():
            part = mesh.along(name)
            assert (part.size(), part.get_local_rank()) == (size, mesh.coordinate(name))
            assert dist.get_process_group_ranks(part.get_group()) == ([0, 1] if size == 2 else [rank])
            total = group_of(part.get_group()).all_reduce(torch.tensor(rank + 1))
            assert total == (3 if size == 2 else rank + 1)
        assert mesh.along(*sizes) is whole
        if len(sizes) == 1:
            assert whole.get_group() is dist.group.WORLD, "no further group"


@pytest.mark.ranks(2)
def test_no_group_is_split_off_one_that_is_bound_to_a_gpu() -> None:
    """torch would hand NCCL's options to gloo's half. There is no GPU here: the world's group says that it is bound."""

    def split_group(*args: Any, **options: Any) -> None:
        raise AssertionError("split_group was called")

    forget()
    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_mesh, "split_group", split_group)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(distributed_c10d, "_get_split_source", lambda pg: None)  # of NCCL, which is not here
        world.bound_device_id = torch.device("cuda", 0)
        try:
            mesh = Mesh(torch.device("cpu"), dist.get_rank(), {"replicate": 1, "tensor": 2})
            assert mesh.along("replicate", "tensor").shape == (1, 2)
        finally:
            world.bound_device_id = None
    forget()


@pytest.mark.parametrize(
    ("device", "backend", "sizes", "refused"),
    [
        ("cuda:0", "cpu:gloo,cuda:gloo", {"replicate": 1, "shard": 2}, True),
        ("cuda:0", "cpu:gloo,cuda:gloo", {"replicate": 1, "tensor": 2}, True),
        ("cuda:0", "cpu:gloo,cuda:gloo", {"replicate": 2}, False),
        ("cuda:0", "cpu:gloo,cuda:nccl", {"shard": 2}, False),
        ("cpu", "cpu:gloo,cuda:gloo", {"shard": 2}, False),
    ],
)
def test_sharded_tensors_on_a_gpu_that_ranks_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, sizes: dict[str, int], refused: bool
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(Mesh, "_over", lambda self, names: None)
    with pytest.raises(SettingError, match=r"share a GPU \(cuda:0\)") if refused else nullcontext():
        Mesh(torch.device(device), 0, sizes)
