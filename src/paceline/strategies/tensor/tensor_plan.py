"""Chooses the layers that `tensor` splits, and how, with the user's plan or with a plan found in the model.

    column   splits a Linear's outputs: each of n devices has 1/n of the rows of the weight. The output stays split.
    row      splits a Linear's inputs: each of n devices has 1/n of the columns of the weight. The outputs are added.
    gather   as column, and the output is gathered (a classifier's head over many classes).
    qkv      for a Linear that computes q, k and v side by side: splits the outputs of each third.

column and gather split an Embedding along its features, row along its vocabulary. A layer that computes
x @ weight + bias, as GPT-2's Conv1D does, is a Linear with a transposed weight. A convolution is split along its
channels, a grouped convolution by whole groups.

Without a plan, MLP blocks, attention blocks and grouped convolutions are split. Blocks are found by the names of their
layers, or else by the shapes. An MLP widens and narrows again, with no parameters in between. In attention, q, k and v
are adjacent, and the input of the next Linear is as wide as their outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, pairwise

from torch import nn
from torch.distributed.tensor import Placement, Shard

from paceline.errors import ModelError, SettingError, suggest
from paceline.strategies.tensor.tensor_layers import (
    CONVOLUTIONS,
    features,
    is_linear,
    is_transposed_linear,
    placements_of,
)
from paceline.torch_private.core import children_of, parameters_of

KINDS = ("column", "row", "gather", "qkv")
Plan = dict[str, tuple[nn.Module, str]]
"""Name of a module -> (module, kind)."""

# Names of a block's layers in common models: the layers to split by column, then the layer to split by row.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("c_fc",), "c_proj"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("wi",), "wo"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("query", "key", "value"), "out"),
    (("query", "key", "value"), "proj"),
    (("wq", "wk", "wv"), "wo"),
    (("q", "k", "v"), "out"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "proj"),
    (("to_q", "to_k", "to_v"), "to_out"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
)
_BY_HEAD = ("query_key_value",)  # fused layers with outputs by head: q, k, v of the first head, then of the second, ...
_HEADS = ("n_head", "n_heads", "num_heads", "nhead", "heads", "num_attention_heads")
_KEY_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_BETWEEN = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardswish,
    nn.Dropout, nn.Identity,
)  # fmt: skip


def read(plan: object) -> dict[str, str]:
    """Parse a plan, a dict or text such as "layers.*.up:column,layers.*.down:row", into {pattern: kind}. Raises
    SettingError."""
    if isinstance(plan, str):
        parts = [part.strip() for part in plan.split(",") if part.strip()]
        pairs = [tuple(part.replace("=", ":").rsplit(":", 1)) for part in parts]
        if any(len(pair) != 2 for pair in pairs):
            raise SettingError(
                f"strategy tensor: plan={plan!r}: write pattern:kind, separated by commas, as in "
                "plan=layers.*.up:column,layers.*.down:row (kinds: column, row, gather, qkv)."
            )
        plan = {pattern.strip(): kind.strip() for pattern, kind in pairs}
    if not isinstance(plan, Mapping):
        raise SettingError(f"strategy tensor: plan={plan!r}: use text or a dict {{pattern: kind}}.")
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise SettingError(f"strategy tensor: plan: {pattern}:{kind}: unknown kind. {suggest(str(kind), KINDS)}")
    return dict(plan)


def matched(model: nn.Module, patterns: Mapping[str, str], size: int) -> tuple[Plan, set[str]]:
    """The plan of all layers that match a pattern, and the patterns that match a layer. `*` matches one part of a name.
    The first matching pattern decides. Raises ModelError for a layer that cannot be split in this way."""
    found: Plan = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        for pattern, kind in patterns.items():
            if _fits(name, pattern):
                fault = why_not(module, kind, size)
                if fault:
                    raise ModelError(f"strategy tensor: plan {pattern}:{kind}: the layer {name} {fault}")
                used.add(pattern)
                found.setdefault(name, (module, kind))
    check_tied(found)
    _check_heads(model, found, size)
    return found, used


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def can_be_cut(module: nn.Module) -> bool:
    """Whether this kind of layer can be split, if its sizes are divisible by the number of devices."""
    known = isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS))
    return (known and inspect.unwrap(type(module).forward) in _OWN_FORWARDS) or is_transposed_linear(module)


def why_not(module: nn.Module, kind: str, size: int) -> str:
    """Why this layer cannot be split in this way, as the end of a sentence; "" if it can."""
    if not can_be_cut(module):
        return (
            f"is a {type(module).__name__}. Only nn.Linear, nn.Embedding and nn.Conv1d to nn.Conv3d with torch's "
            "forward, and layers that compute x @ weight + bias, can be split."
        )
    if parameters_of(module).get("weight") is None:
        return "has no plain parameter `weight` (but a parametrization, such as weight_norm). Leave it out."
    if kind == "qkv" and not is_linear(module):
        return f"is a {type(module).__name__}; qkv is for a linear layer that computes q, k and v. Use column or row."
    if isinstance(module, CONVOLUTIONS):
        return _why_not_convolution(module, kind, size)
    if isinstance(module, nn.Embedding):
        if module.sparse or module.max_norm is not None:
            return "has sparse gradients or max_norm. Leave it out."
        what, length = (
            ("num_embeddings", module.num_embeddings) if kind == "row" else ("embedding_dim", module.embedding_dim)
        )
    else:
        inputs, outputs = features(module)
        what, length = ("in_features", inputs) if kind == "row" else ("out_features", outputs)
    if length % (3 * size if kind == "qkv" else size):
        thirds = " as three equal parts" if kind == "qkv" else ""
        evenly = f"which {size} devices cannot share evenly{thirds}"
        return f"has {what}={length}, {evenly}. Choose another size, or leave it out."
    return ""


_OWN_FORWARDS = (nn.Linear.forward, nn.Embedding.forward, *(layer.forward for layer in CONVOLUTIONS))


def _why_not_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, kind: str, size: int) -> str:
    if module.padding_mode != "zeros":
        return f"has padding_mode={module.padding_mode!r}; only 'zeros' can be split. Leave it out."
    if module.groups > 1:
        if kind == "row":
            return "is a grouped convolution, which is split by groups. Use column or gather."
        what, length = "groups", module.groups
    else:
        what, length = ("in_channels", module.in_channels) if kind == "row" else ("out_channels", module.out_channels)
    if length % size:
        return f"has {what}={length}, which {size} devices cannot share evenly. Choose another size, or leave it out."
    return ""


def placement_of(module: nn.Module, name: str, kind: str) -> Placement:
    """The placement of a parameter in a layer of this kind."""
    if isinstance(module, nn.Embedding):
        return Shard(0 if kind == "row" else 1)
    return placements_of(module, kind)[name]


def check_tied(plan: Plan) -> None:
    """Raises ModelError if two chosen layers share a parameter and would split it in different ways."""
    ways: dict[int, tuple[str, str, Placement]] = {}
    for name, (module, kind) in plan.items():
        for key, p in parameters_of(module).items():
            if p is None:
                continue
            placement = placement_of(module, key, kind)
            other, its, way = ways.setdefault(id(p), (name, kind, placement))
            if way != placement:
                raise ModelError(
                    f"strategy tensor: plan: the layers {other}:{its} and {name}:{kind} share a parameter (tied "
                    "weights) and would split it in different ways. An Embedding split by row (its vocabulary) matches "
                    "a Linear split by column or gather (its outputs). Name only one of the two: the other follows."
                )


def _check_heads(model: nn.Module, plan: Plan, size: int) -> None:
    """Raises ModelError if a plan splits attention with heads that the devices cannot share evenly."""
    for name, layers, fault in _attentions(model, size):
        chosen = next((layer for layer in layers if layer in plan and plan[layer][1] in ("column", "qkv")), None)
        if fault and "evenly" in fault and chosen:
            raise ModelError(f"strategy tensor: plan {chosen}:{plan[chosen][1]}: {name} {fault} Choose another size.")


def found(model: nn.Module, size: int) -> tuple[Plan, list[str]]:
    """A plan for the blocks that can be split, and for each other block the reason why it stays whole."""
    plan: Plan = {}
    whole: list[str] = []
    in_attention: set[str] = set()  # layers that cannot be part of an MLP
    attentions = list(_attentions(model, size))
    for _, layers, _ in attentions:
        in_attention |= layers.keys()
    for name, layers, fault in (*attentions, *_mlps(model, in_attention), *_convolutions(model, size)):
        modules = {child: model.get_submodule(child) for child in layers}
        faults = [fault] if fault else [w for c, kind in layers.items() if (w := why_not(modules[c], kind, size))]
        if not faults and _tied(model, modules):
            faults = ["shares parameters with another layer."]
        if faults:
            short = ", ".join(child.removeprefix(f"{name}.") for child in layers)
            whole.append(f"{name or type(model).__name__} ({short}) {faults[0]}")
        elif not plan.keys() & layers.keys():
            plan |= {child: (modules[child], kind) for child, kind in layers.items()}
    return plan, whole


def _tied(model: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    own = {id(p) for module in modules.values() for p in module.parameters()}
    others = [module for module in model.modules() if module not in modules.values()]
    return any(id(p) in own for other in others for p in parameters_of(other).values() if p is not None)


Block = tuple[str, dict[str, str], str]
"""(name of the module around the block; {full name of a layer: kind}; reason why the block cannot be split, or "")."""


def _full(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def _linear(parent: nn.Module, name: str) -> str | None:
    """The child's name if it is linear. If it is a Sequential that begins with a Linear (a projection and its dropout),
    the name of this Linear. Otherwise None."""
    child = children_of(parent).get(name)
    if isinstance(child, nn.Sequential) and len(child) and isinstance(child[0], nn.Linear):
        rest = list(child)[1:]
        return f"{name}.0" if all(isinstance(layer, _BETWEEN) for layer in rest) else None
    return name if is_linear(child) else None


def _attentions(model: nn.Module, size: int) -> Iterator[Block]:
    for name, module in model.named_modules():
        layers = _separate(model, name, module) or _fused(name, module)
        if layers:
            yield name, layers, _why_not_heads(module, size)


def _why_not_heads(module: nn.Module, size: int) -> str:
    heads = [value for name in _HEADS if isinstance(value := getattr(module, name, None), int)]
    heads_of_keys = [value for name in _KEY_HEADS if isinstance(value := getattr(module, name, None), int)]
    if not heads:
        return f"has no attribute with its number of heads (such as {', '.join(_HEADS)})."
    if any(value % size for value in heads + heads_of_keys):
        return f"has {min(heads + heads_of_keys)} heads, which {size} devices cannot share evenly."
    return ""


def _separate(model: nn.Module, name: str, module: nn.Module) -> dict[str, str]:
    """{full name: kind} of an attention block with separate layers for q, k and v, and an output projection in the
    module or next to it. {} if there is no such block."""
    for names, last in _ATTENTIONS:
        layers = [_full(name, layer) for child in (*names, last) if (layer := _linear(module, child)) is not None]
        if len(layers) > len(names):
            return {**dict.fromkeys(layers[:-1], "column"), layers[-1]: "row"}
    for names in dict.fromkeys(names for names, _ in _ATTENTIONS):
        columns = [_full(name, layer) for child in names if (layer := _linear(module, child)) is not None]
        if len(columns) < len(names):
            continue
        heads, width = features(model.get_submodule(columns[-1]))[1], features(model.get_submodule(columns[0]))[0]
        outer = name.rpartition(".")[0]
        inside = [_full(name, child) for child in _linear_leaves(module)]
        beside = [_full(outer, child) for child in _linear_leaves(model.get_submodule(outer))] if name else []
        for child in (*inside, *(other for other in beside if not other.startswith(f"{name}."))):
            if child not in columns and features(model.get_submodule(child)) == (heads, width):
                return {**dict.fromkeys(columns, "column"), child: "row"}
    return {}


def _fused(name: str, module: nn.Module) -> dict[str, str]:
    """{full name: kind} of an attention block with one layer for q, k and v, and an output projection. {} if there is
    no such block."""
    if not any(isinstance(getattr(module, name, None), int) for name in _HEADS):
        return {}
    leaves = [child for child in children_of(module) if is_linear(children_of(module)[child])]
    shapes = {child: features(module.get_submodule(child)) for child in leaves}
    for first, last in pairwise(leaves):
        width = shapes[first][0]
        if shapes[first][1] == 3 * width and shapes[last] == (width, width):
            return {_full(name, first): "column" if first in _BY_HEAD else "qkv", _full(name, last): "row"}
    return {}


def _linear_leaves(module: nn.Module) -> list[str]:
    """Linear layers among the module's children and grandchildren, in order."""
    names = []
    for child, layer in module.named_children():
        if is_linear(layer):
            names.append(child)
        elif not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            names += [f"{child}.{inner}" for inner, its in layer.named_children() if is_linear(its)]
    return names


