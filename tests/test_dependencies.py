"""What the package imports is what it asks for: one that only happens to be installed is missing for a user."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {"pyzmq": "zmq"}  # packages whose module has another name
PROJECT = (ROOT / "pyproject.toml").read_text()


def names(key: str) -> set[str]:
    found = re.search(rf"^{key} = \[(.*?)\]$", PROJECT, re.M | re.S)
    assert found, f"pyproject.toml has no {key}"
    packages = {re.split(r"[^\w-]", text)[0] for text in re.findall(r'"([^"]+)"', found[1])}
    return {MODULES.get(package, package) for package in packages}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


EXTRAS = {  # module -> what it imports of an extra, and the extra; torch itself imports tensorboard
    "services.py": {"wandb": "wandb", "mlflow": "mlflow"},
    "html_page.py": {"plotly": "compare"},
    "onnx_check.py": {"onnxruntime": "onnx"},
    "export_command.py": {"onnxruntime": "onnx"},
    "deepspeed_engine.py": {"deepspeed": "deepspeed"},
}


def test_every_import_is_declared() -> None:
    known = {*sys.stdlib_module_names, "paceline", "tomllib", *names("dependencies")}
    undeclared = {
        str(path): missing
        for path in sorted((ROOT / "src").rglob("*.py"))
        if (missing := imported(path) - known - set(EXTRAS.get(path.name, {})))
    }
    assert not undeclared


def test_extras_exist() -> None:
    for imports in EXTRAS.values():
        for name, extra in imports.items():
            assert name in names(extra)
