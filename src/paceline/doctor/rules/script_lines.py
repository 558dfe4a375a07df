"""Find a line in the script's source for actions that no patched function can record, such as a write to `p.data`.

Most functions return [file, line], or None if there is no such line. They search the files that create DDP modules and
optimizers, call backward, or step an optimizer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

from paceline.doctor.rules.recorded_run import Event, RecordedRun
from paceline.observe.expressions import world_pattern
from paceline.observe.source import (
    attributes_in,
    called,
    calls_in,
    calls_of,
    functions,
    holds,
    keyword,
    names_in,
    nodes_of,
    scope_at,
    targets,
    tree_of,
)

_WRITES = re.compile(
    r"^(add|sub|mul|div|copy|clamp|clip|lerp|fill|zero|normal|uniform|addcmul|addcdiv|set|masked_fill|index_copy)_$"
    r"|^(trunc_normal|kaiming_uniform|kaiming_normal|xavier_uniform|xavier_normal|orthogonal|constant|ones|zeros)_$"
)
_WEIGHTS = re.compile(r"\.data\b|\bp\b|param|weight|bias|embed|head|\bw\b")
_NOT_WEIGHTS = re.compile(r"optim|sched|scaler|metric|count|total|loss|grad|ema|shadow|teacher|target|momentum|buf")
_SEEDS = ("torch.manual_seed", "manual_seed", "seed_everything", "set_seed", "L.seed_everything", "pl.seed_everything")
_SEEDING = ("manual_seed", "seed", "default_rng", "RandomState", "Random", "seed_everything", "set_seed")
_SEEDS_BY_NAME = re.compile(r"(^|_)seed(s|ed|_|$)|seed_?all|seed_everything|^(default_rng|RandomState|Random)$")
_PREPARES = ("prepare", "setup_dataloaders", "prepare_data_loader")
_OF_TORCH = ("randint", "randperm", "rand", "randn", "multinomial", "normal", "randint_like", "bernoulli")
_OF_OTHERS = ("choice", "choices", "sample", "shuffle", "randint", "randrange", "permutation", "random", "uniform")
_DRAWS = {f"torch.{name}" for name in _OF_TORCH} | {f"{own}.{name}" for own in ("random", "np.random", "numpy.random")
                                                   for name in _OF_OTHERS}  # fmt: skip
_LOSS_OF = ("compute_loss", "training_step")  # methods that libraries call to get the loss
_BACKWARDS = ("backward", "manual_backward")
_EXCHANGES = re.compile(r"\bdist\b|distributed|reduce|gather|scatter|all_to_all|broadcast")
_RANKS = re.compile(r"rank|main|master|is_|process_index")


Line = list[Any] | None


def weight_write(run: RecordedRun, near: Any, by_rank: bool = False) -> Line:
    """The line of a write to weights. Prefers a write on some ranks only, then a write in the loop around `near`, then
    a write in a function. Among equals, prefers the one nearest to `near`.

    by_rank: consider only writes on some ranks.
    """
    return _nearest(run, near, _writes_weight, by_rank)


def gradient_write(run: RecordedRun, near: Any) -> Line:
    """The line of a write to gradients, chosen as in `weight_write`."""
    return _nearest(run, near, _writes_gradient)


def gradient_scaling(run: RecordedRun, within: Line) -> Line:
    """The first line that multiplies gradients by a number other than one over the number of processes. If it is in
    another function than the line `within`: the first call of its function."""
    for file in _files(run):
        world = world_pattern(file)
        acts = (n for n in nodes_of(file) if isinstance(n, (ast.Call, ast.Assign, ast.AugAssign)))
        for node in acts:
            if _writes_gradient(file, node) and not world.search(ast.unparse(node)):
                apart = within is not None and within[0] == file
                apart = apart and scope_at(file, node.lineno) is not scope_at(file, within[1])  # type: ignore[index]
                at: Line = [file, node.lineno]
                return (call_of_scope(run, at) if apart else None) or at
    return None


def lr_assignment(run: RecordedRun) -> Line:
    """The first assignment to an optimizer's `["lr"]`."""
    return _first(run, lambda n: any(_is_item(target, "lr") for target in targets(n)))


def gradient_drop(run: RecordedRun) -> Line:
    """The first assignment of None to `.grad`."""
    return _first(run, lambda n: _sets(n, "grad", None))


def cycle_call(run: RecordedRun) -> Line:
    """The first call of `cycle`."""
    return _first(run, lambda n: isinstance(n, ast.Call) and called(n) == "cycle")


