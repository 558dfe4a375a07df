"""The line where a script writes to weights or gradients outside the optimizer: read in its text, since no call of
torch that could be watched says so of `p.data`."""

from __future__ import annotations

import ast
import re
from typing import Any

from paceline.doctor.rules.recorded_run import RecordedRun
from paceline.doctor.script_ast import called, functions, holds, nodes_of, scope_at, tree_of

_WRITES = re.compile(
    r"^(add|sub|mul|div|copy|clamp|clip|lerp|fill|zero|normal|uniform|addcmul|addcdiv|set|masked_fill|index_copy)_$"
    r"|^(trunc_normal|kaiming_uniform|kaiming_normal|xavier_uniform|xavier_normal|orthogonal|constant|ones|zeros)_$"
)
_WEIGHTS = re.compile(r"\.data\b|\bp\b|param|weight|bias|embed|head|\bw\b")
_NOT_WEIGHTS = re.compile(r"optim|sched|scaler|metric|count|total|loss|grad|ema|shadow|teacher|target|momentum|buf")
_SEEDS = ("torch.manual_seed", "manual_seed", "seed_everything", "set_seed", "L.seed_everything", "pl.seed_everything")
_SEEDING = ("manual_seed", "seed", "default_rng", "RandomState", "Random", "seed_everything", "set_seed")
_OF_TORCH = ("randint", "randperm", "rand", "randn", "multinomial", "normal", "randint_like", "bernoulli")
_OF_OTHERS = ("choice", "choices", "sample", "shuffle", "randint", "randrange", "permutation", "random", "uniform")
_DRAWS = {f"torch.{name}" for name in _OF_TORCH} | {f"{own}.{name}" for own in ("random", "np.random", "numpy.random")
                                                   for name in _OF_OTHERS}  # fmt: skip
_LOSS_OF = ("compute_loss", "training_step")  # what libraries call for the loss
_RANKS = re.compile(r"rank|main|master|is_")


def of_weights(run: RecordedRun, near: Any, by_rank: bool = False) -> list[Any] | None:
    """The line where the script writes to weights in its training loop: by rank, if there is one, or near a step.
    by_rank: only by rank."""
    return _nearest(run, near, _writes_weight, by_rank)


def of_rate(run: RecordedRun) -> list[Any] | None:
    """The line that assigns to an optimizer's `["lr"]`."""
    for file in _files(run):
        for n in nodes_of(file):
            targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AugAssign) else []
            for t in targets:
                if isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == "lr":
                    return [file, t.lineno]
    return None


def says_cycle(run: RecordedRun) -> list[Any] | None:
    for file in _files(run):
        for n in nodes_of(file):
            if isinstance(n, ast.Call) and called(n) == "cycle":
                return [file, n.lineno]
    return None


def of_buffer(run: RecordedRun, name: str) -> list[Any] | None:
    """The line that writes to an attribute of this name, not in a constructor."""
    for file in _files(run):
        tree = tree_of(file) or ast.Module([], [])
        built = [n for n in functions(tree) if n.name == "__init__"]
        for n in ast.walk(tree):
            whole: list[ast.expr] = n.targets if isinstance(n, ast.Assign) else []
            whole = [n.target] if isinstance(n, ast.AugAssign) else whole
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.endswith("_"):
                whole = [n.func.value]
            for t in whole:
                named = any(isinstance(part, ast.Attribute) and part.attr == name for part in ast.walk(t))
                if named and not any(holds(b, t.lineno) for b in built):
                    return [file, t.lineno]
    return None


def seeds_alike(run: RecordedRun) -> list[Any] | None:
    """The last line that seeds a generator, where none is seeded with the rank: of its own, or else torch's."""
    own, common = None, None
    for file in _files(run):
        for n in nodes_of(file):
            if not isinstance(n, ast.Call) or called(n) not in _SEEDING or not n.args:
                continue
            if any(_RANKS.search(ast.unparse(a)) for a in n.args):
                return None
            if ast.unparse(n.func) in _SEEDS:
                common = max(common or [file, 0], [file, n.lineno])
            else:
                own = max(own or [file, 0], [file, n.lineno])
    return own or common


