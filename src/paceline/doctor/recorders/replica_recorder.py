"""Everything that must be equal on all replicas of a model: weights, gradients, the optimizer's state and settings.

At some steps each rank records samples of these tensors (observe/digests.py), and the rules compare the ranks' samples.
One fault needs no comparison: weights changed between two steps, but not by the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.recorders.model_recorder import parameter_names
from paceline.doctor.recorders.shared_state import number_of
from paceline.observe.digests import sample
from paceline.observe.event_log import EventLog
from paceline.torch_private.core import BatchNormBase, buffers_of, unsaved_buffers, version_of

_MAX_TENSORS = 2000
_EVERY, _FIRST = 50, 4  # compare every 50th step, and the first 4 steps
_MAX_GRADIENTS = 400  # backward passes after which an optimizer's gradients are sampled
# Number of weights with a value in a fingerprint; maximum number of steps with fingerprints.
_FINGERPRINTED, _MAX_FINGERPRINTED_STEPS = 24, 2000
_MAX_BUFFERS = 64
_MAX_SHARDS = 100  # inspected shards per optimizer
_PRECISE = (torch.float32, torch.float64)  # an update of a shorter type may round to nothing
_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "alpha", "dampening", "nesterov", "amsgrad", "maximize")

Sample = dict[str, list[float]]


class ReplicaRecorder:
    """The samples of this process's optimizers."""

    def __init__(self, log: EventLog) -> None:
        self._log, self._models = log, log.shared.models
        self._names: Any = WeakIdKeyDictionary()  # parameter -> name; weak, because an id may be used again
        self._local_gradients: dict[int, Sample] = {}  # optimizer -> its gradients after the last backward
        self._local_norms: dict[int, float] = {}  # optimizer -> the norm of these gradients
        self._shards: dict[int, Sample] = {}  # optimizer -> its shards with gradients, before a step
        self._fingerprints: dict[int, tuple[int, str]] = {}  # optimizer -> fingerprint after its last step

    @staticmethod
    def is_compared(step: int) -> bool:
        """Are the ranks compared at this step (counted from 1)?"""
        return step <= _FIRST or (step & (step - 1)) == 0 or step % _EVERY == 0

    def after_backward(self, optimizers: Iterable[Any], made: Callable[[int], int]) -> None:
        """Sample the gradients right after a backward. made: an optimizer's number -> its steps so far."""
        for optimizer in optimizers:
            number = number_of(optimizer)
            if self.is_compared(made(number) + 1) and self._log.few("gradients", _MAX_GRADIENTS):
                self._local_gradients[number] = self._sample(optimizer, lambda p: p.grad)
                self._local_norms[number] = self._gradient_norm(optimizer)

    def before_step(self, optimizer: Any, number: int, made: int) -> dict[str, Any]:
        """Return fields of an optimizer's "before" event. made: the number of its steps so far."""
        if 0 < made <= _MAX_FINGERPRINTED_STEPS and self._fingerprint(optimizer) != self._fingerprints.get(number):
            self._log.record("moved", opt=number, step=made)
        if not self.is_compared(made + 1):
            return {"weights": None}
        self._shards[number] = self._shards_with_gradients(optimizer)
        return {
            "weights": self._sample(optimizer, lambda p: p),
            "own": self._local_gradients.pop(number, None),
            "own_norm": self._local_norms.pop(number, None),
            "grads": self._sample(optimizer, lambda p: p.grad),
            "settings": [{k: str(v) for k in _SETTINGS if (v := g.get(k)) is not None} for g in optimizer.param_groups],
            "outside": self._outside_ddp(optimizer),
            "made_at": self._made_at(optimizer) if made == 0 else None,
        }

    def after_step(self, optimizer: Any, number: int, made: int) -> dict[str, Any]:
        """Return fields of an optimizer's "step" event. made: the number of its steps so far."""
        self._local_gradients.pop(number, None)
        if made <= _MAX_FINGERPRINTED_STEPS:
            self._fingerprints[number] = self._fingerprint(optimizer)
        if not self.is_compared(made):
            return {"weights": None}
        self._models.before_forward = lambda: self._record_buffers(number, made)
        return {
            "weights": self._sample(optimizer, lambda p: p),
            "state": self._state(optimizer),
            "shards": self._which_moved(optimizer, self._shards.pop(number, {})),
        }

    def _gradient_norm(self, optimizer: Any) -> float:
        """The L2 norm of all gradients of an optimizer, except those of sharded parameters."""
        grads = [p.grad for p in parameters(optimizer) if p.grad is not None and self._is_full(p)]
        plain = [g.detach() for g in grads if g.layout is torch.strided and g.is_floating_point()]
        # in at least 32 bits, since the squares of 16 bits overflow; and on the host, since devices may differ
        norms = (torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in plain)
        return math.hypot(*map(float, norms))

    def _shards_with_gradients(self, optimizer: Any) -> Sample:
        """name -> sample of this rank's shard, for sharded parameters with a gradient that is not zero."""
        found: Sample = {}
        for name, p in self.named(optimizer)[:_MAX_SHARDS]:
            grad = p.grad
            if hasattr(p, "to_local") and grad is not None and hasattr(grad, "to_local") and p.dtype in _PRECISE:
                own = p.to_local()
                if own.numel() and bool(grad.to_local().detach().any()):
                    found[name] = sample(own)
        return found

    def _which_moved(self, optimizer: Any, before: Sample) -> dict[str, bool]:
        """name -> has the step changed this rank's shard? before: the shards before the step."""
        now = ((name, p) for name, p in self.named(optimizer) if name in before)
        return {name: sample(p.to_local()) != before[name] for name, p in now if hasattr(p, "to_local")}

    def _record_buffers(self, number: int, made: int) -> None:
        """Record buffers at the first forward after a step, when the script or a library has finished the step."""
        with self._log.overhead():
            found, sent = self._unbroadcast_buffers(), self._broadcast_buffers()
            if found or sent:
                self._log.record("buffers", opt=number, step=made, buffers=found, sent=sent)

    def _broadcast_buffers(self) -> Sample:
        """Buffers of the script's modules that DDP is about to overwrite with rank 0's buffers."""
        found: Sample = {}
        for ddp in self._models.ddp_modules:
            parts = ddp.module.named_modules() if ddp.broadcast_buffers else ()
            for name, module in parts:
                if not type(module).__module__.startswith("torch."):
                    found |= self._persistent_buffers(name, module)
        return dict(list(found.items())[:_MAX_BUFFERS])

    @staticmethod
    def _persistent_buffers(name: str, module: Any) -> Sample:
        """The buffers of a module that are in its state_dict."""
        return {
            f"{name}.{key}".lstrip("."): sample(buffer)
            for key, buffer in buffers_of(module).items()
            if buffer is not None and key not in unsaved_buffers(module)
            if buffer.is_floating_point() and buffer.numel() and buffer.layout is torch.strided
        }

    def _unbroadcast_buffers(self) -> Sample:
        """Buffers that are never sent to other ranks. Buffers of batch norm count only inside DDP with
        broadcast_buffers=False. Without DDP, batch norm has a separate finding."""
        found: Sample = {}
        wrapped = {id(ddp.module) for ddp in self._models.ddp_modules}
        for root in self._models.not_broadcast():
            for name, module in root.named_modules():
                if isinstance(module, BatchNormBase) and id(root) not in wrapped:
                    continue
                found |= self._persistent_buffers(name, module)
                if len(found) >= _MAX_BUFFERS:
                    return found
        for root in self._models.statistics():
            for name, module in root.named_modules():
                found |= self._persistent_buffers(f"{type(root).__name__}.{name}".rstrip("."), module)
        return dict(list(found.items())[:_MAX_BUFFERS])

    def _fingerprint(self, optimizer: Any) -> Any:
        """(the sum of the weights' version counters, one value of some weights). In-place operations increment the
        counters. A write to `.data` does not, but it changes values."""
        weights = [p for p in parameters(optimizer) if self._is_full(p) and p.numel()]
        some = [p.detach().reshape(-1)[0] for p in weights[:: max(1, len(weights) // _FINGERPRINTED)]]
        values = torch.stack([s.double() for s in some]).tolist() if some else []
        return sum(version_of(p) for p in weights), str(values)  # as text: NaN is not equal to NaN

    def _is_full(self, p: Any) -> bool:
        """Is the parameter a plain tensor that this process holds completely?"""
        return type(p) in (torch.nn.Parameter, torch.Tensor) and p not in self._models.sharded

    def _sample(self, optimizer: Any, of: Callable[[Any], torch.Tensor | None]) -> Sample:
        """name -> sample of `of(parameter)`. Sharded parameters are left out."""
        found: Sample = {}
        for name, p in self.named(optimizer)[:_MAX_TENSORS]:
            tensor = of(p) if self._is_full(p) else None
            if tensor is not None and tensor.layout is torch.strided and tensor.numel():
                found[name] = sample(tensor)
        return found

    def _state(self, optimizer: Any) -> Sample:
        """ "key of name" -> sample of each tensor in the optimizer's state."""
        found: Sample = {}
        for name, p in self.named(optimizer)[:_MAX_TENSORS]:
            for key, value in optimizer.state.get(p, {}).items() if self._is_full(p) else ():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
                    found[f"{key} of {name}"] = sample(value)
        return found

    def _outside_ddp(self, optimizer: Any) -> dict[str, Any]:
        """For each trained parameter that no DDP module reduces: name -> [line that unfroze or made the parameter, why
        DDP does not reduce it, call stack of its creation]."""
        models, found = self._models, {}
        for name, p in self.named(optimizer):
            if models.ddp_count and p.requires_grad and p not in models.ddp_of:
                at, before = models.made_at.get(p, ([], 0))
                thawed = models.unfrozen_at.get(p)
                wrapped = any(p is q for module in models.ddp_modules for q in module.parameters())
                how = "made after DDP wrapped the model" if before else "never part of a DDP module"
                if wrapped:
                    how = "added to the DDP module later" if before else "frozen when DDP wrapped the model"
                found[name] = [thawed or at, how, models.made_by.get(p, []) if before and not thawed else []]
        return found

    def _made_at(self, optimizer: Any) -> dict[str, Any]:
        """name -> the line that makes the parameter."""
        return {name: self._models.made_at.get(p, ([], 0))[0] for name, p in self.named(optimizer)[:_MAX_TENSORS]}

    def named(self, optimizer: Any) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) for each parameter of an optimizer. Names are unique, even if two models share names."""
        found: dict[str, torch.Tensor] = {}
        for place, p in enumerate(parameters(optimizer)):
            if p not in self._names:
                for q, name in parameter_names().items():
                    self._names.setdefault(q, name)
                self._names.setdefault(p, f"a parameter of shape {tuple(p.shape)}")
            name = self._names[p]
            found[f"{name} (number {place})" if name in found else name] = p
        return list(found.items())


def parameters(optimizer: Any) -> Any:
    return (p for group in optimizer.param_groups for p in group["params"])