def unfreeze(run: RecordedRun) -> Line:
    """The first assignment of True to `requires_grad`."""
    return _first(run, lambda n: _sets(n, "requires_grad", True))


def optimizer_skip(run: RecordedRun) -> Line:
    """The first condition in an optimizer's `step` that leaves parameters out with `continue`."""
    for file in _files(run):
        for cls in (n for n in nodes_of(file) if isinstance(n, ast.ClassDef)):
            optimizer = any("Optim" in ast.unparse(base) for base in cls.bases)
            for method in (m for m in cls.body if optimizer and isinstance(m, ast.FunctionDef) and m.name == "step"):
                ifs = (n for n in ast.walk(method) if isinstance(n, ast.If))
                skips = [n.lineno for n in ifs if any(isinstance(part, ast.Continue) for part in n.body)]
                if skips:
                    return [file, min(skips)]
    return None


def silent_function(run: RecordedRun) -> Line:
    """The backward of the first autograd function that exchanges nothing, in its forward and in its backward."""
    for file in _files(run):
        for n in nodes_of(file):
            if isinstance(n, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in n.bases):
                methods = {m.name: m for m in n.body if isinstance(m, ast.FunctionDef)}
                given = [methods[name] for name in ("forward", "backward") if name in methods]
                if len(given) == 2 and not any(_EXCHANGES.search(ast.unparse(m)) for m in given):
                    return [file, given[1].body[-1].lineno]
    return None


def rank_seed(run: RecordedRun) -> Line:
    """The first line that seeds torch with the rank."""
    calls = ([file, n.lineno] for file in _files(run) for n, alone in _seed_calls(file) if not alone and _by_rank(n))
    return next(calls, None)


def rank_stride(run: RecordedRun) -> Line:
    """The first line with `range(rank, ..., step)` or `[rank::step]`."""

    def strides(n: Any) -> bool:
        begin = n.args[0] if isinstance(n, ast.Call) and called(n) == "range" and len(n.args) == 3 else None
        if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice) and n.slice.step is not None:
            begin = n.slice.lower
        return begin is not None and bool(_RANKS.search(ast.unparse(begin)))

    return _first(run, strides)


def attribute_use(run: RecordedRun, attribute: str) -> Line:
    """The first line that assigns to an attribute with this name, or calls it or one of its attributes."""

    def uses(n: Any) -> bool:
        named = [t for t in n.targets if isinstance(t, ast.Attribute)] if isinstance(n, ast.Assign) else []
        if isinstance(n, ast.Call):
            named = [part for part in ast.walk(n.func) if isinstance(part, ast.Attribute) and part is not n.func]
            named += [n.func] if isinstance(n.func, ast.Attribute) and n.args else []
        return any(t.attr == attribute for t in named)

    return _first(run, uses)


def buffer_write(run: RecordedRun, name: str) -> Line:
    """The first write outside constructors to an attribute with this name."""
    for file in _files(run):
        constructors = [n for n in functions(file) if n.name == "__init__"]
        for n in nodes_of(file):
            in_place = isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.endswith("_")
            for t in [n.func.value] if in_place else targets(n):  # type: ignore[attr-defined]
                if name in attributes_in(t) and not any(holds(b, t.lineno) for b in constructors):
                    return [file, t.lineno]
    return None


def call_of_scope(run: RecordedRun, at: Line) -> Line:
    """The first call of the function around a line, in the files of the run."""
    name = getattr(scope_at(*at), "name", None) if at is not None else None  # a module has no name
    calls = ([file, n.lineno] for file in _files(run) for n in calls_of(file, name)) if name else ()
    return next(iter(calls), None)


def shared_seed(run: RecordedRun) -> Line:
    """The last line that seeds a generator with the same number on all ranks. Prefers a generator object to torch's
    default generator, which counts only if no line seeds it with the rank."""
    calls = [(file, n, alone) for file in _files(run) for n, alone in _seed_calls(file)]
    own = [[file, n.lineno] for file, n, alone in calls if alone and not _by_rank(n)]
    common = [[file, n.lineno] for file, n, alone in calls if not alone]
    ranked = any(_by_rank(n) for _, n, alone in calls if not alone)
    return max(own, default=None) or (None if ranked else max(common, default=None))


