"""Where the script makes its loaders, wrappers and optimizers, and the calls of an update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.weak import WeakIdKeyDictionary

from paceline.observe.patching import Patches
from paceline.observe.script_stack import ScriptStack


class ScriptPlaces:
    """The lines of the script, and the lengths of its loaders.

    Args:
        lengths: name of a loader -> its length in the subject run; None: this is the subject run.
        repeats: a loader of this run yields this number of batches for each batch of a rank.

    Attributes:
        lines: the lines of the current update, by kind of call.
        made: the lines that make loaders, samplers, wrappers and optimizers.
        lengths: name of a loader -> its length.
        wrapped: the modules in a DistributedDataParallel.
    """

    def __init__(
        self,
        stack: ScriptStack,
        patches: Patches,
        is_active: Callable[[], bool],
        lengths: Mapping[str, int] | None,
        repeats: int,
    ) -> None:
        self._stack, self._is_active, self._repeats = stack, is_active, repeats
        self._is_subject = lengths is None
        self.lines: dict[str, list[Any]] = {}
        self.made: dict[str, list[Any]] = {}
        self.lengths: dict[str, int] = dict(lengths or {})
        self.wrapped: Any = weakref.WeakSet()
        self._loaders_of: dict[str, int] = {}  # a line of the script -> the number of its last loader
        self._loader_names: Any = WeakIdKeyDictionary()
        patches.before(DataLoader, "__init__", self._number_loader)
        patches.wrap(DataLoader, "__len__", self._wrap_length)
        if self._is_subject:
            patches.before(DistributedDataParallel, "__init__", self._note_wrapper)
            patches.before(DistributedDataParallel, "no_sync", lambda _: self.note("no_sync"))
            patches.before(DistributedDataParallel, "register_comm_hook", partial(self._note_made, "comm_hook"))
            patches.before(DataLoader, "__init__", self._note_loader)
            patches.before(torch.optim.Optimizer, "__init__", partial(self._note_made, "optimizer"))
            patches.before(DistributedSampler, "__init__", partial(self._note_made, "sampler"))

    def note(self, what: str) -> None:
        """The script makes a call of this kind now."""
        if at := self._stack.caller():
            self.lines[what] = at

    def note_forward(self, module: nn.Module) -> None:
        """The script calls a model."""
        self.lines.setdefault("forward", self._stack.caller())
        if module in self.wrapped:
            self.lines.setdefault("past_wrapper", self._stack.caller(self._is_in_wrapped))

    def _is_in_wrapped(self, frame: FrameType) -> bool:
        """Whether a frame runs a method of a module in a DistributedDataParallel."""
        return frame.f_locals.get("self") in self.wrapped

    def _note_made(self, what: str, *_: Any, **__: Any) -> None:
        if at := self._stack.caller():
            self.made.setdefault(what, at)

    def _note_wrapper(self, _: Any, module: nn.Module, *__: Any, **___: Any) -> None:
        self.wrapped.update(module.modules())
        self.made["wrapper"] = self._stack.caller()

    def _note_loader(self, _: Any, dataset: Any, *__: Any, **___: Any) -> None:
        self._note_made("loader")
        code = getattr(getattr(type(dataset), "__iter__", None), "__code__", None)
        if code is not None and self._stack.owns(code.co_filename):
            self.made.setdefault("stream", [code.co_filename, code.co_firstlineno])

    def _number_loader(self, loader: Any, *_: Any, **__: Any) -> None:
        """Give a loader a name that is the same in all runs: the script's line, and a number for each loader of it."""
        line = ":".join(map(str, self._stack.caller()))
        self._loaders_of[line] = number = self._loaders_of.get(line, -1) + 1
        self._loader_names[loader] = f"{line} {number}"

    def _wrap_length(self, original: Any) -> Any:
        """A loader of one process has the length of a rank's: the script may count its batches."""

        def __len__(loader: Any) -> int:
            own = int(original(loader))
            name = self._loader_names.get(loader)
            if not self._is_active() or name is None:
                return own
            if self._is_subject:
                self.lengths[name] = own
                return own
            return int(self.lengths.get(name, own)) * self._repeats

        return __len__
