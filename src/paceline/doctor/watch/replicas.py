"""What must be alike on replicas of one model, at some steps: weights, gradients, the optimizer's state and settings.

A tensor is told by its size, two sums and a few of its values. What a process can see by itself is noted too: that its
weights changed between two steps, by nothing that the optimizer did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.watch.models import Models, names
from paceline.doctor.watch.notebook import Notebook
from paceline.torch_private.core import BatchNormBase, buffers_of, unsaved_buffers, version_of

_SAMPLE, _MOST_TENSORS = 6, 2000
_OFTEN, _FIRST = 50, 4  # every so many steps; all of the first
_MOST_GRADIENTS = 400  # samples of all gradients, in a run
_WITNESSES, _MOST_WITNESSED = 24, 2000  # tensors of which one value is kept from step to step; steps
_MOST_BUFFERS = 64
_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "alpha", "dampening", "nesterov", "amsgrad", "maximize")

Sample = dict[str, list[float]]


class Replicas:
    def __init__(self, book: Notebook, models: Models) -> None:
        self._book, self._models = book, models
        self._names: Any = WeakIdKeyDictionary()  # parameter -> name; a later one may get a dead one's id
        self._own: dict[int, Sample] = {}  # optimizer -> its gradients after the last backward
        self._gradients = 0
        self._seen: dict[int, tuple[int, str]] = {}  # optimizer -> versions, witnesses after its step

    @staticmethod
    def looked(step: int) -> bool:
        """Is this step, counted from 1, one of those that are compared?"""
        return step <= _FIRST or (step & (step - 1)) == 0 or step % _OFTEN == 0

    def backward(self, optimizers: Iterable[Any], made: Callable[[int], int]) -> None:
        """A backward has ended. made: the steps that an optimizer has made, by its number."""
        for optimizer in optimizers:
            number = optimizer.__dict__["_paceline_doctor"]
            if self.looked(made(number) + 1) and self._gradients < _MOST_GRADIENTS:
                self._gradients += 1
                self._own[number] = self._sample(optimizer, lambda p: p.grad)

    def before(self, optimizer: Any, number: int, made: int) -> dict[str, Any]:
        """At a step that is about to be made."""
        if 0 < made <= _MOST_WITNESSED and self._witness(optimizer) != self._seen.get(number):
            self._book.note("moved", opt=number, step=made)
        if not self.looked(made + 1):
            return {"weights": None}
        return {
            "weights": self._sample(optimizer, lambda p: p),
            "own": self._own.pop(number, None),
            "grads": self._sample(optimizer, lambda p: p.grad),
            "settings": [{k: str(v) for k in _SETTINGS if (v := g.get(k)) is not None} for g in optimizer.param_groups],
            "outside": self._outside(optimizer),
            "made_at": self._made_at(optimizer) if made == 0 else None,
        }

    def after(self, optimizer: Any, number: int, made: int) -> dict[str, Any]:
        """At a step that has been made."""
        self._own.pop(number, None)
        if made <= _MOST_WITNESSED:
            self._seen[number] = self._witness(optimizer)
        if not self.looked(made):
            return {"weights": None}
        self._models.due = lambda: self._note_buffers(number, made)
        return {"weights": self._sample(optimizer, lambda p: p), "state": self._state(optimizer)}

    def _note_buffers(self, number: int, made: int) -> None:
        """At the first forward after a step: what the script, or a library, does after its steps has been done."""
        with self._book.aside():
            found, sent = self._buffers(), self._sent_buffers()
            if found or sent:
                self._book.note("buffers", opt=number, step=made, buffers=found, sent=sent)

    def _sent_buffers(self) -> Sample:
        """Those of the script's own modules that DDP is about to overwrite with rank 0's."""
        found: Sample = {}
        for ddp in self._models.alive:
            parts = ddp.module.named_modules() if ddp.broadcast_buffers else ()
            for name, module in parts:
                if not type(module).__module__.startswith("torch."):
                    found |= self._kept(name, module)
        return dict(list(found.items())[:_MOST_BUFFERS])

    @staticmethod
    def _kept(name: str, module: Any) -> Sample:
        """The buffers of a module that a checkpoint has."""
        return {
            f"{name}.{key}".lstrip("."): sample(buffer)
            for key, buffer in buffers_of(module).items()
            if buffer is not None and key not in unsaved_buffers(module)
            if buffer.is_floating_point() and buffer.numel() and buffer.layout is torch.strided
        }

    def _buffers(self) -> Sample:
        """Those of models that nothing sends to the other ranks. Batch norm's only where DDP was told not to send them:
        elsewhere its statistics are a finding of their own."""
        found: Sample = {}
        wrapped = {id(ddp.module) for ddp in self._models.alive}
        for root in self._models.unsent():
            for name, module in root.named_modules():
                if isinstance(module, BatchNormBase) and id(root) not in wrapped:
                    continue
                found |= self._kept(name, module)
                if len(found) >= _MOST_BUFFERS:
                    return found
        return found

    def _witness(self, optimizer: Any) -> Any:
        """The versions of all weights, which in-place operations count up, and a value of some: `.data` counts none."""
        weights = [p for p in parameters(optimizer) if self._whole(p) and p.numel()]
        some = [p.detach().reshape(-1)[0] for p in weights[:: max(1, len(weights) // _WITNESSES)]]
        values = torch.stack([s.double() for s in some]).tolist() if some else []
        return sum(version_of(p) for p in weights), str(values)  # as text, in which NaN is NaN

    def _whole(self, p: Any) -> bool:
        return type(p) in (torch.nn.Parameter, torch.Tensor) and p not in self._models.sharded

    def _sample(self, optimizer: Any, of: Callable[[Any], torch.Tensor | None]) -> Sample:
        """name -> [elements, sum of magnitudes, sum, some values]; not of parameters that are cut over processes."""
        found: Sample = {}
        for name, p in self.named(optimizer)[:_MOST_TENSORS]:
            tensor = of(p) if self._whole(p) else None
            if tensor is not None and tensor.layout is torch.strided and tensor.numel():
                found[name] = sample(tensor)
        return found

    def _state(self, optimizer: Any) -> Sample:
        found: Sample = {}
        for name, p in self.named(optimizer)[:_MOST_TENSORS]:
            for key, value in optimizer.state.get(p, {}).items() if self._whole(p) else ():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
                    found[f"{key} of {name}"] = sample(value)
        return found

    def _outside(self, optimizer: Any) -> dict[str, Any]:
        """Of its parameters that no DDP module reduces: name -> [line where it was unfrozen or made, which of them]."""
        models, found = self._models, {}
        for name, p in self.named(optimizer):
            if models.made and p.requires_grad and p not in models.members:
                at, before = models.made_at.get(p, ([], 0))
                thawed = models.thawed_at.get(p)
                wrapped = any(p is q for module in models.alive for q in module.parameters())
                how = "made after it" if before else "trained by the optimizer beside DDP's"
                if wrapped:
                    how = "added to its module later" if before else "frozen when it wrapped their module"
                found[name] = [thawed or at, how]
        return found

    def _made_at(self, optimizer: Any) -> dict[str, Any]:
        return {name: self._models.made_at.get(p, ([], 0))[0] for name, p in self.named(optimizer)[:_MOST_TENSORS]}

    def named(self, optimizer: Any) -> list[tuple[str, torch.Tensor]]:
        """Its parameters, each under a name of its own: two models may have the same ones."""
        found: dict[str, torch.Tensor] = {}
        for place, p in enumerate(parameters(optimizer)):
            if p not in self._names:
                for q, name in names().items():
                    self._names.setdefault(q, name)
                self._names.setdefault(p, f"a parameter of shape {tuple(p.shape)}")
            name = self._names[p]
            found[f"{name} (number {place})" if name in found else name] = p
        return list(found.items())


def sample(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].double()
    size = torch.stack([flat.abs().sum(dtype=torch.float64), flat.sum(dtype=torch.float64)])
    return [flat.numel(), *torch.cat([size, taken]).tolist()]


def parameters(optimizer: Any) -> Any:
    return (p for group in optimizer.param_groups for p in group["params"])
