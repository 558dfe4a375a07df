"""What the processes of test_examples.py run: the examples, as a person would, in float64 and on tiny data."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline import session

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = "PACELINE_TEST_EXAMPLES"
GPT = ["--layers", "1", "--width", "32", "--length", "16", "--global-batch", "30", "--steps", "12", "--every", "4"]
PAIRS = {"image": ["--epochs", "1"], "text": ["--data", "{text}", "--epochs", "1"]}


def alike(script: Path, folder: Path) -> Path:
    """A copy without the two differences that are meant: how the examples are shuffled, and how weights are drawn."""
    source = script.read_text()
    for old, new in (("shuffle=True", "shuffle=False"), ("    model = ", "    torch.manual_seed(1)\n    model = ")):
        assert source.count(old) == 1, f"{script.name}: {old!r} comes {source.count(old)} times"
        source = source.replace(old, new)
    copy = folder / script.name
    copy.write_text(source)
    return copy


def start(script: Path, arguments: Sequence[str]) -> tuple[dict[str, object], str]:
    """Runs a script as `python script arguments` would. Returns its globals, and what it printed."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, [str(script), *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            found = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return found, printed.getvalue()


def run() -> dict[str, str]:
    """What each example printed. Its weights are left in the folder, as NAME.SIZE.safetensors."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES))
    folder = Path(os.environ[FOLDER])
    size, main = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    own = folder / f"{size}.{os.environ['RANK']}"
    own.mkdir()
    text, images, saved = str(folder / "text.txt"), str(folder / "cifar.tar.gz"), folder / f"checkpoints.{size}"
    printed = {}

    def example(name: str, script: Path, arguments: Sequence[str]) -> None:
        _, printed[name] = start(script, arguments)
        current = session.current()
        assert current is not None, f"{script} made no run"
        current.export(folder / f"{name}.{size}.safetensors")

    for kind, arguments in PAIRS.items():
        given = [argument.format(text=text) for argument in arguments]
        example(kind, alike(EXAMPLES / "before_and_after" / f"{kind}_after.py", own), given)
    example("cifar", EXAMPLES / "cifar10_mobilenetv2.py", ["--data", images, "--width", "0.25", "--global-batch", "16",
                                                          "--epochs", "1", "--lr", "0.01"])  # fmt: skip
    gpt = [*GPT, "--data", text, "--checkpoints", str(saved)]
    example("gpt", EXAMPLES / "char_gpt.py", gpt)
    if main:
        newest = max(saved.glob("*/"), key=lambda path: path.stat().st_mtime)
        shutil.rmtree(newest)
    example("gpt resumed", EXAMPLES / "char_gpt.py", [*gpt, "--micro-batch", "4"])
    return printed
