"""The examples run on 1 and on 2 processes, and give the same models; the plain scripts give them too."""

from __future__ import annotations

import difflib
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.examples import data, jobs
from tests.ranks import run_ranks
from torch import Tensor

SCRIPTS = sorted(jobs.EXAMPLES.rglob("*.py"))
MOST_LINES = 120
MOST_CHANGED = 5
BOUND = 1e-10  # in float64; they come to 3e-12 (MobileNetV2) and 2e-14 (the others)


class Results:
    """What the examples printed and left on 1 and on 2 processes, and the plain scripts on their one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text.txt").write_text(data.text())
        data.cifar10(folder / "cifar.tar.gz", train=40, test=9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(jobs.FOLDER, str(folder))
            self.printed = {size: run_ranks(size, "tests.examples.jobs:run", deadline=100)[0] for size in (1, 2)}

    def weights(self, name: str, size: int) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.{size}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("examples"))


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The 2-norm of the difference over that of all weights."""
    assert one.keys() == other.keys()
    names = [name for name in one if one[name].is_floating_point()]
    apart = sum(float((one[name].double() - other[name].double()).pow(2).sum()) for name in names)
    whole = sum(float(one[name].double().pow(2).sum()) for name in names)
    return math.sqrt(apart / whole)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_short(script: Path) -> None:
    lines = len(script.read_text().splitlines())
    assert lines < MOST_LINES, f"{script} has {lines} lines"


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["image", "text", "cifar", "gpt", "nanogpt", "contrastive", "gan 0", "gan 1"])
def test_one_and_two_processes_give_one_model(results: Results, name: str) -> None:
    assert distance(results.weights(name, 1), results.weights(name, 2)) <= BOUND


@pytest.mark.conformance
@pytest.mark.parametrize("size", [1, 2])
def test_a_stopped_gpt_goes_on_with_micro_batches_to_the_same_model(results: Results, size: int) -> None:
    assert "resumed after step 8" in results.printed[size]["gpt resumed"]
    assert distance(results.weights("gpt", size), results.weights("gpt resumed", size)) <= BOUND


@pytest.mark.conformance
@pytest.mark.parametrize("size", [1, 2])
def test_the_nanogpt_is_the_same_model_in_micro_batches(results: Results, size: int) -> None:
    assert "step 8: held-out loss" in results.printed[size]["nanogpt in parts"]
    assert distance(results.weights("nanogpt", 1), results.weights("nanogpt in parts", size)) <= BOUND


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_nanogpt_compiled_and_in_micro_batches_is_the_same_model(tmp_path: Path) -> None:
    """In float32, by torch.compile's own backend for CPUs."""
    (tmp_path / "text.txt").write_text(data.text())
    words = ["--steps", "6", "--every", "6", "--length", "16", "--layers", "1", "--width", "32", "--global-batch", "6"]
    found = []
    for size, settings, more in ((1, [], []), (2, ["--compile"], ["--micro-batch", "2"])):
        saved = tmp_path / f"checkpoints.{size}"
        script = [str(jobs.EXAMPLES / "nanogpt.py"), "--data", str(tmp_path / "text.txt"), *words, *more]
        command = ["run", "--nproc", str(size), *settings, *script, "--checkpoints", str(saved)]
        for line in (command, ["export", str(saved), "-o", str(tmp_path / f"{size}.safetensors")]):
            paceline = [sys.executable, "-m", "paceline", *line]
            done = subprocess.run(paceline, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stdout + done.stderr
        found.append(load_file(tmp_path / f"{size}.safetensors"))
    assert distance(*found) <= 1e-6  # it comes to 3e-9; with batches of 5 it is 7e-4


@pytest.mark.conformance
@pytest.mark.parametrize("size", [1, 2])
def test_the_gpt_learns_and_speaks(results: Results, size: int) -> None:
    printed = results.printed[size]["gpt"]
    losses = [float(found) for found in re.findall(r"held-out loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    sample = printed.split("\n", 3)[3].rstrip("\n")
    assert len(sample) == 400
    assert set(sample) <= set(data.text())


@pytest.mark.parametrize("kind", jobs.PAIRS)
def test_at_most_five_lines_change(kind: str) -> None:
    before, after = (
        (jobs.EXAMPLES / "before_and_after" / f"{kind}_{when}.py").read_text().splitlines()
        for when in ("before", "after")
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    lines = 0
    for tag, start, stop, new_start, new_stop in changes:
        if tag != "equal":
            old, new = (sum(bool(line) for line in part) for part in (before[start:stop], after[new_start:new_stop]))
            lines += max(old, new)
    assert 0 < lines <= MOST_CHANGED, "\n".join(difflib.unified_diff(before, after, lineterm="", n=0))


def test_the_guide_shows_the_whole_difference() -> None:
    page = (jobs.EXAMPLES.parent / "docs" / "examples.md").read_text()
    shown = [line for line in page.split("```diff\n")[1].split("```")[0].splitlines() if line]
    before, after = (
        (jobs.EXAMPLES / "before_and_after" / f"text_{when}.py").read_text().splitlines()
        for when in ("before", "after")
    )
    differing = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:]]
    assert shown == [line[0] + line[2:] for line in differing]


@pytest.mark.conformance
@pytest.mark.parametrize("kind", jobs.PAIRS)
@pytest.mark.usefixtures("float64")
def test_before_and_after_give_one_model(
    kind: str, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = jobs.alike(jobs.EXAMPLES / "before_and_after" / f"{kind}_before.py", tmp_path)
    arguments = [argument.format(text=results.folder / "text.txt") for argument in jobs.PAIRS[kind]]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    plain = runpy.run_path(str(script))["main"]().state_dict()
    for size in (1, 2):
        assert distance(plain, results.weights(kind, size)) <= BOUND


@pytest.mark.parametrize(
    "script",
    [
        "char_gpt.py",
        "nanogpt.py",
        "cifar10_mobilenetv2.py",
        "contrastive.py",
        "gan.py",
        "resnet_large_batch.py",
        "before_and_after/text_after.py",
    ],
)
def test_missing_data_is_an_error_that_says_what_to_do(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jobs.EXAMPLES / script
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), "--data", "nowhere/at/all"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "nowhere/at/all" in said
    assert "--data" in said.split("error:")[1]
    assert "http" in said


@pytest.mark.parametrize(
    ("script", "content", "told"),
    [
        ("char_gpt.py", b"\xd4\x00", "is no text in UTF-8"),
        ("nanogpt.py", b"\xd4\x00", "is no text in UTF-8"),
        ("char_gpt.py", b"hello", "has 5 characters, and pieces of --length 128 need 1290"),
        ("nanogpt.py", b"hello", "has 5 characters, and pieces of --length 128 need 1290"),
        ("contrastive.py", b"hello", "is neither a zip of JPEGs nor cifar-10-python.tar.gz"),
    ],
)
def test_data_of_another_format_are_an_error_that_says_what_to_do(
    script: str, content: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = jobs.EXAMPLES / script
    (tmp_path / "data.txt").write_bytes(content)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), "--data", str(tmp_path / "data.txt")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err.split("error:")[1]
    assert told in said
    assert said.count("\n") == 1, "one line"
