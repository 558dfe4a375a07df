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
        models = current._models
        for number, model in enumerate(models):
            own_name = name if len(models) == 1 else f"{name} {number}"
            current.export(folder / f"{own_name}.{size}.safetensors", model)

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
    few = ["--data", images, "--global-batch", "15", "--epochs", "1", "--width"]
    example("contrastive", EXAMPLES / "contrastive.py", [*few, "4"])
    example("gan", EXAMPLES / "gan.py", [*few, "8", "--sheet", str(own / "sheet.png")])
    nano = ["--data", text, "--steps", "8", "--every", "4", "--length", "16", "--layers", "1", "--width", "32"]
    example("nanogpt", EXAMPLES / "nanogpt.py", [*nano, "--global-batch", "6"])
    example("nanogpt in parts", EXAMPLES / "nanogpt.py", [*nano, "--global-batch", "6", "--micro-batch", "2"])
    return printed


def image_jobs() -> None:
    """For test_image_jobs.py: weights and output are left in the folder."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES))
    import cifar10_mobilenetv2

    folder, size, rank = Path(os.environ[FOLDER]), os.environ["WORLD_SIZE"], os.environ["RANK"]
    weights = folder / f"thousand.{size}.{rank}.pt"
    torch.manual_seed(3)
    torch.save(cifar10_mobilenetv2.mobilenet_v2(0.25, classes=1000).state_dict(), weights)
    few = ["--data", str(folder / "cifar.tar.gz"), "--global-batch", "16"]
    large = [
        *few,
        "--base-batch",
        "4",
        "--epochs",
        "2",
        "--warmup",
        "1",
        "--blocks",
        "1",
        "--width",
        "4",
        "--lr",
        "0.01",
    ]
    adam = [*few, "--epochs", "1", "--width", "0.25", "--optimizer", "adam", "--weights", str(weights)]
    for name, script, words in (
        ("resnet scaled", "resnet_large_batch.py", large),
        ("resnet", "resnet_large_batch.py", [*large, "--no-scaling"]),
        ("mobilenet", "cifar10_mobilenetv2.py", adam),
    ):
        _, printed = start(EXAMPLES / script, words)
        if rank == "0":
            (folder / f"{name}.{size}.txt").write_text(printed)
        current = session.current()
        assert current is not None
        current.export(folder / f"{name}.{size}.safetensors")
