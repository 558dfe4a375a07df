"""The hooks act when a module is executed, however a script finds, loads and imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SET_UP = """
import contextlib, importlib, importlib.util, os, sys, threading
from importlib.machinery import PathFinder
from paceline.launcher.import_hook import after_import, around_import, stay_first

heard = []

@contextlib.contextmanager
def around(module):
    heard.append("before" if not hasattr(module, "value") else "again")
    yield
    heard.append("after")

around_import("thing", around)
after_import("thing", lambda module: heard.append(module.value))
stay_first()

class Front:  # another tool's hook, which finds everything by itself
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path, target)

class Wrapping:  # another tool's hook, which asks the others, and wraps the loader
    inside = False
    def find_spec(self, name, path=None, target=None):
        if name != "thing" or self.inside:
            return None
        self.inside = True
        spec = importlib.util.find_spec(name)
        self.inside = False
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: execute(module)
        return spec
"""
ONCE = "before after 7"
# name -> (what the script does, what is heard)
WAYS = {
    "import": ("import thing", ONCE),
    "find_spec first": ("importlib.util.find_spec('thing'); importlib.util.find_spec('thing'); import thing", ONCE),
    "in a package": ("import package.part", ONCE),
    "import_module": ("importlib.import_module('thing')", ONCE),
    "in a function": ("def f():\n    import thing\nf(); f()", ONCE),
    "in threads": (
        "threads = [threading.Thread(target=importlib.import_module, args=('thing',)) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]", ONCE),
    "by the spec": (
        "spec = importlib.util.find_spec('thing')\n"
        "thing = sys.modules['thing'] = importlib.util.module_from_spec(spec)\n"
        "heard.append('made'); spec.loader.exec_module(thing)", f"made {ONCE}"),
    "lazily": (
        "spec = importlib.util.find_spec('thing'); spec.loader = importlib.util.LazyLoader(spec.loader)\n"
        "thing = sys.modules['thing'] = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(thing)\n"
        "heard.append('made'); thing.value; thing.value", f"made {ONCE}"),
    "reloaded": ("import thing; importlib.reload(thing)", f"{ONCE} again after 7"),
    "failed at first": (
        "os.environ['BROKEN'] = '1'\ntry:\n    import thing\nexcept ValueError:\n    del os.environ['BROKEN']\n"
        "import thing", f"before {ONCE}"),
    "never": ("importlib.util.find_spec('thing')", ""),
    "a hook in front": ("sys.meta_path.insert(0, Front()); import thing", ONCE),
    "a hook that wraps": ("sys.meta_path.insert(0, Wrapping()); import thing", ONCE),
    "a hook that wraps, without an import statement": (
        "sys.meta_path.insert(0, Wrapping()); importlib.import_module('thing')", ONCE),
    "another list of finders": ("sys.meta_path = [Front()]; import thing", ONCE),
    "finders taken out": ("sys.meta_path[:] = [f for f in sys.meta_path if f is PathFinder]; import thing", ONCE),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_acts_when_the_module_is_executed(way: str, tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text(
        "import os\nif os.environ.get('BROKEN'):\n    raise ValueError\nvalue = 7\nname = __loader__.name\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import importlib.util\nimportlib.util.find_spec('thing')\n")
    (tmp_path / "package" / "part.py").write_text("import thing\n")
    does, heard = WAYS[way]
    code = f"{SET_UP}\n{does}\nprint(*heard)\n"
    loader = "thing = sys.modules.get('thing')\nprint(thing is None or type(thing.__loader__).__name__)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + loader], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said, its_loader = done.stdout.rstrip("\n").split("\n")
    assert said == heard
    assert its_loader in ("SourceFileLoader", "True")


def test_a_module_that_is_there_already(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom paceline.launcher.import_hook import after_import\n"
        "after_import('sys', lambda module: print(module is sys))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_a_loader_keeps_its_other_methods(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text("value = 7\n")
    code = (
        "import importlib.util\nfrom paceline.launcher.import_hook import after_import\nafter_import('thing', print)\n"
        "spec = importlib.util.find_spec('thing')\n"
        "print(spec.loader.get_source('thing').strip(), spec.loader.is_package('thing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "value = 7 False\n", done.stderr
