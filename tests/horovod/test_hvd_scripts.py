"""Whole scripts: those of examples/migrate, and Horovod's own examples with one line changed (two in
pytorch_mnist.py, which also imports `horovod` for horovod.run).

Horovod's are read from a checkout of its repository, which the variable HOROVOD_CHECKOUT names: they are not ours to
keep. They import torchvision; here that is a stand-in with scikit-learn's digits and a small network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.horovod.hvd_jobs import DRIVEN
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("HOROVOD_CHECKOUT", "")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="set HOROVOD_CHECKOUT to a checkout of github.com/horovod/horovod, whose examples it runs"
)


@pytest.mark.conformance
@pytest.mark.timeout(1200)
def test_both_sides_of_the_migration_give_one_model_on_one_process_and_on_two(tmp_path: Path) -> None:
    found = {size: run_ranks(size, "tests.horovod.hvd_jobs:migrated", str(tmp_path), deadline=250) for size in (1, 2)}
    expected = found[1][0]["after"]["weights"]
    for size, ranks in found.items():
        for rank in ranks:
            for side in ("before", "after"):
                for own, other in zip(rank[side]["weights"], expected, strict=True):
                    own, other = torch.tensor(own), torch.tensor(other)
                    assert (own - other).norm() <= 1e-12 * other.norm(), f"{side} on {size} processes"
    printed = [found[size][0][side]["printed"] for size in (1, 2) for side in ("before", "after")]
    assert printed[0] == printed[1] == printed[3], "exact accuracies; Horovod's on 2 counts the padding"


STAND_IN = {
    "__init__.py": "",
    "transforms.py": """
        class Compose:
            def __init__(self, *arguments, **options): pass
        ToTensor = Normalize = RandomResizedCrop = RandomHorizontalFlip = Resize = CenterCrop = Compose
    """,
    "datasets.py": """
        import torch
        from sklearn.datasets import load_digits
        from torch.nn import functional as F

        class MNIST(torch.utils.data.Dataset):
            def __init__(self, root, train=True, download=False, transform=None, size=28):
                source = load_digits()
                part = slice(0, 384) if train else slice(1280, 1408)
                images = torch.tensor(source.images[part]).unsqueeze(1).to(torch.get_default_dtype()) / 16
                self.images, self.labels = F.interpolate(images, size=size), torch.tensor(source.target[part])
            def __len__(self): return len(self.labels)
            def __getitem__(self, index): return self.images[index], int(self.labels[index])

        class ImageFolder(MNIST):
            def __init__(self, root, transform=None):
                super().__init__(root, train="train" in root, size=16)
                self.images = self.images[:128].expand(-1, 3, -1, -1).contiguous()
                self.labels = self.labels[:128]
    """,
    "models.py": """
        from torch import nn

        class Block(nn.Module):
            def __init__(self, inputs, outputs):
                super().__init__()
                self.one, self.two = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
                self.norm, self.short = nn.GroupNorm(2, outputs), nn.Conv2d(inputs, outputs, 1, 2)
            def forward(self, x):
                return (self.two(self.norm(self.one(x)).relu()) + self.short(x)).relu()

        def resnet50():
            return nn.Sequential(
                nn.Conv2d(3, 4, 7, 4, 3), Block(4, 8), Block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(8, 1000),
            )
    """,
}


class Horovods:
    """Starts Horovod's examples in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "torchvision").mkdir()
        for name, source in STAND_IN.items():
            (folder / "torchvision" / name).write_text(textwrap.dedent(source))

    def script(self, path: str, lines: int = 1) -> Path:
        """The example, with so many lines changed."""
        source = (Path(CHECKOUT) / "examples" / path).read_text()
        source, changed = re.subn(
            r"^import horovod\.torch as hvd$", "import paceline.horovod as hvd", source, flags=re.M
        )
        source, more = re.subn(r"^import horovod$", "import paceline.horovod as horovod", source, flags=re.M)
        assert changed + more == lines
        copy = self.folder / Path(path).name
        copy.write_text(source)
        return copy

    def run(
        self, nproc: int, script: Path, *arguments: str, launcher: tuple[str, ...] = (), **job: Any
    ) -> tuple[list[torch.Tensor], str]:
        """The weights of all ranks, which are the same, and what was printed."""
        out = self.folder / f"weights.{nproc}"
        job |= {"script": str(script), "arguments": arguments, "out": str(out)}
        work = self.folder / f"work{len(list(self.folder.iterdir()))}"
        work.mkdir()
        driver = str(ROOT / "tests" / "horovod" / "hvd_jobs.py")
        command = ["-m", "paceline", "run", "--nproc", str(nproc), *launcher, driver]
        done = subprocess.run(
            [sys.executable, *command],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=500,
            env={
                **os.environ, "PYTHONPATH": str(self.folder), "HOME": str(work), DRIVEN: json.dumps(job),
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = [torch.load(f"{out}.{rank}") for rank in range(nproc)]
        assert all(torch.equal(own, first) for rank in ranks for own, first in zip(rank, ranks[0], strict=True))
        return ranks[0], done.stdout + done.stderr


@pytest.fixture
def horovods(tmp_path: Path) -> Horovods:
    return Horovods(tmp_path)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    apart = sum(float((own - other).square().sum()) for own, other in zip(found, expected, strict=True))
    whole = sum(float(other.square().sum()) for other in expected)
    assert apart <= 1e-24 * whole


@needs_checkout
@pytest.mark.conformance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("path", "lines"), [("pytorch/pytorch_mnist.py", 2), ("elastic/pytorch/pytorch_mnist_elastic.py", 1)]
)
def test_horovods_mnist_gives_one_model(path: str, lines: int, horovods: Horovods) -> None:
    """Their learning rate is multiplied by the number of processes: the one process is given twice the rate."""
    script = horovods.script(path, lines)
    two, printed = horovods.run(2, script, "--epochs", "2", "--batch-size", "32", "--lr", "0.05")
    one, alone = horovods.run(1, script, "--epochs", "2", "--batch-size", "64", "--lr", "0.1")
    same(two, one)
    scores = [re.findall(r"Test set: Average loss: (\S+), Accuracy: (\S+)%", text) for text in (printed, alone)]
    assert scores[0]
    assert scores[0] == scores[1]


@needs_checkout
@pytest.mark.conformance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("elastic", [False, True])
def test_horovods_synthetic_benchmark_makes_plain_sgds_steps(elastic: bool, horovods: Horovods) -> None:
    folder, name = ("elastic/pytorch", "_elastic") if elastic else ("pytorch", "")
    script = horovods.script(f"{folder}/pytorch_synthetic_benchmark{name}.py")
    steps = ["--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"]
    _, printed = horovods.run(2, script, *steps, plain_steps=5)
    assert "Total img/sec on 2 CPU(s)" in printed


@needs_checkout
@pytest.mark.conformance
@pytest.mark.timeout(1200)
def test_horovods_imagenet_gives_one_model(horovods: Horovods) -> None:
    """Two backward passes a step on two processes, and the global batch at once on one."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("tqdm")
    script = horovods.script("pytorch/pytorch_imagenet_resnet50.py")
    common = ["--train-dir", "train", "--val-dir", "val", "--epochs", "2", "--warmup-epochs", "0"]
    two, _ = horovods.run(2, script, *common, "--batch-size", "8", "--batches-per-allreduce", "2")
    one, _ = horovods.run(1, script, *common, "--batch-size", "32", "--base-lr", "0.05")
    same(two, one)


@needs_checkout
@pytest.mark.conformance
@pytest.mark.timeout(1200)
def test_horovods_elastic_example_goes_on_when_a_worker_is_killed(horovods: Horovods) -> None:
    script = horovods.script("elastic/pytorch/pytorch_mnist_elastic.py")
    arguments = ["--epochs", "2", "--batch-size", "32", "--log-interval", "1"]
    _, printed = horovods.run(2, script, *arguments, launcher=("--max-restarts", "1"), die=8)
    assert "restart 1 of 1" in printed
    epochs = [int(epoch) for epoch in re.findall(r"Train Epoch: (\d+)", printed)]
    assert epochs[0] == 1
    assert epochs[-1] == 2
    assert "Test set" in printed
    after = printed.split("restart 1 of 1")[1] if "Train Epoch" in printed.split("restart 1 of 1")[1] else printed
    assert "Train Epoch: 2" in after
