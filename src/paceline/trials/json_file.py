"""JSON files that a command writes for the user."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from paceline.errors import SettingError


def check_writable(path: str) -> None:
    """Raises SettingError if the file cannot be written."""
    directory = os.path.dirname(os.path.abspath(path))
    if (
        os.path.isdir(path)
        or not os.access(directory, os.W_OK)
        or (os.path.exists(path) and not os.access(path, os.W_OK))
    ):
        raise SettingError(f"cannot write {path!r}. Name a file in a directory that you can write to.")


def write_json(path: str, document: Any) -> None:
    """Write the document. Numbers that are not finite become null, because JSON cannot represent them."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
