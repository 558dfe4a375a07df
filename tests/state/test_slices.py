"""Checkpoints in slices: what is in the files, what a save leaves behind where it fails, and what a restore refuses.

That any strategy reads what any other has written, bit for bit, is tested by tests/matrix.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.strategies import checks
from torch import Tensor, nn

from paceline.comm import dtensor, slices
from paceline.comm.mesh import Mesh, world_group
from paceline.errors import CheckpointError
from paceline.state import checkpoint, sharded_save, slice_files
from paceline.torch_private.distributed_tensor import StridedShard

SHARDING = [
    "fsdp:min_params=0",
    "fsdp:stage=1",
    "fsdp:stage=2,offload=true",
    "tensor:plan=0:column,2:row",
    "pipeline:stages=2",
]


class Net(nn.Module):
    """A convolution in another memory order, tied weights, a weight of one row, a number, a weight of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight
        self.one = nn.Linear(4, 1)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.one(self.out(self.into(self.norm(self.conv(x)).mean((2, 3)))))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def inputs(kind: Any) -> Tensor:
    shape = (8, 3, 6, 6) if kind is Net else (8, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


@contextlib.contextmanager
def training(strategy: str, steps: int = 1) -> Iterator[tuple[Any, nn.Module, Callable[[], None]]]:
    """A run, a few steps old, its model, and what makes a step. All steps have the same eight examples."""
    kind = kind_of(strategy)
    with checks.started(strategy=strategy) as run:
        model, optimizer = checks.make(kind, True)
        run.prepare(model, optimizer)
        examples = torch.cat([inputs(kind)] * 8)
        batches = iter(run.loader(torch.utils.data.TensorDataset(examples), global_batch=8))

        def step() -> None:
            run.forward_backward(loss_fn, model, next(batches))
            run.step(optimizer)

        for _ in range(steps):
            step()
        yield run, model, step


def kind_of(strategy: str) -> Any:
    """tensor and pipeline get a chain of layers, since they do not split those of Net."""
    return Net if strategy.startswith("fsdp") else chain


def plain(kind: Any, steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Weights and optimizer state of the same training in plain PyTorch."""
    model, optimizer = checks.make(kind, True)
    for _ in range(steps):
        loss_fn(model, [inputs(kind)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {p: name for name, p in model.named_parameters()}
    return dict(model.state_dict()), {names[p]: state for p, state in optimizer.state.items()}


def files(folder: Path) -> list[str]:
    """What is in a folder, without the file that says who saves there, once all ranks have returned from a save."""
    if dist.is_initialized():
        world_group().gather(0)
    return sorted(path.name for path in folder.iterdir() if path.name != ".in-use.json")


def newest(directory: Path) -> Path:
    return directory / (directory / "latest").read_text().strip()


def sign(folder: Path) -> None:
    """Write the manifest again, as somebody does who wants the files to be taken for whole."""
    document = json.loads((folder / "manifest.json").read_text())
    for name in document["files"]:
        data = (folder / name).read_bytes()
        document["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    document["sha256"] = "0" * 64
    blank = json.dumps(document)
    document["sha256"] = hashlib.sha256(blank.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(document))


def on_rank_0(action: Any) -> None:
    if world_group().rank == 0:
        action()
    world_group().gather(0)  # a barrier


# What is written


@pytest.mark.ranks(2, conformance=4)
@pytest.mark.parametrize("strategy", SHARDING)
def test_the_slices_make_up_the_state_of_plain_pytorch(strategy: str, tmp_path: Path) -> None:
    with training(strategy, steps=3) as (run, _, _):
        folder = run.save(tmp_path)
    assert any(name.startswith("slices-00001.safetensors") for name in files(folder))
    model, optimizer = plain(kind_of(strategy), 3)
    _, parts = checkpoint.read(folder)
    assert parts["model_0"].keys() == model.keys()
    for name, value in model.items():
        torch.testing.assert_close(parts["model_0"][name], value, rtol=1e-9, atol=1e-12)
        if strategy == "fsdp:stage=1":  # the others make sharded weights contiguous
            assert parts["model_0"][name].stride() == value.stride()
    found = parts["optimizer_0"]["state"]
    assert found.keys() == optimizer.keys()
    for name, state in optimizer.items():
        for key, value in state.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, conformance=4)
@pytest.mark.parametrize("strategy", SHARDING)
def test_each_element_is_written_once_and_no_rank_writes_the_whole(strategy: str, tmp_path: Path) -> None:
    with training(strategy) as (run, _, _):
        folder = run.save(tmp_path)
    size = world_group().size
    counts: dict[str, Tensor] = {}
    written = [0] * size
    for rank in range(size):
        index = json.loads((folder / f"slices-{rank:05d}.json").read_text())
        for key, one in index["tensors"].items():
            count = counts.setdefault(key, torch.zeros(one["shape"]))
            for offset, shape in one["blocks"]:
                count[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))] += 1
                written[rank] += torch.Size(shape).numel()
    assert counts
    assert all(bool((count == 1).all()) for count in counts.values())
    assert sum(written[1:]) >= sum(written) * (size - 1) / size / 3  # uneven: small layers, and stages of a pipeline


@pytest.mark.ranks(4)
def test_of_two_replicas_one_writes(tmp_path: Path) -> None:
    with training("fsdp:replicate=2,min_params=0") as (run, _, _):
        folder = run.save(tmp_path)
    assert [(folder / f"slices-{rank:05d}.safetensors").exists() for rank in range(4)] == [True, True, False, False]


@pytest.mark.ranks(4)
def test_boxes_are_where_the_elements_are() -> None:
    """Placements of all kinds, and torch's own full_tensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = Mesh(torch.device("cpu"), dist.get_rank(), {"shard": 2, "tensor": 2})
    along, both = mesh.along("tensor"), mesh.along("shard", "tensor")
    for shape in ((7, 6), (1, 5), (12, 4), (2, 3, 8)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        own = [
            distribute_tensor(whole, along, [Shard(0)]),
            distribute_tensor(whole, along, [Shard(len(shape) - 1)]),
            distribute_tensor(whole, both, [Shard(0), Shard(1)]),
            distribute_tensor(whole, both, [Replicate(), Shard(0)]),
            DTensor.from_local(
                twice(whole),
                both,
                [StridedShard(0, split_factor=2), Shard(0)],
                shape=whole.shape,
                stride=whole.stride(),
            ),
        ]
        if shape[0] % 6 == 0:  # q, k and v
            part = DTensor.from_local(torch.empty(shape[0] // 2, *shape[1:]), along, [StridedShard(0, split_factor=3)])
            own.append(dtensor.sharded_like(part, whole))
        for tensor in own:
            boxes = slices.boxes_of(tensor)
            for box in boxes:
                expected = slices.region(whole, box.offset, box.shape)
                assert torch.equal(slices.region(dtensor.local(tensor), box.start, box.shape), expected)
            assert sum(torch.Size(box.shape).numel() for box in boxes) == dtensor.local(tensor).numel()
    assert len(boxes_of_qkv(along)) == 3


def twice(whole: Tensor) -> Tensor:
    """This rank's rows where `tensor` splits them, and `shard` each part: with fsdp+tensor."""
    shard, tensor = divmod(dist.get_rank(), 2)
    for place in (tensor, shard):
        parts = [*whole.chunk(2), whole[:0]]  # of one row, the second gets none
        whole = parts[place]
    return whole


def boxes_of_qkv(along: Any) -> list[slices.Box]:
    from torch.distributed.tensor import DTensor

    own = DTensor.from_local(torch.empty(6, 2), along, [StridedShard(0, split_factor=3)], shape=(12, 2), stride=(2, 1))
    return slices.boxes_of(own)


@pytest.mark.ranks(2)
def test_a_dtype_that_no_file_holds_is_gathered() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = Mesh(torch.device("cpu"), dist.get_rank(), {"shard": 2})
    whole = torch.randn(4, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    found = slices.held({"x": [distribute_tensor(whole, mesh.along("shard"), [Shard(0)])]}, mesh)["x"][0]
    assert torch.equal(found, whole) if dist.get_rank() == 0 else found.numel() == 0


@pytest.mark.ranks(2)
def test_a_disk_that_not_all_ranks_see(tmp_path: Path) -> None:
    """Rank 0 writes the whole state, says why, and the checkpoint is restored by all."""
    own = tmp_path / f"disk-{dist.get_rank()}"  # the same path on two machines
    with training("fsdp:min_params=0", steps=2) as (run, _, _), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Path, "exists", lambda _: False)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run.save(own)
        told = [str(one.message) for one in found if "not all ranks see the checkpoint directory" in str(one.message)]
        assert len(told) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert not list(newest(own).glob("slices-*"))
    with training("fsdp:min_params=0", steps=0) as (run, model, _):
        assert run.restore(own)  # which rank 1 does not have
        assert run.steps == 2
    torch.testing.assert_close(model.one.weight.full_tensor(), plain(Net, 2)[0]["one.weight"], rtol=1e-9, atol=1e-12)


# In the background


def save_and_wait(run: Any, directory: Path, background: bool) -> None:
    run.save(directory, background=background)
    run.wait_for_save()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp:min_params=0", "fsdp:stage=1", "pipeline"])
def test_a_background_save_has_the_state_of_its_step(strategy: str, tmp_path: Path) -> None:
    with training(strategy, steps=2) as (run, _, step):
        assert run.save(tmp_path, background=True) is None
        step()
        folder = run.wait_for_save()
    assert files(tmp_path) == ["latest", "step-00000002"]
    weights, state = plain(kind_of(strategy), 2)
    _, parts = checkpoint.read(folder)
    for name, value in weights.items():
        torch.testing.assert_close(parts["model_0"][name], value, rtol=1e-9, atol=1e-12)
    for name, values in state.items():
        torch.testing.assert_close(parts["optimizer_0"]["state"][name]["exp_avg"], values["exp_avg"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_fails_the_save_on_all(background: bool, failing: int, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("No space left on device")

    with training("fsdp:min_params=0") as (run, _, step):
        before = run.save(tmp_path)
        step()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == failing:
                patch.setattr(slice_files, "write", full)
            with pytest.raises(CheckpointError, match=f"{'rank 1: ' * failing}.*No space left on device"):
                save_and_wait(run, tmp_path, background)
        assert files(tmp_path) == ["latest", before.name]
        assert run.save(tmp_path).name == "step-00000002"


@pytest.mark.ranks(2)
def test_without_the_slices_of_a_rank_the_thread_gives_up(tmp_path: Path) -> None:
    """A rank's thread that does not end, as on a hung disk, does not hold the others for ever."""
    with training("fsdp:min_params=0") as (run, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_save, "_STILL_SECONDS", 0.3)
        if dist.get_rank() == 1:
            patch.setattr(slice_files, "write", lambda *_: None)  # writes nothing, and says nothing
        with pytest.raises(CheckpointError, match=r"1 of 2 ranks did not write their slices \(slices-00001\.json\)"):
            save_and_wait(run, tmp_path, True)
    assert files(tmp_path) == []


# What is read


def lose(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["slices-00001.safetensors", "slices-00001.json", "slices-00000.safetensors"])
@pytest.mark.parametrize("harm", [lose, cut, flip])
def test_a_harmed_slice_is_named_and_an_older_checkpoint_is_read(harm: Any, name: str, tmp_path: Path) -> None:
    with training("fsdp:min_params=0") as (run, _, step):
        run.save(tmp_path)
        step()
        folder = run.save(tmp_path)
    on_rank_0(lambda: harm(folder / name))
    with training("fsdp:min_params=0", steps=0) as (run, _, _), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert run.restore(tmp_path)
        assert run.steps == 1
        told = [str(one.message) for one in found if "skipped damaged checkpoints" in str(one.message)]
        assert len(told) == (dist.get_rank() == 0)
        assert all(f"{folder / name}: " in text for text in told)
    on_rank_0(lambda: shutil.rmtree(tmp_path / "step-00000001"))
    with training("fsdp:min_params=0", steps=0) as (run, _, _):
        with pytest.raises(CheckpointError, match=rf"no intact checkpoint.*\n.*{re.escape(name)}: "):
            run.restore(tmp_path)


def changed(folder: Path, change: Any) -> None:
    index = folder / "slices-00001.json"
    document = json.loads(index.read_text())
    change(document["tensors"]["model_0/conv.weight"])
    index.write_text(json.dumps(document))
    sign(folder)


def shrunk(folder: Path) -> None:
    """The tensor in the file has another shape than the index says."""
    file = folder / "slices-00001.safetensors"
    tensors = load_file(file)
    key = "0/model_0/conv.weight"
    tensors[key] = tensors[key][:, :1].contiguous()
    save_file(tensors, file)
    sign(folder)


HOSTILE = {
    "a gap": lambda one: one["blocks"].clear(),
    "twice": lambda one: one["blocks"].append(one["blocks"][0]),
    "outside": lambda one: one["blocks"][0].__setitem__(0, [3, 0, 0, 0]),
    "negative": lambda one: one["blocks"][0].__setitem__(0, [-2, 0, 0, 0]),
    "another shape": lambda one: one.__setitem__("shape", [4, 3, 3, 4]),
    "another dtype": lambda one: one.__setitem__("dtype", "float32"),
    "huge": lambda one: one["blocks"].append([[0, 0, 0, 0], [2**62, 2**62, 2**62, 2**62]]),
    "no list": lambda one: one.__setitem__("blocks", "x"),
    "too few dimensions": lambda one: one["blocks"][0].__setitem__(0, [2]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", [*HOSTILE, "another shape in the file"])
def test_slices_that_do_not_fit_are_refused_on_all_ranks(what: str, tmp_path: Path) -> None:
    with training("fsdp:min_params=0") as (run, _, _):
        folder = run.save(tmp_path)
    on_rank_0(lambda: changed(folder, HOSTILE[what]) if what in HOSTILE else shrunk(folder))
    # A shape in a file is compared by the ranks that read it.
    refused = what in HOSTILE or dist.get_rank() == 1
    with training("fsdp:min_params=0", steps=0) as (run, _, _):
        expected = pytest.raises(CheckpointError, match=r"slices") if refused else contextlib.nullcontext()
        with expected:
            run.restore(tmp_path)


# Kills

KILLED = """
import itertools, os, signal, sys
import torch, paceline
from torch.utils.data import TensorDataset
from paceline.state import checkpoint, sharded_save, slice_files

point, rank, background = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
run = paceline.start(device="cpu", progress="off", strategy="fsdp:min_params=0", seed=1)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
run.prepare(model, optimizer)
resumed = run.restore("checkpoints", missing_ok=True)

def dies(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_in(module, name, before):
    real = getattr(module, name)
    def replaced(*args, **kwargs):
        if not before:
            real(*args, **kwargs)
        dies()
    setattr(module, name, replaced)

def killed_while_writing():
    def half(path, tensors, metadata):
        path.write_bytes(b"x" * 100)
        dies()
    slice_files.save_tensors = half

for (x,) in run.loader(TensorDataset(torch.randn(24, 6)), global_batch=4):
    run.backward(model(x).square().mean())
    run.step(optimizer)
    if run.steps == 2 and not resumed and run.rank == rank:
        {"before the slices": lambda: killed_in(slice_files, "write", True),
         "while it writes them": killed_while_writing,
         "after the slices": lambda: killed_in(slice_files, "write", False),
         "before the commit": lambda: killed_in(slice_files, "entries", True),
         "before the rename": lambda: killed_in(checkpoint, "_give_name", True),
         "after the rename": lambda: killed_in(checkpoint, "_give_name", False)}[point]()
    run.save("checkpoints", background=background)
    if background:
        run.wait_for_save()
print("resumed" if resumed else "new", run.steps, sorted(os.listdir("checkpoints")))
"""
OF_RANK_0 = ["before the commit", "before the rename", "after the rename"]
POINTS = [
    *((point, rank) for point in ("before the slices", "while it writes them", "after the slices") for rank in (0, 1)),
    *((point, 0) for point in OF_RANK_0),
]


def _mark(background: bool, point: str) -> pytest.MarkDecorator:
    """The cases in the foreground and one in the background belong to CI."""
    return pytest.mark.full if background and point != "before the commit" else pytest.mark.conformance


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("background", "point", "rank"),
    [
        pytest.param(
            background,
            *point,
            marks=_mark(background, point[0]),
            id=f"{point[0]}, rank {point[1]}{', in the background' * background}",
        )
        for background in (False, True)
        for point in POINTS
    ],
)
def test_a_killed_save_leaves_the_last_committed_one(background: bool, point: str, rank: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    line = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "script.py", point, str(rank), str(background)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=80, check=False)
    assert first.returncode == 128 + signal.SIGKILL, first.stderr
    # In the background rank 0's thread commits what all ranks have written; the launcher waits for it.
    whole = point == "after the rename" or (background and (point, rank) == ("after the slices", 1))
    committed = 2 if whole else 1
    assert checkpoint.find(tmp_path / "checkpoints").step == committed
    second = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=80, check=False)
    assert second.returncode == 0, second.stderr
    steps = ["latest", *(f"step-{step:08d}" for step in range(1, 7))]
    assert f"resumed 6 {steps}" in second.stdout.replace("'.in-use.json', ", "")  # and no scratch directory is left
