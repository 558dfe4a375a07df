"""Both sides of examples/migrate end with the same weights: the other tool's script, really run, and Paceline's.

Both run unshuffled and in float64, one epoch of 25 steps. The other side runs on two processes under its own launcher
(conformance: its libraries are the extra `foreign`; TensorFlow in an environment that PACELINE_TENSORFLOW names), and
Paceline's on one process and on two.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.data.foreign_names import of_run

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migrate"
BOUND = 1e-12  # of the norm of the weights, in float64
NEEDS = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning", "hf_trainer": "transformers"}
STRATEGY = {"data_parallel": "data_parallel", "tf_distribute": "mirrored"}  # several devices in one process
IN_ORDER = (  # the two tools shuffle in other orders
    ("shuffle=True", "shuffle=False"),
    ('train_sampling_strategy="random"', 'train_sampling_strategy="sequential"'),
    (".shuffle(1500)", ""),
    ('if device.type == "cuda":  # SyncBatchNorm', "if True:  # SyncBatchNorm"),
)
OWN_SAMPLER = "sampler=torch.utils.data.DistributedSampler(train_set, 2, trainer.global_rank, shuffle=False))"
LIGHTNING = (  # on several devices its Trainer shuffles also with shuffle=False, but leaves a DistributedSampler alone
    ("    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)\n", ""),
    ("train_loader, test_loader)", f"DataLoader(train_set, batch_size=args.batch, {OWN_SAMPLER}, test_loader)"),
)


def copied(folder: Path) -> Path:
    """The scripts, in order, in a folder of their own."""
    for path in SCRIPTS.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        for old, new in (*(LIGHTNING if path.stem == "lightning_before" else ()), *IN_ORDER):
            source = source.replace(old, new)
        name = path.stem.removesuffix("_after")
        if name in STRATEGY:
            with_strategy = f'seed=0, strategy=paceline.strategy("{STRATEGY[name]}", devices="cpu,cpu")'
            source = source.replace("seed=0", with_strategy)
        (folder / path.name).write_text(source, encoding="utf-8")
    return folder


def started(*command: str | Path, python: str = sys.executable) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, *map(str, command)], capture_output=True, text=True, env=environ, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    return done.stdout


def theirs(tool: str, folder: Path, *arguments: str, processes: int = 2) -> tuple[str, list[list[int]]]:
    """What the other tool's script printed, and for each process the examples of each step."""
    script = folder / f"{tool}_before.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = [] if processes == 1 else launcher
    out = ["--epochs", "1", "--out", str(folder / f"{tool}.theirs")]
    printed = started(*launcher, Path(__file__).parent / "theirs.py", folder, script, *out, *arguments)
    return printed, [json.loads((folder / f"counts.{rank}.json").read_text()) for rank in range(processes)]


def distance(one: dict[str, Tensor], other: dict[str, Tensor], without: str = "nothing") -> float:
    """The 2-norm of the difference over that of all weights and buffers."""
    assert one.keys() == other.keys()
    names = [name for name in one if one[name].is_floating_point() and without not in name]
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in names)
    return math.sqrt(apart / sum(float(one[name].double().square().sum()) for name in names))


def scores(printed: str) -> list[str]:
    return re.findall(r"test accuracy (\S+)", printed)


def need(tool: str) -> None:
    if tool in NEEDS and importlib.util.find_spec(NEEDS[tool]) is None:
        pytest.skip(f"{NEEDS[tool]} is not installed: pip install 'paceline[foreign]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("migrate"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[int, dict[str, str]]:
    """What Paceline's scripts printed, by the number of processes."""
    found: dict[int, dict[str, str]] = {}
    for size in (1, 2):
        names = ["ddp", "accelerate", "fabric", "lightning"]
        names += ["hf_trainer"] if importlib.util.find_spec("transformers") else []
        names += list(STRATEGY) if size == 1 else []
        scripts = [f"{name}_after" for name in names]
        found[size] = run_ranks(size, "tests.migrate.ours:run", str(folder), *scripts, deadline=200)[0]
    return found


def weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        return load_file(path / "model.safetensors")
    try:
        return load_file(path)
    except Exception:
        found: Any = torch.load(path, weights_only=True)
        return dict(found.get("model", found))


@pytest.mark.conformance
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tool",
    [
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("data_parallel", marks=pytest.mark.full),
        "accelerate",
        pytest.param("fabric", marks=pytest.mark.full),
        pytest.param("lightning", marks=pytest.mark.full),
        "hf_trainer",
    ],
)
def test_both_sides_give_the_same_weights(tool: str, folder: Path, ours: dict[int, dict[str, str]]) -> None:
    need(tool)
    alone = tool == "data_parallel"  # a process with both devices; nn.DataParallel of a CPU is the model itself
    devices = ["--devices", "2"] if tool in ("fabric", "lightning") else []
    printed, counts = theirs(tool, folder, *devices, processes=1 if alone else 2)
    assert counts == ([[60] * 25] if alone else [[30] * 25] * 2)
    reference = weights(folder / f"{tool}.theirs")
    key_biases = "self.key.bias"  # their gradient is zero but for rounding, which AdamW makes whole steps of
    for size in (1,) if alone else (1, 2):
        own = weights(folder / f"{tool}_after.{size}.out")
        assert distance(own, reference, without=key_biases) <= BOUND
        if tool != "lightning":  # there it is a mean of means: 297 examples on two processes
            assert scores(ours[size][f"{tool}_after"]) == scores(printed)[-1:]