def drawn_alike(run: RecordedRun) -> tuple[list[Any] | None, list[Any] | None]:
    """(the line that seeds what the data are drawn by, the line that draws), where no seed has the rank in it. A draw
    from torch's common generator, in a function or a loop of the script's, comes from the common seed."""
    seed = seeds_alike(run)
    if seed is None:
        return None, None
    for file in _files(run):
        tree = tree_of(file) or ast.Module([], [])
        inside = [n for n in functions(tree) if n.name not in ("__init__", "main")]
        inside += [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))]  # type: ignore[misc]
        draws = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in _DRAWS]
        draws = [n for n in draws if any(holds(i, n.lineno) for i in inside)]
        if not draws:
            continue
        common = [n for n in draws if all(k.arg != "generator" for k in n.keywords)]
        seeds = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in _SEEDS]
        own = len(common) < len(draws)
        return (seed if own or not seeds else [file, max(seeds)]), [file, (draws if own else common)[0].lineno]
    return seed, None


def monitored(run: RecordedRun) -> list[Any] | None:
    """The line that logs the number that a scheduler monitors by its name, on each rank for itself."""
    for file in _files(run):
        tree = tree_of(file) or ast.Module([], [])
        pairs = [(k, v) for n in ast.walk(tree) if isinstance(n, ast.Dict) for k, v in zip(n.keys, n.values)]
        names = {v.value for k, v in pairs if isinstance(k, ast.Constant) and k.value == "monitor"
                 if isinstance(v, ast.Constant)}  # fmt: skip
        for n in ast.walk(tree):
            if not isinstance(n, ast.Call) or called(n) not in ("log", "log_dict") or not n.args:
                continue
            said = {part.value for part in ast.walk(n.args[0]) if isinstance(part, ast.Constant)}
            if said & names and all(k.arg != "sync_dist" for k in n.keywords):
                return [file, n.lineno]
    return None


def leaves_loop(inside: Any, outside: Any) -> list[Any] | None:
    """The `break` or `return` by which a loop that holds the one line is left for the other one, which it does not."""
    tree = tree_of(inside[0]) if inside and outside and inside[0] == outside[0] else None
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))] if tree is not None else []
    loops = [n for n in loops if holds(n, inside[1])]
    loops = [n for n in loops if not holds(n, outside[1])]
    for loop in sorted(loops, key=lambda n: n.lineno):
        own = [n for n in loops if n is not loop and n.lineno > loop.lineno]
        for n in ast.walk(loop):
            if not isinstance(n, (ast.Break, ast.Return)):
                continue
            if not any(holds(i, n.lineno) for i in own):
                return [inside[0], n.lineno]
    return None


def in_scope(path: list[list[Any]], near: Any) -> list[Any] | None:
    """Of the calls that lead to one, the innermost first: the one in the function, or at the top, that holds the line
    `near`; the innermost where there is none."""
    if not near or not path or tree_of(near[0]) is None:
        return path[0] if path else None
    scope = scope_at(*near)
    return next(([file, line] for file, line in path if file == near[0] and scope_at(file, line) is scope), path[0])


def computes_loss(run: RecordedRun, at: Any) -> list[Any] | None:
    """Of a script whose backward a library makes: the line that gives it the loss, where that is plain."""
    tree = tree_of(at[0]) if at else None
    found = [n for n in functions(tree) if n.name in _LOSS_OF] if tree is not None else []
    lines = [r.lineno for n in found for r in ast.walk(n) if isinstance(r, ast.Return) and r.value is not None]
    return [at[0], max(lines)] if len(found) == 1 and lines else None


def seeds_by_rank(run: RecordedRun) -> list[Any] | None:
    """The first line that seeds torch with the rank."""
    for file in _files(run):
        for n in nodes_of(file):
            seeds = isinstance(n, ast.Call) and ast.unparse(n.func) in _SEEDS
            if isinstance(n, ast.Call) and seeds and any(_RANKS.search(ast.unparse(a)) for a in n.args):
                return [file, n.lineno]
    return None


