"""Sizes and rates as a user writes them."""

from __future__ import annotations

import math
import re

from paceline.errors import SettingError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i|[kmgtp])?\s*(b|bytes|bit|bits|flops|flop)?(/s|ps)?")


def read_quantity(option: str, text: str, kind: str) -> float:
    """Read "80GB" (kind "bytes"), "400Gbit/s" or "450GB/s" ("rate"), or "989TFLOP/s" ("flops").

    Returns bytes, bytes per second or FLOP/s. A plain number counts as that.

    Raises:
        SettingError: it cannot be read, or has the unit of another kind.
    """
    found = _QUANTITY.fullmatch(text.strip().lower())
    examples = {"bytes": "80GB or 80GiB", "rate": "450GB/s or 400Gbit/s", "flops": "989TFLOP/s"}
    wanted = SettingError(f"{option} {text}: write {examples[kind]}.")
    if found is None:
        raise wanted
    number, prefix, unit, per_second = found.groups()
    value = float(number) * {**_UNITS, **_BINARY}[prefix or ""]
    is_flops = (unit or "").startswith("flop")
    if (is_flops and kind != "flops") or (unit and not is_flops and kind == "flops"):
        raise wanted
    if per_second and kind == "bytes":
        raise wanted
    if unit in ("bit", "bits"):
        if kind == "bytes":
            raise wanted
        value /= 8
    if not value > 0 or math.isinf(value):
        raise SettingError(f"{option} {text}: must be above 0.")
    return value