def shared_seed_and_draw(run: RecordedRun) -> tuple[Line, Line]:
    """(the line that seeds the data's generator with the same number on all ranks, the first line that draws from it in
    a function or loop of the script). A draw without a generator argument uses torch's default generator. (None, None)
    if `shared_seed` finds no line."""
    seed = shared_seed(run)
    if seed is None:
        return None, None
    for file in _files(run):
        scopes: list[ast.AST] = [n for n in functions(file) if n.name not in ("__init__", "main")]
        scopes += [n for n in nodes_of(file) if isinstance(n, (ast.For, ast.While))]
        draws = [n for n in calls_of(file) if _is_call_of(n, _DRAWS) and any(holds(s, n.lineno) for s in scopes)]
        common = [n for n in draws if keyword(n, "generator") is None]
        seeds = [n.lineno for n, alone in _seed_calls(file) if not alone and not _by_rank(n)]
        if len(common) < len(draws):  # some draws use a generator object
            return seed, [file, draws[0].lineno]
        if draws:
            return [file, max(seeds)] if seeds else seed, [file, common[0].lineno]
    return seed, None


def worker_seed(run: RecordedRun) -> Line:
    """The line that seeds a generator in a worker_init_fn of a DataLoader."""
    for file in _files(run):
        given = [value for n in calls_of(file) if (value := keyword(n, "worker_init_fn")) is not None]
        names = {name for value in given for name in names_in(value)}
        for scope in (*(f for f in functions(file) if f.name in names), *given):
            seeds = (n for n in calls_in(ast.walk(scope)) if _SEEDS_BY_NAME.search(called(n)) and n.args)
            if (seed := next(seeds, None)) is not None:
                return [file, seed.lineno]
    return None


def prepares(run: RecordedRun) -> bool:
    """Does the script call a function such as Accelerate's `prepare` or Lightning Fabric's `setup_dataloaders`?"""
    return any(any(calls_of(file, *_PREPARES)) for file in _files(run))


def is_drawn_split(at: Any) -> bool:
    """Does this line split a data set at random with the default generator?"""
    splits = calls_of(at[0], "random_split") if at else ()
    return any(holds(n, at[1]) and keyword(n, "generator") is None for n in splits)


def _seed_calls(file: str) -> list[tuple[ast.Call, bool]]:
    """(call, does it seed a generator object instead of the default generator?) for each call that seeds. If a function
    of the script passes its argument to a seed call, the calls of that function count, not the seed calls in it."""
    helpers: dict[str, ast.AST] = {}
    for f in functions(file):
        given = {a.arg for a in (*f.args.args, *f.args.kwonlyargs)}
        seeds = [n for n in calls_in(ast.walk(f)) if _is_call_of(n, _SEEDS)]
        if any(names_in(a) & given for n in seeds for a in n.args):
            helpers[f.name] = f
    found: list[tuple[ast.Call, bool]] = []
    for n in calls_of(file):
        name = called(n)
        if not n.args or any(holds(f, n.lineno) for f in helpers.values()):
            continue
        if name in helpers or (_SEEDS_BY_NAME.search(name) and name not in _SEEDING):
            found.append((n, False))
        elif name in _SEEDING:
            found.append((n, ast.unparse(n.func) not in _SEEDS))
    return found


def _by_rank(call: ast.Call) -> bool:
    return any(_RANKS.search(ast.unparse(a)) for a in (*call.args, *(k.value for k in call.keywords)))


def unsynced_log(run: RecordedRun, monitored: Collection[str] = ()) -> Line:
    """The line that logs, without synchronizing it between ranks, a metric that a scheduler monitors by name, or one of
    these names."""
    for file in _files(run):
        pairs = [(k, v) for n in nodes_of(file) if isinstance(n, ast.Dict) for k, v in zip(n.keys, n.values)]
        names = {v.value for k, v in pairs if isinstance(k, ast.Constant) and k.value == "monitor"
                 if isinstance(v, ast.Constant)}.union(monitored)  # fmt: skip
        for n in calls_of(file, "log", "log_dict"):
            said = {getattr(part, "value", None) for part in ast.walk(n.args[0])} if n.args else set()
            if names & said and keyword(n, "sync_dist") is None:
                return [file, n.lineno]
    return None


def condition_of(at: Any) -> Line:
    """The line of the innermost `if` around a line."""
    if not at or tree_of(at[0]) is None:
        return None
    around = [n.lineno for n in nodes_of(at[0]) if isinstance(n, ast.If) and holds(n, at[1])]
    return [at[0], max(around)] if around else None


def condition_in_loop(at: Any) -> Line:
    """The line of the innermost `if` around a line, if the innermost loop around the line contains it."""
    found = condition_of(at)
    if found is None:
        return None
    loops = [n.lineno for n in nodes_of(at[0]) if isinstance(n, ast.For | ast.While) and holds(n, at[1])]
    return found if loops and max(loops) < found[1] else None


