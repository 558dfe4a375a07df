"""A text as numbers, one per character: the data of char_gpt.py and nanogpt.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class DataError(Exception):
    """The text is missing, or not as expected."""


def characters(data: Path, length: int) -> tuple[list[str], Tensor]:
    """The alphabet, and the text as indices into it. data: a text, or a folder of texts. length: characters of a
    piece; the last tenth of the text must hold at least one piece. Raises DataError."""
    files = [data] if data.is_file() else sorted(data.glob("*.txt"))
    if not files:
        raise DataError(f"no text in {data}. Name one, or a folder, with --data. To fetch one: curl -O {URL}")
    text = ""
    for file in files:
        try:
            text += file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is no text in UTF-8 ({error}). --data takes a text, or a folder of them") from None
    if len(text) < 10 * (length + 1):
        raise DataError(f"{data} has {len(text)} characters, and pieces of --length {length} need {10 * (length + 1)}: "
                        "the last tenth is held out. Name a longer text, or give a smaller --length.")  # fmt: skip
    alphabet = sorted(set(text))
    return alphabet, torch.tensor([*map({character: n for n, character in enumerate(alphabet)}.get, text)])
