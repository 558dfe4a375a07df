"""Settings: what they are, what they may be, and the one place that merges them.

What `paceline.start()` is given are the script's defaults; the command line (which reaches a worker as JSON in the
environment variable that world.py names) overrides them. The result is one frozen object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import SettingError, suggest

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")
BATCH_NORMS = ("global", "shard")
NONFINITES = ("stop", "skip")


@dataclass(frozen=True)
class StrategySpec:
    """A strategy by name, with its options: what `paceline.strategy("ddp", bucket_mb=50)` returns."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{key}={value}" for key, value in self.options.items())


def strategy(name: str, **options: Any) -> StrategySpec:
    """A strategy with options as Python values: `start(strategy=paceline.strategy("ddp", bucket_mb=50))`."""
    return StrategySpec(name, options)


def parse_strategy(text: str | StrategySpec) -> StrategySpec:
    """Reads `NAME` or `NAME:key=value,...`; a part without `=` continues the value before it (devices=cpu,cpu).

    Raises SettingError where an option has no key.
    """
    if isinstance(text, StrategySpec):
        return text
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    last = None
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if equals:
            last = key.strip().replace("-", "_")
            options[last] = value.strip()
        elif last is None:
            raise SettingError(
                f"strategy={text!r}: the option {part!r} has no value. Write {name}:{part.strip()}=VALUE, "
                "several options with commas between them."
            )
        else:
            options[last] += "," + part.strip()
    return StrategySpec(name.strip(), options)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was told. Names are those of `paceline.start`, which documents them."""

    strategy: StrategySpec | None = None
    precision: str = "fp32"
    seed: int = 0
    batch_norm: str = "global"
    compile: bool = False
    nonfinite: str = "stop"
    device: str | None = None

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("batch_norm", self.batch_norm, BATCH_NORMS)
        _one_of("nonfinite", self.nonfinite, NONFINITES)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise SettingError(f"seed={self.seed!r}: a whole number from 0 to 2**63 - 1 is needed.")
        if not isinstance(self.compile, bool):
            raise SettingError(f"compile={self.compile!r}: True or False is needed.")


def _one_of(setting: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{setting}={value!r} is not known. {suggest(str(value), known)}")


def resolve(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Merges the script's defaults (None: not given) with the command line's overrides.

    Returns the settings, and a line for each override that changed what the script says. Raises SettingError for an
    unknown or impossible value.
    """
    known = [f.name for f in dataclasses.fields(Settings)]
    merged = {key: value for key, value in defaults.items() if value is not None}
    notes = []
    for key, value in overrides.items():
        if key not in known:
            raise SettingError(f"the launcher passed a setting {key!r}. {suggest(key, known)}")
        if key in merged and str(merged[key]) != str(value):
            notes.append(f"{key}={value} from the command line, in place of the script's {merged[key]}")
        merged[key] = value
    if merged.get("strategy") is not None:
        merged["strategy"] = parse_strategy(merged["strategy"])
    return Settings(**merged), notes
