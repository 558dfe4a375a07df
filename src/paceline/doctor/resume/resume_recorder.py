"""Record what a resumed training must continue with: the state before each update, and what the update was made from.

Each call of an optimizer's `step` is one update. The event "update" has these fields:

optimizer       the optimizer's number, in the order of the first updates
state           {group: {name: [digest, dtype, *some elements]}} before the update. The groups are "weight" and
                "buffer", "copy" for modules with the shapes of a trained model (a moving average), all at the first
                forward since the last update, or before an update without a forward; and the keys of the optimizer's
                state ("exp_avg")
options         the numbers of each parameter group, with the learning rate
scale           the scale of each GradScaler
inputs          for each forward since the last update: the digest of each row of its inputs that need no gradient
indices         for each batch that a DataLoader has yielded since the last update: the indices of its examples
random          {generator: digest of its state} at the first of these forwards
gradients       {parameter: digest} after the update
files           a digest of the names, sizes and times of the files in the checkpoint folder after the update; "" if
                there are none
half            the half precision in which all weights can be written without loss, or ""

The event "load" records a call that restores something. Digests read up to ELEMENTS elements of each tensor.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader

from paceline.comm import dtensor
from paceline.observe.digests import digest, tensors_in
from paceline.observe.event_log import EventLog
from paceline.observe.script_stack import ScriptStack, module_files
from paceline.observe.trained_tensors import TrainedTensors, plain_name, whole
from paceline.torch_private.observed import NEXT_INDEX, LoaderIterator, scale_of

ELEMENTS = 1 << 16
_SHOWN = 16  # elements of a tensor that are recorded as numbers
_ROWS = 512  # rows of a forward's inputs that are recorded
_HALF_CHECKS = 2  # updates whose weights are compared with their half precision


class StepLimitReached(SystemExit):
    """Ends the script: it has made the requested updates."""


def install(order: dict[str, Any], kind: str, script: str) -> None:
    """Start to record. Call it once, as soon as torch has been imported.

    Args:
        order: "directory": the folder of the records. "steps": end the script after this number of updates, or None.
            "checkpoints": the folder that the script writes checkpoints into. "kill": kill all ranks this number of
            updates after the first checkpoint has appeared, or None.
        kind: "script" or "module".
        script: the path of the script, or the module's name.
    """
    roots = [os.path.realpath(script)] if kind == "script" else [*module_files(script), os.getcwd()]
    rank = int(os.environ.get("RANK", "0"))
    log = EventLog(os.path.join(order["directory"], f"rank-{rank}.jsonl"), ScriptStack(roots))
    _ResumeRecorder(order, log, rank).install()


class _ResumeRecorder:
    def __init__(self, order: dict[str, Any], log: EventLog, rank: int) -> None:
        self._order, self._log, self._rank = order, log, rank
        self._trained = TrainedTensors()
        self._modules: Any = weakref.WeakSet()  # all modules, to find copies of a trained model
        self._scalers: Any = weakref.WeakSet()
        self._in_forward: nn.Module | None = None
        self._depth = 0  # nested calls of optimizers' `step`
        self._updates = 0
        self._since = -1  # updates since the first checkpoint has appeared
        self._state: dict[str, dict[str, Any]] = {}  # of the models, at the first forward since the last update
        self._before: dict[str, Any] = {}  # the fields that are read before the update
        self._names: list[str] = []  # of the optimizer's parameters, before the update
        self._moments: dict[str, dict[str, Any]] = {}  # the optimizer's state, by the parameters' names at that time
        self._inputs: list[list[str]] = []
        self._indices: list[list[int] | None] = []
        self._random: dict[str, str] = {}
        self._waiting: Any = weakref.WeakKeyDictionary()  # iterator -> indices of the batches that it has asked for

    def install(self) -> None:
        with open(os.path.join(self._order["directory"], f"pid-{self._rank}"), "w") as file:
            file.write(str(os.getpid()))
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        optim.register_optimizer_step_pre_hook(self._before_update)
        optim.register_optimizer_step_post_hook(self._after_update)
        patches = self._log.patches
        patches.after(nn.Module, "__init__", lambda module, *_, **__: self._modules.add(module))
        patches.after(nn.Module, "__setstate__", lambda module, *_: self._modules.add(module))
        patches.after(torch.amp.GradScaler, "__init__", lambda scaler, *_, **__: self._scalers.add(scaler))
        patches.around(LoaderIterator, NEXT_INDEX, self._on_indices)
        patches.after(LoaderIterator, "__next__", self._on_batch)
        patches.before(DataLoader, "__iter__", lambda *_: self._note("loader"))
        for owner, name, what in (
            (torch, "load", "file"),
            (nn.Module, "load_state_dict", "model"),
            (torch.optim.Optimizer, "load_state_dict", "optimizer"),
            (torch.optim.lr_scheduler.LRScheduler, "load_state_dict", "scheduler"),
            (torch.amp.GradScaler, "load_state_dict", "scaler"),
            (torch, "set_rng_state", "random"),
        ):
            patches.before(owner, name, lambda *_, what=what, **__: self._note(what))

    def _note(self, what: str) -> None:
        if self._log.few(what, 20):
            self._log.record("load", what=what)

    # --- examples

    def _on_indices(self, iterator: Any) -> Generator[None, Any, None]:
        found = yield
        indices = list(found) if isinstance(found, (list, tuple)) else None
        numbers = indices is not None and all(isinstance(one, int) for one in indices)
        self._waiting.setdefault(iterator, deque()).append(indices if numbers else None)

    def _on_batch(self, iterator: Any) -> None:
        waiting = self._waiting.get(iterator)
        if torch.is_grad_enabled():
            self._indices.append(waiting.popleft() if waiting else None)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._in_forward is not None or not self._log.active or not torch.is_grad_enabled() or not module.training:
            return
        self._in_forward = module
        # a global hook gets no keyword arguments: they are in the frame of the module's call
        options = sys._getframe(1).f_locals.get("kwargs", {})
        with self._log.overhead():
            known = len(self._trained.models)
            if not self._trained.has_parameters_of(module):
                self._trained.add_model(module)
            if not self._inputs:
                self._random, self._state = _random_states(), self._state_of_models()
            elif len(self._trained.models) > known:
                for group, tensors in self._state_of_models().items():
                    self._state[group] = {**tensors, **self._state.get(group, {})}
            self._inputs.append(_rows((args, options)))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_forward is not module:
            return
        self._in_forward = None

    # --- updates

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._depth += 1
        if self._depth > 1 or not self._log.active:
            return
        if self._order["steps"] is not None and self._updates >= self._order["steps"]:
            raise StepLimitReached(0)
        with self._log.overhead():
            if not self._state and closure is None:  # this is the second update since a forward
                self._state = self._state_of_models()
            self._before = {
                "optimizer": self._trained.number_of(optimizer),
                "options": [_numbers(group) for group in optimizer.param_groups],
                "scale": [scale for scaler in self._scalers if (scale := scale_of(scaler)) is not None],
                "half": self._half() if self._updates < _HALF_CHECKS else "",
            }
            self._names = list(self._trained.parameters(optimizer))
            self._moments = {}
            for key, tensor in whole(self._trained.optimizer_state(optimizer)).items():
                group, _, name = key.partition(" ")
                self._moments.setdefault(group, {})[name] = _describe(tensor)

    @torch.no_grad()
    def _state_of_models(self) -> dict[str, dict[str, Any]]:
        """Describe weights, buffers and copies. All ranks call it together."""
        found: dict[str, dict[str, Any]] = {}
        buffers = self._trained.buffers()
        for name, tensor in whole(self._trained.tensors()).items():
            found.setdefault("buffer" if name in buffers else "weight", {})[name] = _describe(tensor)
        for number, copy in enumerate(self._copies()):
            for name, tensor in whole(copy.state_dict()).items():
                found.setdefault("copy", {})[f"{number}/{plain_name(name)}"] = _describe(tensor)
        return found

    def _moments_by_name(self, optimizer: Any) -> dict[str, dict[str, Any]]:
        """The optimizer's state before the update. A closure's forward may have named the parameters since then."""
        names = dict(zip(self._names, self._trained.parameters(optimizer), strict=False))
        return {
            group: {names.get(name, name): value for name, value in tensors.items()}
            for group, tensors in self._moments.items()
        }

    def _copies(self) -> list[nn.Module]:
        """Modules outside the trained models that have the parameter shapes of one of them."""
        known = {id(module) for model in self._trained.models for module in model.modules()}
        shapes = [_shapes(model) for model in self._trained.models]
        others = [module for module in self._modules if id(module) not in known and next(module.children(), None)]
        inner = {id(child) for module in others for child in module.children()}
        return [m for m in others if id(m) not in inner and any(_shapes(m) == one for one in shapes if one)]

    @torch.no_grad()
    def _half(self) -> str:
        weights = [
            tensor.detach()
            for name, tensor in whole(self._trained.tensors()).items()
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float32 and tensor.dim() > 1
        ]
        for dtype in (torch.float16, torch.bfloat16):
            if weights and all(torch.equal(w.to(dtype).float(), w) for w in weights):
                return str(dtype).removeprefix("torch.")
        return ""

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth or not self._log.active or not self._before:
            return
        if not self._updates and not self._inputs:
            return  # torch.distributed.checkpoint makes an optimizer's state by a step without a forward
        self._updates += 1
        with self._log.overhead():
            grads = {
                name: dtensor.local(p.grad)
                for name, p in self._trained.parameters(optimizer).items()
                if p.grad is not None
            }
            files = _listing(self._order["checkpoints"])
            self._log.record(
                "update",
                now=True,
                **self._before,
                state={**self._state, **self._moments_by_name(optimizer)},
                inputs=self._inputs,
                indices=self._indices,
                random=self._random,
                gradients={name: digest(grad, most=ELEMENTS) for name, grad in grads.items()},
                files=files,
            )
            self._before, self._state, self._inputs, self._indices, self._random = {}, {}, [], [], {}
            if files or self._since >= 0:
                self._since += 1
        if self._rank == 0 and self._order["kill"] is not None and self._since >= self._order["kill"]:
            self._kill()

    def _kill(self) -> None:
        """Kill all ranks of this machine at once, as a loss of power does."""
        folder = self._order["directory"]
        others = [name for name in os.listdir(folder) if name.startswith("pid-") and name != f"pid-{self._rank}"]
        with open(os.path.join(folder, "killed"), "w") as file:
            file.write(str(self._updates))
        for name in others:
            with open(os.path.join(folder, name)) as file:
                os.kill(int(file.read()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def _describe(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SHOWN)][:_SHOWN].double().cpu().nan_to_num().tolist()
    return [digest(tensor, most=ELEMENTS), str(tensor.dtype).removeprefix("torch."), *some]


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in module.parameters()]


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    found = {k: v for k, v in group.items() if k != "params" and isinstance(v, (int, float, Tensor))}
    return {k: float(v) for k, v in found.items() if not isinstance(v, Tensor) or v.numel() == 1}


def _rows(args: Any) -> list[str]:
    """The digest of each row of the inputs of a forward, without activations, such as the first input of a loss."""
    tensors = [tensor for tensor in tensors_in(args) if tensor.dim() and not tensor.requires_grad]
    if not tensors:
        return []
    count = len(tensors[0])
    equal = [tensor for tensor in tensors if len(tensor) == count]
    return [digest(*(tensor[row] for tensor in equal), most=ELEMENTS) for row in range(min(count, _ROWS))]


def _random_states() -> dict[str, str]:
    found = {"torch": digest(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["torch.cuda"] = digest(torch.cuda.get_rng_state())
    found["numpy"] = hashlib.sha1(repr(np.random.get_state()).encode(), usedforsecurity=False).hexdigest()[:16]
    found["random"] = hashlib.sha1(repr(random.getstate()).encode(), usedforsecurity=False).hexdigest()[:16]
    return found


def _listing(folder: str) -> str:
    """A digest of the names, sizes and times of the files in a folder, or ""."""
    made, some = hashlib.sha1(usedforsecurity=False), False
    for base, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            try:
                about = os.stat(os.path.join(base, name))
            except OSError:  # removed meanwhile
                continue
            made.update(f"{base}/{name} {about.st_size} {about.st_mtime_ns}\n".encode())
            some = True
    return made.hexdigest()[:16] if some else ""
