"""What the script prints, logs and writes (print, sys.stdout, files, logging, json.dump, TensorBoard), and saves."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
import re
import sys
from typing import Any

import numpy as np
import torch

from paceline.doctor.recorders.event_log import EventLog
from paceline.doctor.recorders.patching import after_import, call_after, call_before, patch

_NUMBER = re.compile(r"\d")
_VALUE = re.compile(r"\d\.\d")  # a decimal number, which the counts of a progress bar are not
_OF_TORCH = re.compile(r"(c10d|torch)\b")  # loggers of torch's, which tell of failed collectives
_PRINTED = (str, int, float, torch.Tensor, np.generic, dict, list, tuple)
_MAX_OUTPUTS = 3000
_PREFIX = "module."


class _OutputRecorder:
    """The output of this process, up to a number of events."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._count = 0
        self._printing = False

    def _record_output(self, how: str, text: str, at: list[Any]) -> None:
        if at and self._count < _MAX_OUTPUTS and _NUMBER.search(text):
            self._count += 1
            self.log.record("said", at=at, how=how, text=text[:120], vars=self.log.variables.numbers())

    def wrap_print(self, original: Any) -> Any:
        def print(*args: Any, **options: Any) -> None:
            self._printing = True  # it writes to sys.stdout
            try:
                original(*args, **options)
            finally:
                self._printing = False
            # `dis` prints so, and datasets hashes functions with it
            in_memory = isinstance(options.get("file"), io.StringIO)
            if self.log.active and self._count < _MAX_OUTPUTS and not in_memory:
                text = " ".join(str(a) for a in args if isinstance(a, _PRINTED))
                self._record_output("print", text, self.log.caller())

        return print

    def wrap_write(self, original: Any) -> Any:
        """sys.stdout.write, which tqdm.write and rich call too."""

        def write(text: str) -> Any:
            if not self._printing and self.log.active and _VALUE.search(text):
                self._record_output("sys.stdout", text, self.log.caller())
            return original(text)

        return write

    def wrap_open(self, original: Any) -> Any:
        """open, where the script itself opens a file for writing. What it writes into the file is not recorded."""

        def open(*args: Any, **options: Any) -> Any:
            file = original(*args, **options)
            mode = getattr(file, "mode", "")
            if self.log.active and isinstance(mode, str) and mode[:1] in ("w", "a", "x") and self._count < _MAX_OUTPUTS:
                at = self.log.caller()
                if at:
                    self._count += 1
                    path = str(getattr(file, "name", ""))
                    if "b" not in mode and at[0] == sys._getframe(1).f_code.co_filename:
                        self.log.record("said", at=at, how="file", text=f"into {os.path.basename(path)}", path=path)
                    else:
                        self.log.record("wrote", at=at, path=path)
            return file

        return open

    def after_logging(self, logger: Any, record: Any) -> None:
        if self._count < _MAX_OUTPUTS and not _OF_TORCH.match(record.name):
            self._record_output("logging", record.getMessage(), self.log.caller())

    def after_json_dump(self, obj: Any, *_: Any, **__: Any) -> None:
        if self._count < _MAX_OUTPUTS:
            self._record_output("json.dump", str(obj)[:200], self.log.caller())

    def patch_tensorboard(self, module: Any) -> None:
        call_before(self.log, module.SummaryWriter, "add_scalar", self.before_add_scalar)

    def before_add_scalar(self, *args: Any, **options: Any) -> None:
        text = " ".join(map(str, (*args[1:3], *options.values())))
        self._record_output("TensorBoard", text, self.log.caller())

    # --- checkpoints

    def wrap_save(self, original: Any) -> Any:
        def save(*args: Any, **options: Any) -> Any:
            if not self.log.active:
                return original(*args, **options)
            began = self.log.clock()
            result = original(*args, **options)
            seconds = self.log.clock() - began
            with self.log.overhead():
                value, file = (*args, *(options.get(name) for name in ("obj", "f")[len(args) :]))[:2]
                path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
                where = os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
                size = os.path.getsize(where) if where and os.path.isfile(where) else 0
                self.log.record("save", path=where, bytes=size, seconds=seconds, wrapped=_prefixed_name(value))
            return result

        return save


def _prefixed_name(value: Any, depth: int = 0) -> str:
    """The first name in a dictionary of tensors whose names all begin with DDP's `module.`; or else ""."""
    if not isinstance(value, dict) or depth > 3:
        return ""
    names = [str(name) for name, item in value.items() if isinstance(item, torch.Tensor)]
    if names and len(names) == len(value) and all(name.startswith(_PREFIX) for name in names):
        return names[0]
    return next((found for item in value.values() if (found := _prefixed_name(item, depth + 1))), "")


def install(log: EventLog) -> None:
    recorder = _OutputRecorder(log)
    patch(builtins, "print", recorder.wrap_print)
    patch(builtins, "open", recorder.wrap_open)
    if isinstance(sys.stdout, io.TextIOWrapper):
        patch(sys.stdout, "write", recorder.wrap_write)
    call_after(log, logging.Logger, "handle", recorder.after_logging)
    call_after(log, json, "dump", recorder.after_json_dump)
    patch(torch, "save", recorder.wrap_save)
    patch(torch.serialization, "save", lambda _: torch.save)
    after_import("torch.utils.tensorboard.writer", recorder.patch_tensorboard)