def strides_by_rank(run: RecordedRun) -> list[Any] | None:
    """The first line with `range(rank, ..., step)` or `[rank::step]`."""
    for file in _files(run):
        for n in nodes_of(file):
            begin = n.args[0] if isinstance(n, ast.Call) and called(n) == "range" and len(n.args) == 3 else None
            if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice) and n.slice.step is not None:
                begin = n.slice.lower
            if begin is not None and _RANKS.search(ast.unparse(begin)):
                return [file, n.lineno]  # type: ignore[attr-defined]
    return None


def of_gradients(run: RecordedRun, near: Any) -> list[Any] | None:
    """The line where the script writes to gradients."""
    return _nearest(run, near, _writes_gradient)


def unfreezes(run: RecordedRun) -> list[Any] | None:
    """The line where `requires_grad` is set to True: an assignment is seen by nobody."""
    return next(
        (
            [file, n.lineno]
            for file in _files(run)
            for n in nodes_of(file)
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant) and n.value.value is True
            if any(getattr(t, "attr", "") == "requires_grad" for t in n.targets)
        ),
        None,
    )


def says(run: RecordedRun, attribute: str) -> list[Any] | None:
    """The first line that assigns to an attribute of this name, or calls something by way of it."""
    for file in _files(run):
        for n in nodes_of(file):
            named = [t for t in n.targets if isinstance(t, ast.Attribute)] if isinstance(n, ast.Assign) else []
            if isinstance(n, ast.Call):
                named = [part for part in ast.walk(n.func) if isinstance(part, ast.Attribute) and part is not n.func]
                named += [n.func] if isinstance(n.func, ast.Attribute) and n.args else []
            if any(t.attr == attribute for t in named):
                return [file, named[0].lineno]
    return None


def _files(run: RecordedRun) -> list[str]:
    return sorted({e["at"][0] for e in run.events(0, "optimizer", "backward", "before", "ddp") if e["at"]})


def _nearest(run: RecordedRun, near: Any, writes: Any, by_rank_only: bool = False) -> list[Any] | None:
    found = []
    for file in _files(run):
        tree = tree_of(file)
        if tree is None:
            continue
        by_rank = [n for n in ast.walk(tree) if isinstance(n, ast.If) and _RANKS.search(ast.unparse(n.test))]
        loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While)) and near and near[0] == file]
        loops = [n for n in loops if holds(n, near[1])]
        scopes = list(functions(tree))
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Call, ast.Assign, ast.AugAssign)) or not writes(node):
                continue
            ranked = any(holds(n, node.lineno) for n in by_rank)
            ranked = ranked or bool(_RANKS.search(ast.unparse(node)))
            looped = any(holds(n, node.lineno) for n in loops)
            inside = any(holds(n, node.lineno) for n in scopes)
            if ranked or ((looped or inside) and not by_rank_only):
                far = abs(node.lineno - near[1]) if near and near[0] == file else 10_000
                found.append((not ranked, not looped, far, [file, node.lineno]))
    return min(found, key=lambda f: f[:3])[3] if found else None


def _writes_weight(node: Any) -> bool:
    if isinstance(node, ast.Call):
        text = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        given = ast.unparse(node.args[0]) if node.args else ""
        if called(node) == "load_state_dict":
            return not _NOT_WEIGHTS.search(text)
        if not _WRITES.search(called(node)):
            return called(node) == "vector_to_parameters"
        what = given if text.endswith("init") else text
        return bool(_WEIGHTS.search(what)) and not _NOT_WEIGHTS.search(what)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    texts = [ast.unparse(t.value if isinstance(t, ast.Subscript) else t) for t in targets]
    return any(t.endswith(".data") and not _NOT_WEIGHTS.search(t) for t in texts) or (
        isinstance(node, ast.AugAssign) and any(_WEIGHTS.search(t) and not _NOT_WEIGHTS.search(t) for t in texts)
    )


def _writes_gradient(node: Any) -> bool:
    if isinstance(node, ast.Call):
        text = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        return bool(_WRITES.search(called(node))) and "grad" in text
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(re.search(r"\.grad(\.data)?(\[|$)", ast.unparse(t)) for t in targets)
