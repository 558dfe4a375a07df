"""The script's output (print, sys.stdout, files, logging, json.dump, TensorBoard) and its checkpoints."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch

from paceline.launcher.import_hook import after_import
from paceline.observe.event_log import EventLog

_NUMBER = re.compile(r"\d")
_VALUE = re.compile(r"\d\.\d")  # a decimal number: the counts of a progress bar are integers
_OF_TORCH = re.compile(r"(c10d|torch)\b")  # torch's loggers, which report failed collectives
_PRINTED = (str, int, float, torch.Tensor, np.generic, dict, list, tuple)
_MAX_OUTPUTS = 3000
_MAX_SAVES = 20  # inspected checkpoints
_PREFIX = "module."


class OutputRecorder:
    """Records the output of this process, up to _MAX_OUTPUTS events."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._printing = False

    def _record_output(self, how: str, text: str) -> None:
        if not _NUMBER.search(text):
            return
        at = self.log.stack.caller()
        if at and self.log.few("output", _MAX_OUTPUTS):
            self.log.record("said", at=at, how=how, text=text[:120], vars=self.log.shared.variables.numbers())

    def around_print(self, *args: Any, **options: Any) -> Generator[None, Any, None]:
        self._printing = True  # print writes to sys.stdout
        try:
            yield
        finally:
            self._printing = False
        if not isinstance(options.get("file"), io.StringIO):  # datasets hashes functions by `dis`, which prints so
            self._record_output("print", " ".join(str(a) for a in args if isinstance(a, _PRINTED)))

    def before_write(self, text: str) -> None:
        """Record text for sys.stdout.write, unless print writes it. tqdm.write and rich also call sys.stdout.write."""
        if not self._printing and _VALUE.search(text):
            self._record_output("sys.stdout", text)

    def around_open(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """Record that the script opens a file for writing. The text that it writes is not recorded."""
        file = yield
        mode = getattr(file, "mode", "")
        at = self.log.stack.caller() if isinstance(mode, str) and mode[:1] in ("w", "a", "x") else []
        if not at or not self.log.few("output", _MAX_OUTPUTS):
            return
        path = str(getattr(file, "name", ""))
        if "b" not in mode and self.log.stack.called_by_script():
            self.log.record("said", at=at, how="file", text=f"into {os.path.basename(path)}", path=path)
        else:
            self.log.record("wrote", at=at, path=path)

    def after_logging(self, logger: Any, record: Any) -> None:
        if not _OF_TORCH.match(record.name):
            self._record_output("logging", record.getMessage())

    def after_json_dump(self, obj: Any, *_: Any, **__: Any) -> None:
        self._record_output("json.dump", str(obj)[:200])

    def patch_tensorboard(self, module: Any) -> None:
        self.log.patches.before(module.SummaryWriter, "add_scalar", self.before_add_scalar)

    def before_add_scalar(self, *args: Any, **options: Any) -> None:
        self._record_output("TensorBoard", " ".join(map(str, (*args[1:3], *options.values()))))

    def patch_lightning(self, module: Any) -> None:
        for name in ("EarlyStopping", "ModelCheckpoint"):
            if hasattr(module, name):
                self.log.patches.before(getattr(module, name), "on_validation_end", self.before_decision)

    def before_decision(self, callback: Any, trainer: Any, *_: Any, **__: Any) -> None:
        """Record the metric by which a callback of Lightning decides."""
        value = trainer.callback_metrics.get(callback.monitor)
        if value is not None and self.log.few("decides", _MAX_OUTPUTS):
            self.log.record("decides", by=callback.monitor, value=float(value), who=type(callback).__name__)

    # --- checkpoints

    def around_save(self, *args: Any, **options: Any) -> Generator[None, Any, None]:
        began = self.log.clock()
        yield
        seconds = self.log.clock() - began
        value, file = (*args, *(options.get(name) for name in ("obj", "f")[len(args) :]))[:2]
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        where = os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
        size = os.path.getsize(where) if where and os.path.isfile(where) else 0
        own, other = self._saved_buffers(value) if self.log.few("saved_buffers", _MAX_SAVES) else (0, 0)
        about: dict[str, Any] = {"path": where, "bytes": size, "seconds": seconds, "wrapped": _prefixed_name(value)}
        self.log.record("save", own_buffers=own, other_buffers=other, **about)

    def _saved_buffers(self, value: Any) -> tuple[int, int]:
        """The number of buffers of trained models in a checkpoint that DDP does not broadcast: with this rank's values,
        and with others."""
        given = dict(_named_tensors(value))
        own = other = 0
        for root in self.log.shared.models.not_broadcast():
            for name, buffer in root.named_buffers():
                saved = given.get(name)
                if saved is not None and saved.shape == buffer.shape and buffer.is_floating_point():
                    same = torch.equal(saved.to(buffer), buffer)
                    own, other = own + same, other + (not same)
        return own, other


def _named_tensors(value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """(name without DDP's prefix, tensor) of the tensors in nested dictionaries."""
    for name, item in value.items() if isinstance(value, dict) and depth <= 3 else ():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            yield str(name).removeprefix(_PREFIX), item
        else:
            yield from _named_tensors(item, depth + 1)


def _prefixed_name(value: Any, depth: int = 0) -> str:
    """The first name in a dictionary of tensors if all names begin with DDP's `module.`; otherwise ""."""
    if not isinstance(value, dict) or depth > 3:
        return ""
    names = [str(name) for name, item in value.items() if isinstance(item, torch.Tensor)]
    if names and len(names) == len(value) and all(name.startswith(_PREFIX) for name in names):
        return names[0]
    return next((found for item in value.values() if (found := _prefixed_name(item, depth + 1))), "")


def install(log: EventLog) -> None:
    recorder, patches = OutputRecorder(log), log.patches
    patches.around(builtins, "print", recorder.around_print)
    patches.around(builtins, "open", recorder.around_open)
    if isinstance(sys.stdout, io.TextIOWrapper):
        patches.before(sys.stdout, "write", recorder.before_write)
    patches.after(logging.Logger, "handle", recorder.after_logging)
    patches.after(json, "dump", recorder.after_json_dump)
    patches.around(torch, "save", recorder.around_save)
    patches.replace(torch.serialization, "save", torch.save)
    after_import("torch.utils.tensorboard.writer", recorder.patch_tensorboard)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        for module in ("early_stopping", "model_checkpoint"):
            after_import(f"{package}.callbacks.{module}", recorder.patch_lightning)
