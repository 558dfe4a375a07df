"""Settings: their names, valid values and defaults, and how script, settings file and command line are merged.

The arguments of `paceline.start()` are the script's defaults. A `paceline.toml` beside the script, or the file given by
`--config`, overrides them. The command line overrides both; a worker receives it as JSON in an environment variable
(world.SETTINGS). The result is one frozen object.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.errors import SettingError, suggest
from paceline.quantities import read_quantity

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")
PRECISIONS_ELSEWHERE = {
    **dict.fromkeys(("32", "32-true", "float32", "float", "tf32"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "fp16-mixed", "float16", "half"), "fp16"),
    "bf16-true": "bf16-params",
}
BATCH_NORMS = ("global", "shard")
NOISES = ("shard", "example")
COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
NONFINITES = ("stop", "skip")
PROGRESS = ("auto", "bar", "lines", "off")
TRACKERS = ("jsonl", "tensorboard", "wandb", "mlflow")
FILE = "paceline.toml"


@dataclass(frozen=True)
class StrategySpec:
    """A strategy's name and options, as returned by `paceline.strategy("ddp", bucket_mb=50)`.

    Attributes:
        name: such as "ddp".
        options: option name -> value. Values from the command line are strings.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{key}={value}" for key, value in self.options.items())


_STRATEGY_NAME = re.compile(r"[\w.]+:[A-Z]\w*(?=:|$)|[^:]*")  # MODULE:CLASS, or the text before the first colon


def strategy(name: str, **options: Any) -> StrategySpec:
    """Choose a strategy with options as Python values: `start(strategy=paceline.strategy("ddp", bucket_mb=50))`."""
    return StrategySpec(name, options)


def parse_strategy(text: str | StrategySpec) -> StrategySpec:
    """Parse `NAME` or `NAME:key=value,...`. A part without `=` continues the previous value (devices=cpu,cpu).

    NAME is a strategy of Paceline, or `MODULE:CLASS` for a user's class.

    Raises:
        SettingError: an option has no value, or `text` is not a string.
    """
    if isinstance(text, StrategySpec):
        return text
    if not isinstance(text, str):
        raise SettingError(f'strategy={text!r}: must be a string such as "ddp" or "ddp:bucket_mb=50".')
    name = _STRATEGY_NAME.match(text)[0]  # type: ignore[index]  # the pattern matches any text
    rest = text[len(name) :].removeprefix(":")
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
                "and separate several options by commas."
            )
        else:
            options[last] += "," + part.strip()
    return StrategySpec(name.strip(), options)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. `paceline.start` documents them: its arguments have the same names."""

    strategy: StrategySpec | None = None
    precision: str = "fp32"
    seed: int = 0
    batch_norm: str = "global"
    noise: str = "shard"
    compile: bool | str = False
    nonfinite: str = "stop"
    nonfinite_every: int = 10
    fp32_outputs: bool = True
    device: str | None = None
    log_dir: str | None = None
    trackers: tuple[str, ...] = ("jsonl",)
    log_every: int = 10
    progress: str = "auto"
    trace: str | None = None
    channels_last: bool = False
    deterministic: bool = False
    cudnn_benchmark: bool | None = None
    tf32: bool | None = None
    reproducible: int | None = None
    balance: bool = False
    peak_flops: str | None = None

    @property
    def deterministic_by(self) -> str:
        """The setting that requires deterministic kernels, such as "reproducible=4", or ""."""
        if self.reproducible is not None:
            return f"reproducible={self.reproducible}"
        return "deterministic=True" if self.deterministic else ""

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS, PRECISIONS_ELSEWHERE)
        _one_of("batch_norm", self.batch_norm, BATCH_NORMS, {"sync": "global", "local": "shard"})
        _one_of("noise", self.noise, NOISES)
        _one_of("nonfinite", self.nonfinite, NONFINITES)
        _one_of("progress", self.progress, PROGRESS)
        if not isinstance(self.compile, bool) and self.compile not in COMPILE_MODES:
            raise SettingError(
                f"compile={self.compile!r}: must be True, False, or a mode of torch.compile: "
                f"{', '.join(COMPILE_MODES)}."
            )
        for name in self.trackers:
            _one_of("trackers", name, TRACKERS)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("log_every", self.log_every, 1, 2**31)
        _whole("nonfinite_every", self.nonfinite_every, 1, 1000)
        for setting in ("balance", "channels_last", "deterministic", "fp32_outputs"):
            _true_or_false(setting, getattr(self, setting))
        for setting in ("cudnn_benchmark", "tf32"):
            if getattr(self, setting) is not None:
                _true_or_false(setting, getattr(self, setting))
        for setting in ("device", "log_dir", "trace", "peak_flops"):
            if not isinstance(getattr(self, setting), (str, type(None))):
                raise SettingError(f"{setting}={getattr(self, setting)!r}: must be a string.")
        if self.peak_flops not in (None, "auto"):
            read_quantity("peak_flops", self.peak_flops, "flops")
        if self.reproducible is not None:
            _whole("reproducible", self.reproducible, 1, 2**16)
        if self.reproducible is not None and self.cudnn_benchmark:
            raise SettingError(
                f"reproducible={self.reproducible} and cudnn_benchmark=True contradict each other: the benchmark "
                "chooses different kernels from run to run. Set one of them."
            )
        if self.reproducible is not None and self.compile:
            raise SettingError(
                f"reproducible={self.reproducible} and compile={self.compile} contradict each other: torch.compile "
                "generates kernels for the shapes that a process has seen, which depend on its number of shards. Set "
                "one of them."
            )
        if self.noise == "example" and self.compile:
            raise SettingError(
                f"noise='example' and compile={self.compile} contradict each other: a compiled model draws random "
                "numbers inside its kernels, which cannot use one random stream per example. Set one of them."
            )
        if self.balance and self.batch_norm == "shard" and self.reproducible is None:
            raise SettingError(
                "balance=True and batch_norm='shard' contradict each other: the statistics of a shard would depend on "
                "the measured speed of its process. Set one of them."
            )
        if self.deterministic and self.cudnn_benchmark:
            raise SettingError(
                "deterministic=True and cudnn_benchmark=True contradict each other: the benchmark chooses different "
                "kernels from run to run. Set one of them."
            )


def _one_of(setting: str, value: object, known: tuple[str, ...], elsewhere: Mapping[str, str] = {}) -> None:
    if value in known:
        return
    raise SettingError(f"{setting}={value!r} is not known. {suggest(str(value), known, elsewhere)}")


def _whole(setting: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingError(f"{setting}={value!r}: must be a whole number from {least} to {most}.")


def _true_or_false(setting: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SettingError(f"{setting}={value!r}: must be True or False.")


def file_beside(script: str | Path | None) -> Path | None:
    """Find the settings file in the script's directory. A notebook has no script: use the current directory.

    Returns None if there is no settings file.
    """
    path = Path(FILE) if script is None else Path(script).parent / FILE
    return path if path.exists() else None


_MOST_BYTES = 2**20  # maximum size of a settings file
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_plain(path: str | Path) -> IO[bytes]:
    """Open a user's file for reading. Links are followed.

    Raises OSError unless it is a regular file: a pipe would wait for a writer, and a device may never end.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}")
    return open(handle, "rb")


