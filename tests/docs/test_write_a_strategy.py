"""The strategy on docs/strategies/write.md, run on two processes, trains the model of plain PyTorch on one device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.config import parse_strategy
from paceline.errors import SettingError
from paceline.strategies import alone, check, make
from paceline.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "strategies" / "write.md").read_text(encoding="utf-8")
NAME, LOUDLY = "my_package.plain_ddp:PlainDDP", "my_package.plain_ddp:Loud:word=summed,verbose=true"
EXAMPLES, GLOBAL_BATCH, EPOCHS, SAVED = 23, 10, 2, 3  # the last global batch of an epoch has 3 examples

LOUD = """

class Loud(PlainDDP):
    def __init__(self, world, device, *, word: str, verbose: bool = False):
        super().__init__(world, device)
        self.word, self.verbose = word, verbose

    def backward(self, work):
        super().backward(work)
        if self.verbose and work.final:
            print(self.word)
"""  # with options

SCRIPT = f"""
import sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

torch.set_default_dtype(torch.float64)
data = torch.load("data.pt")
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
model.load_state_dict(torch.load("begin.pt"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = paceline.start(progress="off")
run.prepare(model, optimizer)
loader = run.loader(TensorDataset(*data), global_batch={GLOBAL_BATCH}, micro_batch=3)
run.restore("checkpoints", missing_ok=True)
for epoch in run.epochs({EPOCHS}):
    for x, y, weight in loader:
        run.backward((model(x) - y).square().mean())
        run.backward(total=(weight * model(x).abs()).sum(), count=weight.sum())
        if run.step(optimizer) and run.steps == {SAVED} and sys.argv[1:] == ["save"]:
            run.save("checkpoints")
            sys.exit()
if run.main:
    torch.save(model.state_dict(), "end.pt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The script, its data, and the page's strategy."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "plain_ddp.py").write_text(code + LOUD)
    (tmp_path / "train.py").write_text(SCRIPT)
    torch.manual_seed(0)
    x, y = torch.randn(EXAMPLES, 5).double(), torch.randn(EXAMPLES, 1).double()
    torch.save((x, y, torch.randint(4, (EXAMPLES, 1)).double()), tmp_path / "data.pt")
    torch.save(network().state_dict(), tmp_path / "begin.pt")
    return tmp_path


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def paceline(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(folder: Path) -> dict[str, Tensor]:
    """The whole global batch on one device, without Paceline."""
    x, y, weight = torch.load(folder / "data.pt")
    model = network()
    model.load_state_dict(torch.load(folder / "begin.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for rows in torch.arange(EXAMPLES).split(GLOBAL_BATCH):
            out = model(x[rows])
            loss = (out - y[rows]).square().mean() + (weight[rows] * out.abs()).sum() / weight[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


def assert_same(folder: Path) -> None:
    ends, expected = torch.load(folder / "end.pt"), plain(folder)
    for name, value in expected.items():
        torch.testing.assert_close(ends[name], value, rtol=1e-9, atol=1e-12)


def test_two_processes_train_the_model_of_one_device(folder: Path) -> None:
    printed = paceline(folder, "run", "--nproc", "2", "--strategy", LOUDLY, "train.py")
    assert printed.count("summed") == 2 * 6, "two backward calls in each of the 6 steps"
    assert_same(folder)


@pytest.mark.conformance
def test_another_strategy_goes_on_from_its_checkpoint(folder: Path) -> None:
    paceline(folder, "run", "--nproc", "2", "--strategy", NAME, "train.py", "save")
    paceline(folder, "run", "--nproc", "1", "--strategy", "single", "train.py")
    assert_same(folder)


@pytest.mark.conformance
def test_verify_finds_it_the_same(folder: Path) -> None:
    said = paceline(folder, "verify", "--nproc", "2", "--strategy", NAME, "--steps", "3", "train.py")
    assert said.startswith("the same, within rounding"), said


def test_the_page_counts_its_concepts() -> None:
    section = PAGE[PAGE.index("## The eight concepts") :].split("\n## ")[0]
    assert len(re.findall(r"^\d\. ", section, re.M)) == 8


def test_a_name_with_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_strategy(LOUDLY)
    assert (spec.name, spec.options) == ("my_package.plain_ddp:Loud", {"word": "summed", "verbose": "true"})
    assert parse_strategy(str(spec)) == spec
    assert parse_strategy("ddp:codec=topk:ratio=0.1").name == "ddp"
    assert check(spec, 2) == 0, "the launcher need not find the module"
    monkeypatch.syspath_prepend(str(folder))
    world, device = World(0, 1, 0, 1, 0, 1, "alone"), torch.device("cpu")
    assert alone(spec, 1, device) == (spec, "")
    made: object = make(spec, world, device)
    assert vars(made)["verbose"] is True
    for wrong, words in [
        ("my_package.plain_ddp:Loud:verbos=true", "has no option 'verbos'. Did you mean 'verbose'"),
        ("my_package.plain_ddp:Plan", "has no attribute 'Plan'. Use MODULE:CLASS"),
        ("my_package.nowhere:Plan", "No module named 'my_package.nowhere'"),
    ]:
        with pytest.raises(SettingError, match=words):
            make(parse_strategy(wrong), world, device)
