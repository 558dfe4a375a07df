"""A fine-tuning with LoRA whose rank is killed in mid-run: started again from its checkpoints, on as many processes or
on others, with the same strategy or another, it ends with the weights of the run that was not broken.

Two jobs (killed_jobs.py): examples/finetune_lora.py, which saves after each epoch and is killed in mid-epoch; and
`paceline.fit` with Hugging Face's data, which saves in mid-epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples import jobs

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
for library in ("datasets", "peft", "tokenizers", "transformers"):
    pytest.importorskip(library, reason=f"{library} is not installed: make conformance installs it")

from tests.examples import huggingface_jobs as its  # noqa: E402

FSDP = "fsdp:min_params=1000"
KILLED = "1:7"  # rank 1, after the third update of the second epoch


class Runs:
    """The runs of a job, by `paceline run`. A run is made when it is first asked for."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job
        self._losses: dict[Path, list[float]] = {}

    def _start(self, size: int, strategy: str, checkpoints: Path, saved: Path, killed: str = "-") -> str:
        script = Path(__file__).with_name("killed_jobs.py")
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(size), "--device", "cpu"]
        command += ["--strategy", strategy] if strategy else []
        given = [self.job, killed, str(self.folder), str(checkpoints), str(saved)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, str(script), *given], capture_output=True, text=True, env=environ, timeout=400)
        if killed == "-":
            assert done.returncode == 0, done.stdout + done.stderr
            found = re.search(r"^losses (.*)$", done.stdout, re.M)
            self._losses[saved] = [float.fromhex(value) for value in found[1].split()] if found else []
        else:
            assert done.returncode == 137, done.stdout + done.stderr
            assert "rank 1 was killed by SIGKILL" in done.stderr
            assert not saved.exists()
        return done.stdout + done.stderr

    def whole(self, size: int, strategy: str) -> Path:
        """Where the weights of a run are that was not broken."""
        saved = self.folder / f"{self.job} {size} {strategy}".strip()
        if not saved.exists():
            self._start(size, strategy, Path(f"{saved} checkpoints"), saved)
        return saved

    def resumed(self, before: tuple[int, str], after: tuple[int, str]) -> Path:
        """Likewise, of a run that was killed on `before` and went on on `after`: (processes, strategy)."""
        left = self.folder / f"{self.job} killed on {before}"
        if not left.exists():
            self._start(*before, left, self.folder / "never saved", KILLED)
        saved = self.folder / f"{self.job} {before} then {after}"
        shutil.copytree(left, f"{saved} checkpoints")
        told = self._start(*after, Path(f"{saved} checkpoints"), saved)
        assert f" after step {4 if self.job == 'example' else 6}" in told
        return saved

    def losses(self, saved: Path) -> list[float]:
        return self._losses[saved]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(jobs.EXAMPLES)
        patch.setenv("HF_HOME", str(made / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        its.make_models(made)
        yield made


@pytest.fixture(scope="module", params=["fit", pytest.param("example", marks=pytest.mark.full)])
def runs(request: pytest.FixtureRequest, folder: Path) -> Runs:
    return Runs(folder, request.param)


def weights(saved: Path) -> dict[str, object]:
    return its.weights(saved, "whole", "model.safetensors")


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.campaign), FSDP])
def test_on_as_many_processes_it_ends_with_the_same_bits(runs: Runs, strategy: str) -> None:
    import torch

    unbroken, resumed = runs.whole(2, strategy), runs.resumed((2, strategy), (2, strategy))
    one, other = weights(unbroken), weights(resumed)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]  # type: ignore[arg-type]
    assert not different
    assert runs.losses(unbroken) == runs.losses(resumed)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, "ddp"), (1, ""), id="ddp on 2, one process", marks=pytest.mark.campaign),
        pytest.param((2, "ddp"), (3, FSDP), id="ddp on 2, fsdp on 3", marks=pytest.mark.full),
        pytest.param((2, FSDP), (1, ""), id="fsdp on 2, one process", marks=pytest.mark.campaign),
    ],
)
def test_elsewhere_it_ends_with_the_same_weights(runs: Runs, before: tuple[int, str], after: tuple[int, str]) -> None:
    unbroken, resumed = runs.whole(1, ""), runs.resumed(before, after)
    assert its.distance(weights(unbroken), weights(resumed)) <= 1e-10  # type: ignore[arg-type]
    assert runs.losses(resumed) == pytest.approx(runs.losses(unbroken), rel=1e-10)


def test_the_adapters_have_trained_and_the_base_has_not(runs: Runs) -> None:
    import torch

    unbroken = weights(runs.whole(1, ""))
    base = its.weights(runs.folder, "bert", "model.safetensors")
    moved = [name for name in unbroken if "lora_B" in name and unbroken[name].abs().max() > 1e-3]  # type: ignore[attr-defined]
    assert moved
    frozen = [name for name in base if "word_embeddings" in name]
    for name in frozen:
        (own,) = [key for key in unbroken if key.endswith(name.removeprefix("bert."))]
        assert torch.equal(unbroken[own], base[name])  # type: ignore[arg-type]