def _mlps(model: nn.Module, in_attention: set[str]) -> Iterator[Block]:
    for name, module in model.named_modules():
        blocks = list(_named_mlp(module)) or list(_sequential(module)) or list(_widening(name, module, in_attention))
        for columns, last in blocks:
            yield name, {**{_full(name, child): "column" for child in columns}, _full(name, last): "row"}, ""


def _named_mlp(parent: nn.Module) -> Iterator[tuple[Sequence[str], str]]:
    for names, last in _MLPS:
        columns, down = [children_of(parent).get(name) for name in names], children_of(parent).get(last)
        if down is None or not is_linear(down):
            continue
        if all(up is not None and is_linear(up) and features(up)[1] == features(down)[0] for up in columns):
            yield list(names), last
            return


def _sequential(parent: nn.Module) -> Iterator[tuple[Sequence[str], str]]:
    """MLPs in an nn.Sequential: a Linear, activations, and a Linear that takes the outputs of the first Linear."""
    if type(parent) is not nn.Sequential:
        return
    kinds = [(name, is_linear(layer), isinstance(layer, _BETWEEN)) for name, layer in parent.named_children()]
    for chain, run in groupby(kinds, key=lambda item: item[1] or item[2]):
        linear = [name for name, is_one, _ in run if is_one] if chain else []
        for first, second in zip(linear[::2], linear[1::2], strict=False):
            if features(parent.get_submodule(first))[1] == features(parent.get_submodule(second))[0]:
                yield [first], second


