"""The large-batch recipe, and MobileNetV2 from the weights of another head, on 1 and on 2 processes; verify's word on
the contrastive pair and the GAN; and that the contrastive pair without its gather is another model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.examples import data, jobs
from tests.examples.test_examples import BOUND, distance
from tests.ranks import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
FEW = ["--global-batch", "15", "--epochs", "1", "--width"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny CIFAR-10, and what tests.examples.jobs:image_jobs left on 1 and on 2 processes."""
    found = tmp_path_factory.mktemp("image_jobs")
    data.cifar10(found / "cifar.tar.gz", train=40, test=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jobs.FOLDER, str(found))
        for size in (1, 2):
            run_ranks(size, "tests.examples.jobs:image_jobs", deadline=300)
    return found


@pytest.mark.parametrize("name", ["resnet scaled", "resnet", "mobilenet"])
def test_one_and_two_processes_give_one_model(folder: Path, name: str) -> None:
    one, two = (load_file(folder / f"{name}.{size}.safetensors") for size in (1, 2))
    assert distance(one, two) <= BOUND


def test_the_scaled_rate_is_another_model(folder: Path) -> None:
    one, other = (load_file(folder / f"{name}.1.safetensors") for name in ("resnet scaled", "resnet"))
    assert distance(one, other) > 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_the_skipped_names_are_printed_once(folder: Path, size: int) -> None:
    printed = (folder / f"mobilenet.{size}.txt").read_text()
    assert printed.count("skipped: ") == 2
    assert "skipped: 25.weight: (1000, 1280) in the file, (10, 1280) here" in printed


def verified(script: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "2", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("example", "width"), [("contrastive", "4"), pytest.param("gan", "8", marks=pytest.mark.full)])
def test_verify_finds_one_model(folder: Path, example: str, width: str) -> None:
    code, said = verified(jobs.EXAMPLES / f"{example}.py", "--data", str(folder / "cifar.tar.gz"), *FEW, width)
    assert code == 0, said


@pytest.mark.full
def test_without_the_gather_it_is_another_model_and_verify_says_why(folder: Path, tmp_path: Path) -> None:
    source = (jobs.EXAMPLES / "contrastive.py").read_text()
    assert source.count("run.gather(projections)") == 1
    script = tmp_path / "contrastive.py"
    script.write_text(source.replace("run.gather(projections)", "projections"))
    (tmp_path / "cifar10_data.py").write_text((jobs.EXAMPLES / "cifar10_data.py").read_text())
    code, said = verified(script, "--data", str(folder / "cifar.tar.gz"), *FEW, "4")
    assert code == 1, said
    assert re.search(r"At \S*contrastive\.py:\d+: alike = ", said), said
    assert "run.gather(features)" in said, said
