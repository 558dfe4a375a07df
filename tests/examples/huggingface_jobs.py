"""What the processes of test_huggingface.py run: the examples with Hugging Face's libraries, in float64 and small."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.examples.jobs import EXAMPLES, start
from torch import Tensor

from paceline.world import SETTINGS

FOLDER = "PACELINE_TEST_HUGGINGFACE"
ZERO_GRADIENT = "attention.self.key.bias", "attention.key.bias"
"""Their gradients are zero but for rounding, which Adam makes whole steps of: in plain PyTorch too."""
KINDS = ["bert", "albert"]
MLM = ["--steps", "5", "--every", "5", "--global-batch", "7", "--length", "24", "--lr", "1e-3"]
LORA = ["--epochs", "2", "--classes", "3", "--global-batch", "5", "--lr", "1e-2"]
"""26 paragraphs for training: the last global batch has one, so that the second of two processes has none."""


def text() -> str:
    """WikiText's format: articles with words of their own, and paragraphs of uneven lengths."""
    draw = random.Random(0)
    lines = []
    for article in range(3):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(20)]
        lines.append(f" = Article {article} = ")
        lines += [" " + " ".join(draw.choices(words, k=draw.randint(40, 60))) + " . " for _ in range(11)]
    return "\n".join(lines)


def make_models(folder: Path) -> None:
    """The text, and folders with a model of each kind, in float64."""
    import wikitext

    (folder / "text.txt").write_text(text())
    texts = [paragraph for _, paragraph in wikitext.paragraphs(folder / "text.txt")]
    torch.set_default_dtype(torch.float64)
    try:
        for kind in KINDS:
            wikitext.make(folder / kind, texts, kind, vocabulary=80, layers=2)
    finally:
        torch.set_default_dtype(torch.float32)


def run(name: str, strategy: str, arguments: str) -> dict[str, str]:
    """Trains each kind by both examples. Returns what they printed; what they saved is in `<kind>.<example>.<name>`."""
    torch.set_default_dtype(torch.float64)
    os.environ[SETTINGS] = json.dumps({"strategy": strategy} if strategy else {})
    sys.path.insert(0, str(EXAMPLES))
    folder = Path(os.environ[FOLDER])
    printed = {}
    for kind in KINDS:
        given = ["--data", str(folder / "text.txt"), "--model", str(folder / kind), *arguments.split()]
        for example, its in (("bert_mlm", MLM), ("finetune_lora", LORA)):
            saved = ["--save", str(folder / f"{kind}.{example}.{name}")]
            _, printed[f"{kind}.{example}"] = start(EXAMPLES / f"{example}.py", [*given, *its, *saved])
    return printed


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The 2-norm of the difference over that of all weights."""
    assert one.keys() == other.keys()
    names = [name for name in one if not name.endswith(ZERO_GRADIENT)]
    apart = sum(float((one[name] - other[name]).square().sum()) for name in names)
    return math.sqrt(apart / sum(float(one[name].square().sum()) for name in names))


def weights(folder: Path, *parts: str) -> dict[str, Any]:
    return load_file(folder.joinpath(*parts))