def _widening(name: str, module: nn.Module, in_attention: set[str]) -> Iterator[tuple[Sequence[str], str]]:
    """MLPs of two linear layers: the first widens, the second returns to the previous width. No module with parameters
    is between them."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return
    leaves = _linear_leaves(module)
    order = [
        child for child, layer in module.named_modules() if next(layer.parameters(recurse=False), None) is not None
    ]
    for first, second in pairwise(leaves):
        if (
            _full(name, first) in in_attention
            or _full(name, second) in in_attention
            or order.index(second) != order.index(first) + 1
        ):
            continue
        inputs, width = features(module.get_submodule(first))
        if width > inputs and features(module.get_submodule(second)) == (width, inputs):
            yield [first], second


def _convolutions(model: nn.Module, size: int) -> Iterator[Block]:
    """Grouped convolutions, except those with one channel per group, which compute faster than their outputs could be
    sent. In an nn.Sequential, the output stays split if only activations come before the next grouped convolution."""
    grouped = [name for name, module in model.named_modules() if _is_grouped(module)]
    for name in grouped:
        parent, _, child = name.rpartition(".")
        layers = list(model.get_submodule(parent).named_children())
        after = [layer for _, layer in layers[[n for n, _ in layers].index(child) + 1 :]]
        following = next((layer for layer in after if not isinstance(layer, _BETWEEN)), None)
        joined = type(model.get_submodule(parent)) is nn.Sequential and _is_grouped(following)
        stays = joined and following is not None and not why_not(following, "gather", size)
        yield parent, {name: "column" if stays else "gather"}, ""


def _is_grouped(module: nn.Module | None) -> bool:
    return isinstance(module, CONVOLUTIONS) and 1 < module.groups < module.in_channels
