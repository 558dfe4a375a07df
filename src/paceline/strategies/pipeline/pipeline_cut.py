"""The units of a model between which a pipeline can cut it, and the choice of the cuts.

Units are called one after the other, each with what the one before returned. Those of an nn.Sequential are its layers.
Of another model torch.fx traces the forward, with every sub-module as one call: a cut is possible wherever a single
value is used later. So a residual connection stays within its unit. A model that cannot be traced, or has no such
place, is refused.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.errors import ModelError, SettingError
from paceline.torch_private.core import children_of


class UnseenError(ModelError):
    """torch.fx cannot trace the forward, or its input or output is not one tensor."""


class Units:
    """The units of a model, in order. mode: the value of the model's `training` for which they are right; None:
    both."""

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], mode: bool | None = None) -> None:
        self.modules, self.names, self.mode = list(modules), list(names), mode

    def __len__(self) -> int:
        return len(self.names)


def units_of(model: nn.Module) -> Units:
    """Raises ModelError for a model that cannot be taken apart."""
    kind = own_class(model)
    if kind.forward is nn.Sequential.forward:
        # By their registration: children() names a layer that stands twice only once.
        layers = [(name, layer) for name, layer in children_of(model).items() if layer is not None]
        return Units([layer for _, layer in layers], [name for name, _ in layers])
    graphs = {mode: _traced(model, kind, mode) for mode in (not model.training, model.training)}
    alike = str(graphs[True]) == str(graphs[False])
    parts = _segments(model, graphs[model.training])
    if parts is None:
        raise UnseenError(f"strategy pipeline: the forward of {kind.__name__} returns something else than one tensor.")
    if len(parts) < 2:
        raise ModelError(
            f"strategy pipeline: the forward of {kind.__name__} has no place between its layers where a single tensor "
            "is all that is needed later. Make it an nn.Sequential of blocks, or use another strategy, such as ddp."
        )
    return Units([module for module, _ in parts], [name for _, name in parts], None if alike else model.training)


def has_optional_tensors(model: nn.Module) -> bool:
    """Whether the forward has optional arguments that may be tensors, such as a mask."""
    parameters = list(inspect.signature(own_class(model).forward).parameters.values())[1:]
    return any(p.default is None for p in parameters)


def own_class(model: nn.Module) -> type[nn.Module]:
    """The user's class. Precision may have made a subclass, of the same name."""
    cls = type(model)
    while "forward" in vars(cls) and cls.__qualname__ == cls.__bases__[0].__qualname__:
        cls = cls.__bases__[0]
    return cls


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(model: nn.Module, kind: type[nn.Module], training: bool) -> fx.Graph:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) != 1:
        raise UnseenError(
            f"strategy pipeline: the forward of {kind.__name__} takes {len(needed)} arguments; a pipeline's first "
            "stage takes one tensor. Pack them into one, or use another strategy, such as ddp."
        )
    others = {p.name: p.default for p in parameters if p.default is not p.empty}
    wrapped, was = type(model), model.training
    model.__class__, model.training = kind, training
    try:
        graph = _Tracer().trace(model, concrete_args=others or None)
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        raise UnseenError(
            f"strategy pipeline: torch.fx cannot see how the forward of {kind.__name__} calls its layers "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Make it an nn.Sequential "
            "of blocks, move what depends on values into one of its layers, or use another strategy, such as ddp."
        ) from error
    finally:
        model.__class__, model.training = wrapped, was
    # Arguments with defaults, and torch.fx's checks that they have these values.
    given = [node for node in graph.nodes if node.op == "placeholder"][1:]
    for node in [*graph.nodes]:
        given += [node] if node not in given and any(argument in given for argument in node.all_input_nodes) else []
    for node in reversed(given):
        graph.erase_node(node)
    return graph


def _segments(model: nn.Module, graph: fx.Graph) -> list[tuple[nn.Module, str]] | None:
    """The graph in segments: modules of one argument and one result, with names. None where the output is no single
    value."""
    nodes = [node for node in graph.nodes if node.op not in ("output", "get_attr") and node.users]
    place = {node: number for number, node in enumerate(graph.nodes)}
    (output,) = [node for node in graph.nodes if node.op == "output"]
    (inputs,) = [node for node in nodes if node.op == "placeholder"]
    last = {node: max(place[user] for user in node.users) for node in nodes}
    cuts = [inputs]
    for node in nodes:
        alive = [other for other in nodes if place[other] <= place[node] < last[other]]
        if node.op != "placeholder" and alive == [node]:
            cuts.append(node)
    if not isinstance(output.args[0], fx.Node):
        return None
    if cuts[-1] is not output.args[0]:
        return []
    return [_segment(model, graph, start, end) for start, end in pairwise(cuts)]


