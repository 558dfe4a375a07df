"""Which layers `tensor` cuts, and how: as a plan says, or found where a model has plain MLP and attention blocks.

    column   a Linear's outputs are shared out: part r of n computes rows r/n of its weight. The output stays cut.
    row      a Linear's inputs are shared out: part r has columns r/n of its weight; the parts' outputs are added.
    gather   as column, and the output is joined again (a classifier's head over many classes).

An Embedding is cut along its features by column and gather, along its vocabulary by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from torch import nn

from paceline.errors import ModelError, SettingError, suggest

KINDS = ("column", "row", "gather")
Plan = dict[str, tuple[nn.Module, str]]
"""Module's name -> the module, its kind."""

# Names of the layers of a block, as models call them: those whose outputs are shared out, then the one that joins.
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
_HEADS = ("n_head", "n_heads", "num_heads", "nhead", "heads", "num_attention_heads")
_KEY_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_BETWEEN = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardswish,
    nn.Dropout, nn.Identity,
)  # fmt: skip


def read(plan: object) -> dict[str, str]:
    """A plan as {pattern: kind}, of a dict or of text: "layers.*.up:column,layers.*.down:row". Raises SettingError."""
    if isinstance(plan, str):
        parts = [part.strip() for part in plan.split(",") if part.strip()]
        pairs = [tuple(part.replace("=", ":").rsplit(":", 1)) for part in parts]
        if any(len(pair) != 2 for pair in pairs):
            raise SettingError(
                f"strategy tensor: plan={plan!r}: write pattern:kind, several with commas between them, as in "
                "plan=layers.*.up:column,layers.*.down:row (kinds: column, row, gather)."
            )
        plan = {pattern.strip(): kind.strip() for pattern, kind in pairs}
    if not isinstance(plan, Mapping):
        raise SettingError(f"strategy tensor: plan={plan!r}: text or a dict {{pattern: kind}} is needed.")
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise SettingError(f"strategy tensor: plan: {pattern}:{kind}: no such kind. {suggest(str(kind), KINDS)}")
    return dict(plan)


def matched(model: nn.Module, patterns: Mapping[str, str], size: int) -> tuple[Plan, set[str]]:
    """The layers that the patterns name, and the patterns that named one. `*` stands for one part of a name. The first
    pattern that fits a layer counts. Raises ModelError for a layer that cannot be cut so."""
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
    check_untied(model, found)
    return found, used


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def why_not(module: nn.Module, kind: str, size: int) -> str:
    """Why this layer cannot be cut in this way, as the end of a sentence; empty where it can."""
    if not isinstance(module, (nn.Linear, nn.Embedding)) or inspect.unwrap(type(module).forward) not in (
        nn.Linear.forward,
        nn.Embedding.forward,
    ):
        return f"is a {type(module).__name__}. Only nn.Linear and nn.Embedding, with their own forward, can be cut."
    if module._parameters.get("weight") is None:
        return "has no parameter `weight` of its own (a parametrization, such as weight_norm). Leave it out."
    if isinstance(module, nn.Embedding):
        if module.sparse or module.max_norm is not None:
            return "has sparse gradients or max_norm. Leave it out."
        what, length = (
            ("num_embeddings", module.num_embeddings) if kind == "row" else ("embedding_dim", module.embedding_dim)
        )
    else:
        what, length = ("in_features", module.in_features) if kind == "row" else ("out_features", module.out_features)
    if length % size:
        return f"has {what}={length}, which {size} devices cannot share evenly. Choose another size, or leave it out."
    return ""


def check_untied(model: nn.Module, plan: Plan) -> None:
    """Raises ModelError where a parameter of a chosen layer stands in another layer too."""
    for name, (module, _) in plan.items():
        for other_name, other in model.named_modules():
            shared = {id(p) for p in other._parameters.values() if p is not None} & {id(p) for p in module.parameters()}
            if other is not module and shared:
                raise ModelError(
                    f"strategy tensor: the layers {name} and {other_name} share a parameter (tied weights), and only "
                    f"one of them would be cut. Leave {name} out of the plan."
                )


