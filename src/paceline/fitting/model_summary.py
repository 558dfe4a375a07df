"""paceline.summary: the layers of a model, their output shapes and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import generators
from paceline.errors import SettingError, UsageError, check_whole
from paceline.metrics.metrics import evaluating


@dataclass
class LayerSummary:
    """One module of a model."""

    name: str  # as in named_modules; "" is the model itself
    kind: str  # its class
    depth: int  # 0 is the model
    trainable: int  # number of trainable parameters, without its children's
    frozen: int  # number of frozen parameters, without its children's
    output: str | None = None  # shape of its output, or of each tensor in the output; None: it was not called
    calls: int = 0  # number of calls of its forward


@dataclass(frozen=True)
class Summary:
    """The layers of a model. str() is a table.

    Attributes:
        layers: a LayerSummary for each module, in the order of named_modules.
        trainable, frozen: number of parameters; a shared parameter counts once.
        parameter_bytes, buffer_bytes: size of the parameters and of the buffers in memory.
        depth: depth of the table.
    """

    layers: list[LayerSummary]
    trainable: int
    frozen: int
    parameter_bytes: int
    buffer_bytes: int
    depth: int = 3

    @property
    def parameters(self) -> int:
        """Number of parameters, trainable and frozen."""
        return self.trainable + self.frozen

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "output", "trainable", "frozen")]
        for one in self.layers:
            if one.depth <= self.depth:
                label = "  " * one.depth + (f"{one.name.rpartition('.')[2]}: " if one.name else "") + one.kind
                times = f" x{one.calls}" if one.calls > 1 else ""
                deeper = [one] if one.depth < self.depth else list(self._below(one))
                counts = [sum(each) for each in zip(*((two.trainable, two.frozen) for two in deeper), strict=True)]
                rows.append((label, (one.output or "") + times, *(f"{count:,}" if count else "" for count in counts)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        total = f"{self.parameters:,} parameters: {self.trainable:,} trainable, {self.frozen:,} frozen"
        memory = f"{_bytes(self.parameter_bytes)} of parameters, {_bytes(self.buffer_bytes)} of buffers"
        return "\n".join([lines[0], rule, *lines[1:], rule, total, memory])

    def _below(self, layer: LayerSummary) -> Iterator[LayerSummary]:
        """The layer, and the layers inside it."""
        inside = f"{layer.name}." if layer.name else ""
        return (one for one in self.layers if one is layer or one.name.startswith(inside))


def summary(model: nn.Module, batch: Any = None, *, depth: int = 3) -> Summary:
    """Lists the layers of a model, with their trainable and frozen parameters: print(paceline.summary(model)).

    Args:
        model: pass it before `prepare`, because a strategy may shard it.
        batch: an input, to show the shapes of the outputs. The model is called once with it, in evaluation mode and
            without gradients: model(*batch) for a tuple, model(**batch) for a dict, else model(batch). Afterwards
            generators, modes and buffers are restored. None: show no shapes.
        depth: depth of the table. Parameters of deeper layers are added to its last level.

    Raises SettingError if model is not a module, and UsageError if its parameters are sharded.
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"summary({type(model).__name__}): pass a torch.nn.Module.")
    check_whole("summary", "depth", depth, least=0)
    if any(hasattr(p, "placements") for p in model.parameters()):
        raise UsageError("summary: the parameters of this model are already sharded. Call it before run.prepare.")
    counted: set[Tensor] = set()
    layers: dict[nn.Module, LayerSummary] = {}
    for name, module in model.named_modules():
        new = [p for p in module.parameters(recurse=False) if p not in counted]
        counted.update(new)
        sizes = {wanted: sum(p.numel() for p in new if p.requires_grad is wanted) for wanted in (True, False)}
        place = name.count(".") + 1 if name else 0
        layers[module] = LayerSummary(name, type(module).__name__, place, sizes[True], sizes[False])
    if batch is not None:
        _call(model, batch, layers)
    found = list(layers.values())
    return Summary(
        found,
        sum(one.trainable for one in found),
        sum(one.frozen for one in found),
        sum(p.numel() * p.element_size() for p in counted),
        sum(b.numel() * b.element_size() for b in model.buffers()),
        depth,
    )


def _call(model: nn.Module, batch: Any, layers: Mapping[nn.Module, LayerSummary]) -> None:
    """Call the model once, and record the shapes of its layers' outputs."""

    def noting(layer: LayerSummary) -> Callable[[Any, Any, Any], None]:
        def note(module: Any, inputs: Any, output: Any) -> None:
            layer.output, layer.calls = ", ".join(_shapes(output)) or None, layer.calls + 1

        return note

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    hooks = [module.register_forward_hook(noting(layer)) for module, layer in layers.items()]
    before = generators.get_state(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with evaluating(model):
            if isinstance(batch, tuple):
                model(*batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        generators.set_state(before, device)
        for hook in hooks:
            hook.remove()


def _shapes(output: Any) -> Iterator[str]:
    """The shapes of the tensors in an output."""
    if isinstance(output, Tensor):
        yield "(" + ", ".join(map(str, output.shape)) + ")"
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _shapes(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _shapes(value)


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
