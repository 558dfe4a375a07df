"""Counts FLOPs, activations and outputs of layers in one global batch.

FLOPs: torch's FlopCounterMode (step/flops.py).

Activations: tensors that autograd saves for the backward, each storage once, without parameters and buffers. A tensor
belongs to the layer that runs when it is saved. The tensors that a checkpointed layer recomputes are not counted.

Live bytes: the storages that torch's operators make, until they are freed. Memory within an operator is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.step.flops import flop_counter
from paceline.strategies.tensor import tensor_plan
from paceline.torch_private.core import (
    TorchDispatchMode,
    compiled_call,
    compiled_wrapper,
)

TENSOR_SIZES = (2, 4, 8, 16)
MIN_PARAMETERS = 2**16  # smaller layers join the layer around them, as in fsdp


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, and in objects such as the outputs of Hugging Face's models."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make. now, most: their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()  # keys of the storages that live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in tensors_of((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for tensor in tensors_of(found):
            key = _key(tensor)
            if key and key not in given and key not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        self.most = max(self.most, self.now)
        return found

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; 0: none."""
    return tensor.untyped_storage().data_ptr() if _has_storage(tensor) else 0


class Inspection:
    """Counts between `begin` and `finish`. `saving` is entered around each forward.

    Args:
        models: the models, before any strategy has sharded them.
        layers: name -> the layers to count separately.
    """

    def __init__(self, models: Sequence[nn.Module], layers: Mapping[str, nn.Module]) -> None:
        self._models, self._layers = models, layers
        self.activations: dict[str, int] = dict.fromkeys(layers, 0)  # bytes of the largest micro-batch, by layer
        self.outside_activations = 0
        self.outputs: dict[str, int] = dict.fromkeys(layers, 0)  # bytes of each layer's output, over all micro-batches
        self.inputs = 0  # bytes that the models were called with, over all micro-batches
        self.flops: float | None = None
        self.flops_of: dict[str, float] = {}  # by the full name of a module
        self.attention_flops = 0.0
        self.cut_outputs: dict[str, int] = {}  # bytes of the outputs and inputs of layers that tensor may split
        self.cut_inputs: dict[str, int] = {}
        self._names = {module: name for name, module in layers.items()}
        self._stack: list[str] = []  # the layers that run
        self._ignored = {
            tensor.untyped_storage().data_ptr()
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
            if _has_storage(tensor)
        }
        self._saved: set[int] = set()  # storages saved in this micro-batch
        self._of_micro_batch: dict[str | None, int] = {}
        self._hooks: list[Any] = []
        self._counter: FlopCounterMode | None = None
        self._live: LiveBytes | None = None
        self.loss_live_bytes = 0  # the most in a forward, and a backward until it reaches a layer
        self.live_bytes = 0  # the most in the rest of a backward
        self._in_layers = False  # whether a backward has reached a layer
        self.update_bytes = 0  # the most in an update, beyond those at its beginning
        self._at_update = 0  # live bytes at the beginning of the update
        self.plans: dict[int, tensor_plan.Plan] = {}

    def begin(self) -> None:
        """Register the hooks and start the counter."""
        cuts: dict[nn.Module, str] = {}
        for size in TENSOR_SIZES:
            self.plans[size] = {}
            for number, model in enumerate(self._models):
                found, _ = tensor_plan.found(model, size)
                self.plans[size] |= {f"{number}.{name}": entry for name, entry in found.items()}
                cuts |= {module: f"{number}.{name}" for name, (module, _) in found.items()}
        for module, name in self._names.items():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            self._hooks.append(module.register_forward_hook(self._leaving(name), always_call=True))
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._called, with_kwargs=True))
        for module, name in cuts.items():
            self._hooks.append(module.register_forward_hook(self._split(name)))
        if not any(_is_compiled(model) for model in self._models):
            self._live = LiveBytes()
            self._live.__enter__()
            self._counter = flop_counter()
            self._counter.__enter__()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Count what autograd saves."""
        if self._in_layers:
            self._end_part()
            self._in_layers = False
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def end_micro_batch(self) -> None:
        """Keep the counts if this micro-batch saved most."""
        total = sum(self._of_micro_batch.values())
        if total > self.outside_activations + sum(self.activations.values()):
            self.activations = {name: self._of_micro_batch.get(name, 0) for name in self._layers}
            self.outside_activations = self._of_micro_batch.get(None, 0)
        self._of_micro_batch, self._saved = {}, set()

    def begin_update(self) -> None:
        """The backwards are over, and an update begins."""
        self._end_part()
        if self._live is not None:
            self._at_update = self._live.now

    def _end_part(self) -> None:
        """Note the most bytes of this part, of a forward and backward, and begin the next one."""
        if self._live is None:
            return
        if self._in_layers:
            self.live_bytes = max(self.live_bytes, self._live.most)
        else:
            self.loss_live_bytes = max(self.loss_live_bytes, self._live.most)
        self._live.most = self._live.now

    def _reached(self, gradient: Tensor) -> None:
        """A backward computes the gradients of a layer."""
        if not self._in_layers:
            self._end_part()
            self._in_layers = True

    def end_update(self) -> None:
        if self._live is not None:
            self.update_bytes = max(self.update_bytes, self._live.most - self._at_update)
            self._live.most = self._live.now

    def finish(self) -> None:
        """Remove the hooks and read the counter."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        assert self._live is not None
        self._live.__exit__(None, None, None)
        counts = counter.get_flop_counts()
        for number, model in enumerate(self._models):
            kind = type(model).__name__
            for name, _ in model.named_modules():
                found = counts.get(f"{kind}.{name}" if name else kind)
                self.flops_of[f"{number}.{name}"] = float(sum(found.values())) if found else 0.0
        whole = counts.get("Global", {})
        self.flops = float(sum(whole.values()))
        self.attention_flops = float(
            sum(count for operation, count in whole.items() if "attention" in str(operation) or "bmm" in str(operation))
        )

    def _save(self, tensor: Tensor) -> Tensor:
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place not in self._ignored and place not in self._saved:
                self._saved.add(place)
                layer = self._stack[-1] if self._stack else None
                self._of_micro_batch[layer] = self._of_micro_batch.get(layer, 0) + storage.nbytes()
        return tensor

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._stack.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            self.outputs[name] += _float_bytes(tensors_of(output))
            for tensor in tensors_of(output):
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(self._reached)

        return leave

    def _called(self, module: nn.Module, inputs: Any, named: Any) -> None:
        self.inputs += sum(tensor.nbytes for tensor in tensors_of((inputs, named)))

    def _split(self, name: str) -> Callable[..., None]:
        def count(module: nn.Module, inputs: Any, output: Any) -> None:
            self.cut_outputs[name] = self.cut_outputs.get(name, 0) + _float_bytes(tensors_of(output))
            self.cut_inputs[name] = self.cut_inputs.get(name, 0) + _float_bytes(tensors_of(inputs))

        return count


def _float_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())


def _has_storage(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses
        return False


def _is_compiled(model: nn.Module) -> bool:
    wrapper = compiled_wrapper()
    return any(
        compiled_call(module) is not None or (wrapper is not None and isinstance(module, wrapper))
        for module in model.modules()
    )
