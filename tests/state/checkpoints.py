"""Small checkpoints for tests: a state that says at which step it was written, saved and looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paceline.state.checkpoint import Retention, read, write

HASH = r"[0-9a-f]{64}"


def parts(step: int, elements: int = 10) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((elements,), float(step)), "bias": torch.tensor(float(step))},
        "optimizer": {"state": {0: {"step": step}}, "lr": 0.1},
    }


def save(directory: Path, step: int, keep: int | None = None, elements: int = 10) -> Path:
    return write(directory, step=step, parts=parts(step, elements), retention=Retention(keep), meta={"step": step})


def assert_content(path: Path, step: int, elements: int = 10) -> None:
    meta, got = read(path)
    assert meta == {"step": step}
    assert list(got) == ["model", "optimizer"]
    assert got["optimizer"] == parts(step)["optimizer"]
    assert torch.equal(got["model"]["weight"], torch.full((elements,), float(step)))
    assert got["model"]["bias"].item() == step


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))