def call_that_names(at: Any, names: Collection[Any]) -> Line:
    """The line that passes values with these names to a library, which reduces them later at the line `at`. An example
    is `self.log("loss", loss, sync_dist=True)`. None if the line `at` itself passes values."""
    if not at or tree_of(at[0]) is None:
        return None
    calls = [n for n in calls_of(at[0], "log", "log_dict") if keyword(n, "sync_dist") is not None]
    if any(holds(n, at[1]) for n in calls):
        return None
    said = [n for n in calls if any(getattr(part, "value", None) in names for part in ast.walk(n))]
    built = [n for n in calls if n.args and not isinstance(n.args[0], ast.Constant)]  # the name is not a constant
    return [at[0], (said or built or calls)[0].lineno] if calls else None


def loop_exit(inside: list[list[Any]], outside: list[list[Any]]) -> tuple[Line, bool]:
    """Find the line where a rank leaves a loop around one call and continues to another call outside the loop.

    The line is a `break`, `return` or exit. If there is none, it is an assignment to the condition of a `while`. The
    outermost loop is preferred.

    Args:
        inside: [file, line] of each frame of the call in the loop, innermost first.
        outside: the same for the other call; [] if the script has ended.

    Returns:
        The line or None, and whether no loop contains both calls. If a loop does, the calls may belong to different
        iterations.
    """
    separate = True
    for file, line in reversed(inside):
        loops = [n for n in nodes_of(file) if isinstance(n, (ast.For, ast.While)) and holds(n, line)]
        others = [number for name, number in outside if name == file]
        for loop in sorted(loops, key=lambda n: n.lineno):
            if any(holds(loop, number) for number in others):
                separate = False
            elif found := _exits(loop):
                return [file, found[0]], separate
    return None, separate


def _exits(loop: ast.For | ast.While) -> list[int]:
    """The lines that leave a loop. If there are none, the lines that assign to the condition of a `while`."""
    inner = [n for n in ast.walk(loop) if isinstance(n, (ast.For, ast.While)) and n is not loop]
    hidden = [n for n in ast.walk(loop) if isinstance(n, (ast.FunctionDef, ast.Lambda, ast.ClassDef))]
    body = [n for n in ast.walk(loop) if not any(holds(f, getattr(n, "lineno", -1)) for f in hidden)]
    lines = [n.lineno for n in body if isinstance(n, ast.Break) and not any(holds(i, n.lineno) for i in inner)]
    lines += [n.lineno for n in body if isinstance(n, ast.Return)]
    lines += [n.lineno for n in calls_in(body, "exit", "_exit", "quit")]
    if lines or not isinstance(loop, ast.While):
        return sorted(lines)
    tested = {ast.unparse(n) for n in ast.walk(loop.test) if isinstance(n, (ast.Name, ast.Attribute))}
    return sorted(n.lineno for n in body if isinstance(n, ast.Assign) and tested & set(map(ast.unparse, n.targets)))


def frame_in_scope(path: list[list[Any]], near: Any) -> Line:
    """The innermost call in `path` that is in the same function (or module level) as the line `near`. If there is none,
    the innermost call."""
    if not near or not path or tree_of(near[0]) is None:
        return path[0] if path else None
    scope = scope_at(*near)
    return next(([file, line] for file, line in path if file == near[0] and scope_at(file, line) is scope), path[0])


def validation_log(at: Any) -> Line:
    """The first line that logs in a validation or test method, which Lightning calls."""
    steps = ("validation_step", "test_step", "on_validation_epoch_end", "on_test_epoch_end")
    own = (f for f in functions(at[0]) if f.name in steps) if at else ()
    logs = (n for f in own for n in calls_in(ast.walk(f), "log", "log_dict"))
    return next(([at[0], n.lineno] for n in logs), None)


def loss_return(at: Any) -> Line:
    """The line that returns the loss to a library that calls backward. None if several functions may do that."""
    found = [n for n in functions(at[0]) if n.name in _LOSS_OF] if at else []
    lines = [r.lineno for n in found for r in ast.walk(n) if isinstance(r, ast.Return) and r.value is not None]
    return [at[0], max(lines)] if len(found) == 1 and lines else None


