"""The calls that wait for an accelerator are those that docs/internals/waits.md lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs/internals/waits.md").read_text()
PARTS = ("data", "step", "norm", "state", "metrics", "comm", "strategies", "monitor", "fitting/memory_trial.py")
METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}

ON_THE_HOST = {
    "_distinct": "branches where the rows are on a CPU",
    "slice_examples.part_of_array": "the numbers that a collate function made",
    "BatchPlan._requests": "indices in an array of NumPy's",
    "_integers": "indices in an array of NumPy's",
    "Streams.example_keys": "keys in an array of NumPy's",
    "_check_cover": "boxes in arrays of NumPy's",
    "_overlaps": "boxes in arrays of NumPy's",
    "runs_of": "indices, which it made on the host",
    "_fill": "memory of the host, into which a message goes",
    "_gather_heads": "shapes, which it made",
    "Group.agree": "a digest of names, which it made",
    "_join": "the order of predictions, from their indices",
    "_sum_numbers": "numbers of Python's",
    "scalar": "asks whether reading waits for no device",
    "is_transposed_linear": "a probe of three numbers, when a model is cut",
    "NewestState._fingerprint": "of runs on CPUs alone (restarts.py)",
    "JsonLines.log_histogram": "counts and edges of NumPy's",
    "Neighbours._rows": "takes tensors on the CPU alone",
    "PeriodicAveraging.average": "counts that an optimizer keeps as numbers; it made the tensor",
    "PeriodicAveraging.setup": "its own method, which averages weights",
    "Updates.synchronize": "the strategy's method, which averages weights",
    "AveragedWeights.in_model": "the strategy's method, which averages weights",
    "AveragedWeights.write": "the strategy's method, which averages weights",
    "TreeSums.gradients": "which gradients there are, which it made",
    "SharedArena.changed": "weights in memory that processes on CPUs share",
    "SharedGradients.found_inf": "gradients in memory that processes on CPUs share",
    "SharedGradients.norm": "gradients in memory that processes on CPUs share",
}
"""What is read in these functions lies on the host, or is no tensor."""


def reads(node: ast.AST, within: str = "") -> Iterator[str]:
    """The functions below `node` that read a tensor, by qualified name."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        within = f"{within}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call):
        called, first = node.func, ast.unparse(node.args[0]) if node.args else ""
        if isinstance(called, ast.Attribute):
            compares = ast.unparse(called) in ("torch.equal", "torch.allclose")
            if called.attr in METHODS or compares or (called.attr == "to" and first == "'cpu'"):
                yield within
        elif isinstance(called, ast.Name) and called.id == "bool" and first.endswith((".any()", ".all()")):
            yield within
    for child in ast.iter_child_nodes(node):
        yield from reads(child, within)


def places() -> list[tuple[str, Path]]:
    """(function, file) for each function that reads a tensor."""
    files = [path for part in PARTS for path in (SOURCE / part).rglob("*.py")]
    files.append(SOURCE / "fitting" / "memory_trial.py")
    return [(name, path) for path in files for name in set(reads(ast.parse(path.read_text())))]


def found() -> set[str]:
    return {name for name, _ in places()}


def listed() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("\n## ")[0], flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_every_function_that_reads_a_tensor_is_listed_with_its_reason() -> None:
    unknown = found() - listed() - ON_THE_HOST.keys()
    assert not unknown, f"say in docs/internals/waits.md when and why these wait for an accelerator: {sorted(unknown)}"


def test_nothing_is_listed_that_does_not_wait() -> None:
    by_a_number = {"FiniteWatch._stop", "_Global._normalise"}  # float(loss), int(counts.sum())
    assert listed() - found() == by_a_number
    assert not ON_THE_HOST.keys() - found()
    assert not ON_THE_HOST.keys() & listed()


def test_no_listed_name_stands_for_two_functions() -> None:
    names = [name for name, _ in places()]
    assert sorted(names) == sorted(set(names))


def test_a_read_is_found_wherever_it_is() -> None:
    code = """
class A:
    def f(self): return [x.item() for x in self]
    def g(self): return x.to("cpu"), y.to(device)
def h():
    def inner(): return bool(x.isnan().any())
    return inner, torch.equal(a, b)
def not_one(): return x.items(), bool(x), "cpu"
"""
    assert list(reads(ast.parse(code))) == ["A.f", "A.g", "h.inner", "h"]