def read_file(path: str | Path) -> dict[str, Any]:
    """Read settings from a TOML file with lines `key = value`.

    The strategy is a string, as on the command line, or a table with `name` and the options.

    Raises:
        SettingError: the file cannot be read, is not TOML, or has an unknown key. The message names the path.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        with open_plain(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SettingError(f"{path} is not a settings file: it is larger than {_MOST_BYTES:,} bytes.")
        text = data.decode("utf-8-sig").replace("\r\n", "\n")  # some editors write a byte-order mark
        found = tomllib.loads(text)
    except OSError as error:
        raise SettingError(
            f"the settings file {str(path)!r} cannot be read: {error.strerror}. Give another with --config, or "
            "leave out --config to use paceline.toml beside the script, if it exists."
        ) from None
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:  # numbers too long for int(), nesting too deep
        raise SettingError(f'{path} is not valid TOML: {error}. Write lines such as precision = "bf16"') from None
    known = [f.name for f in dataclasses.fields(Settings)]
    for key in found:
        if key not in known:
            raise SettingError(f"{path}: {key!r} is not a setting. {suggest(key, known)}")
    if isinstance(found.get("strategy"), dict):
        options = dict(found["strategy"])
        if not isinstance(options.get("name"), str):
            raise SettingError(f'{path}: the table [strategy] has no name. Add one, such as name = "ddp".')
        found["strategy"] = StrategySpec(options.pop("name"), options)
    return found


def resolve(*layers: tuple[str, Mapping[str, Any]]) -> tuple[Settings, list[str]]:
    """Merge settings from several places. Later places override earlier ones.

    Args:
        layers: each (name of the place, setting -> value). None means not set.

    Returns:
        The settings, and a line for each override that changed a value.

    Raises:
        SettingError: a setting is unknown, or a value is invalid.
    """
    known = [f.name for f in dataclasses.fields(Settings)]
    merged: dict[str, tuple[Any, str]] = {}
    notes = []
    for place, values in layers:
        for key, value in values.items():
            if value is None:
                continue
            if key not in known:
                raise SettingError(f"{place} sets an unknown setting {key!r}. {suggest(key, known)}")
            try:
                Settings(**_typed({key: value}))
            except SettingError as error:  # check each value here, to name its place in the error
                raise SettingError(f"{error} (Set by {place}.)") from None
            if key in merged and str(merged[key][0]) != str(value):
                notes.append(f"{key}={value} from {place} overrides {merged[key][0]} from {merged[key][1]}")
            merged[key] = value, place
    try:
        settings = Settings(**_typed({key: value for key, (value, _) in merged.items()}))
    except SettingError as error:  # each value is valid alone, so two of them contradict each other
        sources = [f"{key} is set by {place}" for key, (_, place) in merged.items() if f"{key}=" in str(error)]
        raise SettingError(f"{error} ({', '.join(sources)}.)") from None
    if "trackers" in merged and settings.log_dir is None:
        notes.append(
            f"trackers={','.join(settings.trackers)} from {merged['trackers'][1]} records nothing, because log_dir is "
            "not set. Set a directory: log_dir='logs' (--log-dir logs)."
        )
    return settings, notes


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Convert values given as text to the types of Settings."""
    typed = dict(values)
    if "strategy" in typed:
        typed["strategy"] = parse_strategy(typed["strategy"])
    names = typed.get("trackers")
    if isinstance(names, str):
        typed["trackers"] = tuple(name.strip() for name in names.split(",") if name.strip())
    elif isinstance(names, (list, tuple)):
        typed["trackers"] = tuple(names)
    elif names is not None:
        raise SettingError(f'trackers={names!r}: must be a string such as "jsonl,tensorboard", or a list of names.')
    return typed