@pytest.mark.conformance
@pytest.mark.timeout(300)
def test_tensorflow_gives_the_same_weights(folder: Path, ours: dict[int, dict[str, str]]) -> None:
    python = os.environ.get("PACELINE_TENSORFLOW")
    if python is None:
        pytest.skip("PACELINE_TENSORFLOW names no python with tensorflow")
    script, out = folder / "tf_distribute_before.py", folder / "tf.npz"
    double = f"import sys, runpy, keras; keras.config.set_floatx('float64'); sys.path.insert(0, {str(folder)!r}); "
    double += f"sys.argv = ['x', '--epochs', '1', '--out', {str(out)!r}]; "
    double += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    printed = started("-c", double, python=python)
    arrays = np.load(out)
    own = weights(folder / "tf_distribute_after.1.out")
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    reference = {name: torch.from_numpy(arrays[key].T) for name, key in zip(names, arrays.files, strict=True)}
    assert distance(own, reference) <= BOUND
    assert scores(ours[1]["tf_distribute_after"]) == scores(printed)


@pytest.mark.conformance
@pytest.mark.timeout(300)
def test_the_trainers_loss_is_too_large_without_the_line(tmp_path: Path) -> None:
    need("hf_trainer")
    script = copied(tmp_path) / "hf_trainer_before.py"
    kept = [line for line in script.read_text().splitlines(True) if "accepts_loss_kwargs" not in line]
    script.write_text("".join(kept))
    printed, _ = theirs("hf_trainer", tmp_path)
    (loss,) = re.findall(r"'eval_loss': '?([\d.]+)", printed)
    assert 4.4 < float(loss) < 4.8  # ln 10 = 2.3, times the number of processes


@pytest.mark.conformance
def test_a_lightning_module_trains_by_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("lightning")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # lightning sets it when it is imported, and leaves it
    monkeypatch.syspath_prepend(str(copied(tmp_path)))
    job, before = (importlib.import_module(name) for name in ("job", "lightning_before"))
    mirrored = paceline.strategy("mirrored", devices="cpu,cpu")
    with contextlib.closing(paceline.start(progress="off", device="cpu", strategy=mirrored)) as run:
        module = before.Digits(epochs=1)
        (optimizer,), _ = module.configure_optimizers()
        run.prepare(module, optimizer)
        train_set, _ = job.digits()
        for batch in run.loader(train_set, global_batch=60):
            run.forward_backward(lambda model, batch: model.training_step(batch), module, batch)
            run.step(optimizer)
    plain = job.network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, y in DataLoader(train_set, batch_size=60):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert distance(module.net.state_dict(), plain.state_dict()) <= 1e-4  # float32


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Tool -> the examples of each optimizer step, over both processes."""
    folder = tmp_path_factory.mktemp("steps")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started(*launcher, Path(__file__).parent / "steps.py", folder)
    ranks = [json.loads((folder / f"steps.{rank}.json").read_text()) for rank in (0, 1)]
    ranks[1]["data_parallel"] = [0] * len(ranks[0]["data_parallel"])  # a process by itself
    for rank, own in enumerate(run_ranks(2, "tests.migrate.steps:ours")):
        ranks[rank] |= own
    return {tool: [sum(both) for both in zip(*(rank[tool] for rank in ranks), strict=True)] for tool in ranks[0]}


@pytest.mark.conformance
@pytest.mark.timeout(300)
def test_the_page_says_what_a_step_really_saw(counted: dict[str, list[int]]) -> None:
    page = (ROOT / "docs" / "migrate" / "batch.md").read_text(encoding="utf-8")
    row = r"^\| [^|]*\| `([^`]+)` \| (\d+) steps of (\d+)(?:, the last of (\d+))? \| (\d+) of 130 \|$"
    rows = re.findall(row, page, re.M)
    assert {found[0] for found in rows} == counted.keys()
    for tool, number, size, last, examples in rows:
        steps = counted[tool]
        assert steps == [int(size)] * (int(number) - 1) + [int(last or size)], tool
        assert sum(steps) == int(examples), tool


PAIRS = ["ddp", "data_parallel", "accelerate", "fabric", "lightning", "hf_trainer", "tf_distribute"]
SHOWN = re.compile(r"<!-- not run: a part of examples/migrate/(\w+\.py)[^\n]* -->\n```python\n(.*?)\n```", re.S)


def test_what_the_pages_show_stands_in_the_scripts() -> None:
    shown: set[str] = set()
    for page in (ROOT / "docs" / "migrate").glob("*.md"):
        for script, code in SHOWN.findall(page.read_text(encoding="utf-8")):
            source = (SCRIPTS / script).read_text(encoding="utf-8")
            assert code in source or textwrap.indent(code, "    ") in re.sub(r"^ +$", "", source, flags=re.M), script
            shown.add(script)
    assert shown == {f"{tool}_{side}.py" for tool in PAIRS for side in ("before", "after")}


def test_the_table_of_names_agrees_with_what_an_unknown_name_says() -> None:
    page = (ROOT / "docs" / "migrate" / "names.md").read_text(encoding="utf-8")
    checked = 0
    for row in re.findall(r"^\| (?!what|---).+ \|$", page, re.M):
        *theirs, own = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"(?:hvd\.|fabric\.)?(\w+)", " ".join(re.findall(r"`([^`]+)`", " ".join(theirs)))):
            told = of_run(name)
            if " Use run." in told and own.startswith("`run."):
                assert any(call in told for call in re.findall(r"run\.\w+", own)), f"{name}: {told}"
                checked += 1
    assert checked >= 10