def loss_line(backward: Event) -> Line:
    """The line that computes the loss of a backward pass: the last assignment to the loss before the call of backward,
    in the same function. If a library calls backward, the line that returns the loss to the library."""
    at = backward["at"]
    if not at or backward.get("library"):
        return loss_return(at)
    if tree_of(at[0]) is None:
        return None
    nodes = list(ast.walk(scope_at(*at)))
    names = {name for n in calls_in(nodes, *_BACKWARDS) if holds(n, at[1]) for name in names_in(n)}
    made = [n for n in nodes if any(isinstance(t, ast.Name) and t.id in names for t in targets(n))]
    lines = [n.lineno for n in made if n.lineno < at[1]]  # type: ignore[attr-defined]
    return [at[0], max(lines)] if lines else None


def _files(run: RecordedRun) -> list[str]:
    return run.files("optimizer", "backward", "before", "ddp")


def _first(run: RecordedRun, matches: Callable[[Any], bool]) -> Line:
    """The line of the first matching node in the script's syntax trees."""
    found = ([file, n.lineno] for file in _files(run) for n in nodes_of(file) if matches(n))  # type: ignore[attr-defined]
    return next(found, None)


def _is_call_of(node: Any, names: Collection[str]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names


def _sets(node: Any, attribute: str, constant: object) -> bool:
    """Does a statement set an attribute with this name to a constant?"""
    constants = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is constant
    return constants and any(getattr(target, "attr", "") == attribute for target in node.targets)


def _is_item(node: Any, key: str) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == key


def _nearest(run: RecordedRun, near: Any, writes: Callable[[str, Any], bool], by_rank_only: bool = False) -> Line:
    """The preferred line that `writes` accepts: see `weight_write`."""
    found = []
    for file in _files(run):
        here = near and near[0] == file
        by_rank = [n for n in nodes_of(file) if isinstance(n, ast.If) and _RANKS.search(ast.unparse(n.test))]
        loops = [n for n in nodes_of(file) if isinstance(n, (ast.For, ast.While)) and here and holds(n, near[1])]
        scopes = list(functions(file))
        acts = (n for n in nodes_of(file) if isinstance(n, (ast.Call, ast.Assign, ast.AugAssign)))
        for node in (node for node in acts if writes(file, node)):
            ranked = any(holds(n, node.lineno) for n in by_rank) or bool(_RANKS.search(ast.unparse(node)))
            looped = any(holds(n, node.lineno) for n in loops)
            inside = any(holds(n, node.lineno) for n in scopes)
            if ranked or ((looped or inside) and not by_rank_only):
                distance = abs(node.lineno - near[1]) if here else 10_000
                found.append((not ranked, not looped, distance, [file, node.lineno]))
    return min(found, key=lambda f: f[:3])[3] if found else None


def _writes_weight(file: str, node: Any) -> bool:
    if isinstance(node, ast.Call):
        text = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        given = ast.unparse(node.args[0]) if node.args else ""
        if called(node) == "load_state_dict":
            return not _NOT_WEIGHTS.search(text)
        if not _WRITES.search(called(node)):
            return called(node) == "vector_to_parameters"
        what = given if text.endswith("init") else text
        known = _WEIGHTS.search(what) or "parameters()" in _loop_over(file, what, node.lineno)
        return bool(known) and not _NOT_WEIGHTS.search(f"{what} {_loop_over(file, what, node.lineno)}")
    texts = [ast.unparse(t.value if isinstance(t, ast.Subscript) else t) for t in targets(node)]
    return any(t.endswith(".data") and not _NOT_WEIGHTS.search(t) for t in texts) or (
        isinstance(node, ast.AugAssign) and any(_WEIGHTS.search(t) and not _NOT_WEIGHTS.search(t) for t in texts)
    )


def _loop_over(file: str, name: str, line: int) -> str:
    """The source of the values that the innermost `for` loop around a line binds to a name: an argument of `zip`, or
    the iterable."""
    loops = [n for n in nodes_of(file) if isinstance(n, ast.For) and holds(n, line) and name in names_in(n.target)]
    loop = max(loops, key=lambda n: n.lineno, default=None)
    if loop is None:
        return ""
    zipped = isinstance(loop.iter, ast.Call) and called(loop.iter) == "zip" and isinstance(loop.target, ast.Tuple)
    pairs = zip(loop.target.elts, loop.iter.args) if zipped else ()  # type: ignore[attr-defined]
    return next((ast.unparse(arg) for target, arg in pairs if name in names_in(target)), ast.unparse(loop.iter))


def _writes_gradient(_: str, node: Any) -> bool:
    if isinstance(node, ast.Call):
        text = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        return bool(_WRITES.search(called(node))) and "grad" in text
    return any(re.search(r"\.grad(\.data)?(\[|$)", ast.unparse(t)) for t in targets(node))