def _segment(model: nn.Module, graph: fx.Graph, start: fx.Node, end: fx.Node) -> tuple[nn.Module, str]:
    piece = fx.Graph()
    made = {start: piece.placeholder("x")}
    order = list(graph.nodes)
    inside = order[order.index(start) + 1 : order.index(end) + 1]
    attributes = [node for node in order if node.op == "get_attr" and any(user in inside for user in node.users)]
    for node in (*attributes, *(node for node in inside if node.op not in ("placeholder", "get_attr"))):
        made[node] = piece.node_copy(node, made.__getitem__)
    piece.output(made[end])
    calls = [str(node.target) for node in inside if node.op == "call_module"]
    return fx.GraphModule(model, piece), calls[-1] if calls else end.name


# --- which of the possible cuts


def boundaries(units: Units, stages: int, cut: str, sizes: Sequence[float] | None) -> list[int]:
    """Where the stages begin, with 0 first and the number of units last. cut: "2,4", or names of units; if not given,
    so that the largest sum of `sizes` in a stage is as small as can be. Raises SettingError or ModelError."""
    if len(units) < stages:
        raise ModelError(
            f"strategy pipeline: the model has {len(units)} layers that can stand in different stages "
            f"({', '.join(units.names[:8])}), too few for {stages} stages. Set stages, or start fewer processes."
        )
    if cut:
        starts = [_number(units, part.strip()) for part in cut.split(",")]
        whole = [0, *starts, len(units)]
        if len(starts) != stages - 1 or any(a >= b for a, b in pairwise(whole)):
            raise SettingError(
                f"strategy pipeline: cut={cut!r}: {stages} stages need {stages - 1} places where a new one begins, in "
                f"order, from 1 to {len(units) - 1}, or names of: {', '.join(units.names)}."
            )
        return whole
    assert sizes is not None
    return balanced(sizes, stages)


def _number(units: Units, text: str) -> int:
    by_number = units.names == [str(number) for number in range(len(units))]  # as an nn.Sequential's are named
    if text in units.names and not (text.isdigit() and by_number):
        return units.names.index(text)
    return int(text) if text.isdigit() else -1


def balanced(sizes: Sequence[float], stages: int) -> list[int]:
    """Cuts `sizes` in order into parts, none empty, the largest sum of which is as small as can be."""
    count, before = len(sizes), [0.0, *accumulate(sizes)]
    # best[n]: (the largest sum, where the parts begin) of the first n, cut into as many parts as rounds were made
    best: list[tuple[float, list[int]]] = [(before[n] if n else float("inf"), [0]) for n in range(count + 1)]
    for part in range(2, stages + 1):
        best = [
            min(
                ((max(best[m][0], before[n] - before[m]), [*best[m][1], m]) for m in range(part - 1, n)),
                default=(float("inf"), []),
                key=lambda found: found[0],
            )
            for n in range(count + 1)
        ]
    return [*best[count][1], count]


def seconds(units: Sequence[nn.Module], value: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of each unit's forward and backward on this input, the least of a few trials; in evaluation mode, so that
    nothing is drawn and no running statistic changes."""
    wait: Callable[[], Any] = lambda: None  # noqa: E731
    if value.device.type != "cpu":
        wait = torch.get_device_module(value.device).synchronize
    found = []
    for unit in units:
        modes = {module: module.training for module in unit.modules()}
        unit.eval()
        value = value.detach()
        trials = []
        for _ in range(repeats):
            given = value.requires_grad_(value.is_floating_point())
            wanted = [p for p in (given, *unit.parameters()) if p.requires_grad]
            wait()
            began = time.perf_counter()
            with torch.enable_grad():
                result = unit(given)
            if wanted and result.requires_grad:
                torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
            wait()
            trials.append(time.perf_counter() - began)
        for module, was in modes.items():
            module.training = was
        found.append(min(trials))
        value = result
    return found
