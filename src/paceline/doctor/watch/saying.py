"""What the script says, and what it saves: print, sys.stdout, text files, logging, TensorBoard; torch.save."""

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

from paceline.doctor.watch.imports import after_import
from paceline.doctor.watch.notebook import Notebook, put

_NUMBER = re.compile(r"\d")
_VALUE = re.compile(r"\d\.\d")  # no count, as a bar of progress has
_PLAIN = (str, int, float, torch.Tensor, np.generic, dict, list, tuple)
_MOST = 3000
_PREFIX = "module."


class _Saying:
    def __init__(self, book: Notebook) -> None:
        self.book = book
        self._said = 0
        self._printing = False

    def _say(self, how: str, text: str, at: list[Any]) -> None:
        if at and self._said < _MOST and _NUMBER.search(text):
            self._said += 1
            self.book.note("said", at=at, how=how, text=text[:120])

    def printed(self, original: Any) -> Any:
        def print(*args: Any, **options: Any) -> None:
            self._printing = True  # it writes to sys.stdout
            try:
                original(*args, **options)
            finally:
                self._printing = False
            if self.book.watching and self._said < _MOST:
                text = " ".join(str(a) for a in args if isinstance(a, _PLAIN))
                self._say("print", text, self.book.at())

        return print

    def written(self, original: Any) -> Any:
        """What comes to sys.stdout in other ways: its write, tqdm.write, rich."""

        def write(text: str) -> Any:
            if not self._printing and self.book.watching and _VALUE.search(text):
                self._say("sys.stdout", text, self.book.at())
            return original(text)

        return write

    def opened(self, original: Any) -> Any:
        """A text file that the script itself opens for writing: what comes into it is not seen."""

        def open(*args: Any, **options: Any) -> Any:
            file = original(*args, **options)
            mode = getattr(file, "mode", "")
            if self.book.watching and isinstance(mode, str) and mode[:1] in ("w", "a", "x") and self._said < _MOST:
                at = self.book.at()
                if at:
                    self._said += 1
                    path = str(getattr(file, "name", ""))
                    if "b" not in mode and at[0] == sys._getframe(1).f_code.co_filename:
                        self.book.note("said", at=at, how="file", text=f"into {os.path.basename(path)}", path=path)
                    else:
                        self.book.note("wrote", at=at, path=path)
            return file

        return open

    def logged(self, original: Any) -> Any:
        def handle(logger: Any, /, record: Any) -> None:
            original(logger, record)
            if self.book.watching and self._said < _MOST:
                self._say("logging", record.getMessage(), self.book.at())

        return handle

    def dumped(self, original: Any) -> Any:
        def dump(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self.book.watching and self._said < _MOST:
                self._say("json.dump", str(args[0] if args else options.get("obj"))[:200], self.book.at())
            return result

        return dump

    def tensorboard(self, module: Any) -> None:
        put(module.SummaryWriter, "add_scalar", self.scalar)

    def scalar(self, original: Any) -> Any:
        def add_scalar(*args: Any, **options: Any) -> Any:
            if self.book.watching:
                told = " ".join(map(str, (*args[1:3], *options.values())))
                self._say("TensorBoard", told, self.book.at())
            return original(*args, **options)

        return add_scalar

    # --- checkpoints

    def saved(self, original: Any) -> Any:
        def save(*args: Any, **options: Any) -> Any:
            if not self.book.watching:
                return original(*args, **options)
            began = self.book.clock()
            result = original(*args, **options)
            seconds = self.book.clock() - began
            with self.book.aside():
                value, file = (*args, *(options.get(name) for name in ("obj", "f")[len(args) :]))[:2]
                path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
                where = os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
                size = os.path.getsize(where) if where and os.path.isfile(where) else 0
                self.book.note("save", path=where, bytes=size, seconds=seconds, wrapped=_wrapped(value))
            return result

        return save


def _wrapped(value: Any, depth: int = 0) -> str:
    """A name that begins with DDP's `module.`, where all names of tensors in some dictionary do."""
    if not isinstance(value, dict) or depth > 3:
        return ""
    names = [str(name) for name, item in value.items() if isinstance(item, torch.Tensor)]
    if names and len(names) == len(value) and all(name.startswith(_PREFIX) for name in names):
        return names[0]
    return next((found for item in value.values() if (found := _wrapped(item, depth + 1))), "")


def watch(book: Notebook) -> None:
    saying = _Saying(book)
    put(builtins, "print", saying.printed)
    put(builtins, "open", saying.opened)
    if isinstance(sys.stdout, io.TextIOWrapper):
        put(sys.stdout, "write", saying.written)
    put(logging.Logger, "handle", saying.logged)
    put(json, "dump", saying.dumped)
    put(torch, "save", saying.saved)
    put(torch.serialization, "save", lambda _: torch.save)
    after_import("torch.utils.tensorboard.writer", saying.tensorboard)
