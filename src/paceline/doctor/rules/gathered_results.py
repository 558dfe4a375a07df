"""Does the script drop padded duplicates from the results that its ranks exchanged?"""

from __future__ import annotations

import ast
import re
from typing import Any

from paceline.doctor.rules.recorded_run import Event
from paceline.observe.source import Scope, called, calls_in, functions, scope_at, tree_of

# Functions and constructors that keep only one of two equal entries.
_DROPS = ("unique", "dict", "set", "narrow", "setdefault", "drop_duplicates", "index_copy_", "index_put_", "scatter_")
# Text that compares the number of an example with a count.
_COUNTED = re.compile(
    r"\blen\(|arange|\bidx|\bindex|\bindices|\bids?\b|position|\bseen\b|\bown\b|total|num_|\bn\b|rank"
)
# Text of comparisons about the loop, not about an example.
_LOOPS = re.compile(r"batch|step|iter|epoch|max_")
# Iterables of a dict comprehension that do not range over examples.
_OF_NAMES = re.compile(r"^range\(|\.items\(\)$")
# Names of masks over examples, and of masks that belong to the model.
_MASKS = re.compile(r"(^|_)(masks?|keep|real|padded|padding|unpad|dup\w*|uniq\w*|remainder|surplus)(_|$)")
_MODELS_MASK = re.compile(r"attention|attn|src|tgt|token|causal|key_|label")

_SITE = re.compile(r"[\\/](site|dist)-packages[\\/]")
_METRICS, LIGHTNING = re.compile(r"[\\/]torchmetrics[\\/]"), re.compile(r"[\\/](pytorch_)?lightning[\\/]")
_HOOKS = re.compile(r"valid|test|eval|step|metric")  # methods that pass examples to metrics
# Functions that print: their arguments are not results.
_PRINTS = ("print", "info", "debug", "warning", "log", "write", "add_text")


def uses_all(call: Event, loop: Any, sums: bool = False) -> bool:
    """Does the script use the whole result of a collective? If it slices the result or stores it by index, it may drop
    the duplicates.

    The search covers

    - the function that calls the collective,
    - the function with the evaluation's loop, from the loop on,
    - callers of the first function, after the call, also in libraries (Accelerate's `gather_for_metrics` slices),
    - the functions of the script that all this code calls.

    Args:
        call: the "coll" event.
        loop: [file, line] of the evaluation's loop, or [].
        sums: is the collective a sum? Then duplicates can only be sliced or masked before the call.
    """
    path = [*call.get("path", ()), *([call["at"]] if call["at"] else [])]
    by_metric = any(_METRICS.search(file) for file, _ in path)
    if by_metric:  # a metric's gather drops nothing, but the script may drop examples before the metric gets them
        inside = any(LIGHTNING.search(file) for file, _ in path)
        path, sums = [frame for frame in path if not _SITE.search(frame[0])], True
    if not path or any(tree_of(file) is None for file, _ in path):
        return False
    first = scope_at(*path[0])
    scopes: list[tuple[Scope, int]] = []  # (scope, search from this line on)
    if loop and tree_of(loop[0]) is not None:
        scopes.append((scope_at(*loop), loop[1]))
    if not any(first is scope for scope, _ in scopes):
        scopes.append((first, 0))
    scopes += [] if sums else [(scope_at(*frame), frame[1]) for frame in path[1:]]
    if by_metric and inside:  # Lightning has the loop and calls the script's methods
        hooks = [f for file in {file for file, _ in path} for f in functions(file) if _HOOKS.search(f.name)]
        scopes = [(hook, hook.lineno) for hook in hooks]
    nodes = [n for scope, line in scopes for n in ast.walk(scope) if getattr(n, "end_lineno", line) >= line]
    own = {at[0] for at in (call["at"], loop) if at}  # the script itself may be installed
    files = {file for file, _ in path if not _SITE.search(file)} | own
    counted = (n for n in calls_in(nodes) if not sums or _COUNTED.search(", ".join(map(ast.unparse, n.args))))
    calls = {called(n) for n in counted}
    searched = {id(scope) for scope, _ in scopes} | {id(scope_at(*frame)) for frame in path}
    helpers = [f for file in sorted(files) for f in functions(file) if f.name in calls and id(f) not in searched]
    nodes += [n for scope in helpers for n in ast.walk(scope)]
    printed = {id(part) for n in calls_in(nodes, *_PRINTS) for part in ast.walk(n)}
    return not any(_slices(n) or (_masks(n) if sums else _stores_by_key(n)) for n in nodes if id(n) not in printed)


def _slices(node: ast.AST) -> bool:
    """Is a node a slice of the first dimension with an end?"""
    first = getattr(node, "slice", None)
    first = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else first
    return isinstance(first, ast.Slice) and first.upper is not None


def _stores_by_key(node: ast.AST) -> bool:
    """Does a node store values by index or name, so that only one of two entries with the same key remains?"""
    if isinstance(node, ast.DictComp):  # over a range of classes, or over another dictionary, it drops nothing
        return not all(_OF_NAMES.search(ast.unparse(part.iter)) for part in node.generators)
    if isinstance(node, ast.SetComp) or (isinstance(node, ast.Dict) and None in node.keys):
        return True
    if isinstance(node, ast.Assign):
        targets = [t for t in node.targets if isinstance(t, ast.Subscript)]
        return any(not isinstance(t.slice, ast.Constant) for t in targets)
    if not isinstance(node, ast.Call):
        return False
    return called(node) in _DROPS or (called(node) == "update" and _merges(node))


def _merges(call: ast.Call) -> bool:
    """Is a call of `update` that of a dictionary? A metric's `update` takes (predictions, targets) or a number."""
    one = call.args[0] if len(call.args) == 1 else None
    return isinstance(one, (ast.Name, ast.Subscript)) or (isinstance(one, ast.Call) and called(one) == "zip")


def _masks(node: ast.AST) -> bool:
    """Does a node select examples by number, or by a mask?"""
    if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops):
        text = ast.unparse(node)
        return bool(_COUNTED.search(text)) and not _LOOPS.search(text)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(_MASKS.search(name)) and not _MODELS_MASK.search(name)
