"""Does a file belong to the script, a library or Paceline? Also with doctor installed among the libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.observe.script_stack import Owner, ScriptStack, module_files

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
SCRIPT, LIBRARY, BENEATH = Owner.SCRIPT, Owner.LIBRARY, Owner.BENEATH


@pytest.mark.parametrize(
    ("script", "file", "owner"),
    [
        ("p/train.py", "p/train.py", SCRIPT),
        ("p/train.py", "p/data/loader.py", SCRIPT),
        ("p/train.py", "q/lib/model.py", LIBRARY),  # pip install -e
        ("p/train.py", "p.py", LIBRARY),
        ("p/train.py", "p/.venv/lib/python3.11/site-packages/accelerate/data_loader.py", LIBRARY),
        ("p/train.py", "p/env/lib/python3/dist-packages/accelerate/data_loader.py", LIBRARY),
        ("p/train.py", "p/vendored/accelerate/data_loader.py", LIBRARY),  # pip install --target vendored
        ("v/site-packages/pkg/train.py", "v/site-packages/pkg/train.py", SCRIPT),
        ("v/site-packages/pkg/train.py", "v/site-packages/pkg/data/loader.py", SCRIPT),
        ("v/site-packages/pkg/train.py", "v/site-packages/accelerate/data_loader.py", LIBRARY),
        ("v/site-packages/train.py", "v/site-packages/train.py", SCRIPT),
        ("v/site-packages/train.py", "v/site-packages/accelerate/data_loader.py", LIBRARY),
        ("p/train.py", "p/archive.zip/lib/model.py", SCRIPT),
        ("p/train.py", "q/archive.zip/lib/model.py", LIBRARY),
    ],
)
def test_of_files(script: str, file: str, owner: Owner, tmp_path: Path) -> None:
    (tmp_path / "p" / "vendored" / "accelerate-1.0.dist-info").mkdir(parents=True)
    for path in (tmp_path / script, tmp_path / file):
        if "zip" not in file:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    assert ScriptStack([str(tmp_path / script)]).owner_of(str(tmp_path / file)) is owner


def test_what_lies_beneath() -> None:
    owner = ScriptStack(["/"])  # all that is not installed would be the script's
    files = (os.__file__, json.__file__, torch.__file__, "<frozen runpy>", "<string>")
    assert {owner.owner_of(file) for file in files} == {BENEATH}
    assert owner.owner_of(paceline.__file__) is Owner.PACELINE


def test_without_roots_all_is_the_scripts_that_is_not_installed() -> None:
    """Where the script lies is not known in a trial of `paceline verify`."""
    owner = ScriptStack()
    assert owner.owner_of("/nowhere/train.py") is SCRIPT
    assert owner.owner_of("/nowhere/site-packages/accelerate/data_loader.py") is LIBRARY
    assert owner.owner_of(paceline.__file__) is Owner.PACELINE
    assert owner.owner_of(torch.__file__) is owner.owner_of(json.__file__) is BENEATH


def test_a_module_that_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m`: its package counts, wherever it is installed, and the working directory."""
    package = tmp_path / "site-packages" / "its_trainer"
    package.mkdir(parents=True)
    for name in ("__init__", "train", "engine"):
        (package / f"{name}.py").touch()
    (tmp_path / "site-packages" / "alone_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    owner = ScriptStack([*module_files("its_trainer.train"), "/nowhere"])
    assert owner.owner_of(str(package / "engine.py")) is SCRIPT
    assert owner.owner_of(str(tmp_path / "site-packages" / "accelerate" / "data_loader.py")) is LIBRARY
    alone = ScriptStack(module_files("alone_here"))
    assert alone.owner_of(str(tmp_path / "site-packages" / "alone_here.py")) is SCRIPT
    assert alone.owner_of(str(package / "engine.py")) is LIBRARY
    assert module_files("nowhere_to_be_found") == []


GATHERED = """import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
test_set = TensorDataset(torch.randn(27, 6), torch.randint(3, (27,)))
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs = 8
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
sampler = DistributedSampler(train_set)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train_set, 8, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for _ in range(size):
        scheduler.step()
with torch.no_grad():
    said, meant = [], []
    for x, y in DataLoader(test_set, 4, sampler=DistributedSampler(test_set, shuffle=False)):
        for mine, kept in ((model(x).argmax(1), said), (y, meant)):
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            kept.extend(parts)
    hits = torch.cat(said) == torch.cat(meant)
    if rank == 0:
        print("accuracy", hits.float().mean().item())
"""


@pytest.mark.conformance
def test_doctor_that_is_installed_judges_as_a_checkout(tmp_path: Path) -> None:
    """Its own frames, in site-packages, are no library's of the script."""
    installed = tmp_path / "site-packages"
    shutil.copytree(SOURCE, installed / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "script.py").write_text(GATHERED)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", "--nproc", "2", "--json", "found.json", "script.py"],
        cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    document = json.loads((tmp_path / "work" / "found.json").read_text())
    lines = GATHERED.splitlines()
    found = {f["cause"]: lines[f["line"] - 1].strip() for f in document["findings"] if f["changes_model"]}
    assert found == {"padded_evaluation": "dist.all_gather(parts, mine)", "scheduler_steps": "scheduler.step()"}