def found(model: nn.Module, size: int) -> tuple[Plan, list[str]]:
    """The plain blocks of a model, and why others that look like one were left whole."""
    plan: Plan = {}
    passed: list[str] = []
    for name, parent in model.named_modules():
        blocks = [*_attention(parent, size), *_mlps(parent)] or list(_sequential(parent))
        for columns, last, fault in blocks:
            layers = {**dict.fromkeys(columns, "column"), last: "row"}
            full = {f"{name}.{child}" if name else child: kind for child, kind in layers.items()}
            modules = {child: model.get_submodule(child) for child in full}
            faults = [fault] if fault else [w for c, kind in full.items() if (w := why_not(modules[c], kind, size))]
            if not faults and _tied(model, modules):
                faults = ["shares parameters with another layer."]
            if faults:
                passed.append(f"{name or type(model).__name__} ({', '.join([*columns, last])}) {faults[0]}")
            elif not plan.keys() & full.keys():
                plan |= {child: (modules[child], kind) for child, kind in full.items()}
    return plan, passed


def _tied(model: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    try:
        check_untied(model, {name: (module, "") for name, module in modules.items()})
    except ModelError:
        return True
    return False


Block = tuple[Sequence[str], str, str]
"""Names of the layers by column, of that by row, and why the block is not taken (or nothing)."""


def _linear(parent: nn.Module, name: str) -> str | None:
    """The name, if that child is an nn.Linear, or a Sequential that begins with one (a projection and its dropout)."""
    child = parent._modules.get(name)
    if isinstance(child, nn.Sequential) and len(child) and isinstance(child[0], nn.Linear):
        rest = list(child)[1:]
        return f"{name}.0" if all(isinstance(layer, _BETWEEN) for layer in rest) else None
    return name if isinstance(child, nn.Linear) else None


def _attention(parent: nn.Module, size: int) -> Iterator[Block]:
    for names, last in _ATTENTIONS:
        layers = [_linear(parent, name) for name in (*names, last)]
        if None in layers:
            continue
        *columns, out = [name for name in layers if name is not None]
        heads = [value for name in _HEADS if isinstance(value := getattr(parent, name, None), int)]
        heads_of_keys = [value for name in _KEY_HEADS if isinstance(value := getattr(parent, name, None), int)]
        fault = ""
        if not heads:
            fault = f"does not say its number of heads (as one of {', '.join(_HEADS)})."
        elif any(value % size for value in heads + heads_of_keys):
            fault = f"has {min(heads + heads_of_keys)} heads, which {size} devices cannot share evenly."
        yield columns, out, fault
        return


def _mlps(parent: nn.Module) -> Iterator[Block]:
    for names, last in _MLPS:
        columns, down = [parent._modules.get(name) for name in names], parent._modules.get(last)
        if isinstance(down, nn.Linear) and all(
            isinstance(up, nn.Linear) and up.out_features == down.in_features for up in columns
        ):
            yield list(names), last, ""
            return


def _sequential(parent: nn.Module) -> Iterator[Block]:
    """In an nn.Sequential: a Linear, activations, and a Linear that takes what the first one gives."""
    if type(parent) is not nn.Sequential:
        return
    kinds = [
        (name, isinstance(layer, nn.Linear), isinstance(layer, _BETWEEN)) for name, layer in parent.named_children()
    ]
    for chain, run in groupby(kinds, key=lambda item: item[1] or item[2]):
        linear = [name for name, is_linear, _ in run if is_linear] if chain else []
        for first, second in zip(linear[::2], linear[1::2], strict=False):
            up, down = parent.get_submodule(first), parent.get_submodule(second)
            if isinstance(up, nn.Linear) and isinstance(down, nn.Linear) and up.out_features == down.in_features:
                yield [first], second, ""
