"""The house keeps its shape: imports run one way, and the launcher's side loads no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
NODES = {path: list(ast.walk(tree)) for path, tree in TREES.items()}
# What trains a model, from the bottom up.
TRAINING = {
    "errors",
    "config",
    "world",
    "torch_private",
    "comm",
    "data",
    "strategies",
    "step",
    "norm",
    "state",
    "metrics",
}
BELOW = {  # unit -> the units that it may import; a unit is a module or a folder of paceline, or a part of one
    "errors": set[str](),
    "torch_private": {"errors"},
    "world": {"errors"},
    "notebook": set[str](),
    "quantities": {"errors"},
    "config": {"quantities", "errors"},
    "timeline": set[str](),
    "plain_state": {"torch_private", "errors"},
    "comm": {"plain_state", "torch_private", "world", "config", "errors"},
    "data": {"comm", "torch_private", "config", "errors"},
    "strategies": {"data", "torch_private", "comm", "world", "config", "errors"},
    "step": {"strategies", "data", "torch_private", "comm", "world", "config", "errors"},
    "norm": {"step", "strategies", "data", "torch_private", "comm", "errors"},
    "state": {"step", "strategies", "data", "plain_state", "torch_private", "comm", "world", "config", "errors"},
    "metrics": {"state", "step", "strategies", "data", "torch_private", "comm", "world", "config", "errors"},
    "monitor": {"notebook", "timeline", *TRAINING},
    "run": {"monitor", *TRAINING},
    "trials.spec": {"world", "config", "errors"},
    "observe": {"torch_private", "comm", "world", "errors"},
    "compare.worker": {"trials.spec", "run", "monitor", *TRAINING},
    "verify.worker": {"observe", "plain_state", "trials.spec", "run", "monitor", *TRAINING},
    "verify.plain_worker": {"observe", "verify.worker", "trials.spec", "launcher", *TRAINING},
    "planning.worker": {"compare.worker", "trials.spec", "run", *TRAINING},
    "timeline.worker": {"notebook", "timeline", "run", *TRAINING},
    "balance": {"run", *TRAINING},
    "planning.ranges": set[str](),
    "planning.device_figures": {"planning.ranges"},
    "utilization": {"quantities", "planning.device_figures", "run", "monitor", *TRAINING},
    "session": {
        "balance",
        "utilization",
        "timeline.worker",
        "verify.worker",
        "compare.worker",
        "planning.worker",
        "trials.spec",
        "run",
    }
    | TRAINING - {"torch_private"},
    "fitting": {"notebook", "session", "run", *TRAINING},
    "launcher": {"notebook", "timeline", "torch_private", "world", "config", "errors"},
    "launching": {"strategies", "launcher", "world", "config", "errors"},
    "submit": {"launcher", "world", "config", "errors"},
    "horovod": {"plain_state", "launching", *TRAINING},
    "trials": {"trials.spec", "strategies", "launcher", "world", "config", "errors"},
    "compare": {"__init__", "trials", "trials.spec", "strategies", "launcher", "world", "config", "errors"},
    "planning": {
        *("quantities", "planning.ranges", "planning.device_figures"),
        *("__init__", "trials", "trials.spec", "strategies", "launcher", "world", "config", "errors"),
    },
    "verify": {"doctor", "observe", "trials", "trials.spec", "strategies", "launcher", "world", "config", "errors"},
    "doctor": {"observe", "comm", "torch_private", "launcher", "world", "config", "errors"},
    "export": {"torch_private", "state", "world", "errors"},
    "cli": {
        *("__init__", "submit", "export", "doctor", "verify", "planning", "compare", "trials", "strategies"),
        *("launcher", "world", "config", "errors"),
    },
    "on_host": {"cli", "launcher", "errors"},
    "__main__": {"cli"},
    "__init__": {"launching", "fitting", "launcher", "session", "run"}
    | TRAINING - {"torch_private", "comm", "strategies"},
}
STRATEGY_NAMES = {
    "single",
    "ddp",
    "data_parallel",
    "mirrored",
    "central_storage",
    "shared",
    "fsdp",
    "pipeline",
    "tensor",
    "ulysses",
    "local_sgd",
    "diloco",
    "parameter_server",
    "deepspeed",
}
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv",
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = ("paceline", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(name: str) -> str:
    """The longest key of BELOW that the module lies in; else the folder or module of paceline that has no key yet."""
    path = name.partition(".")[2]
    parts = path.split(".")
    found = [".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in BELOW]
    return next(iter(found), parts[0]) if path else "__init__"


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules of paceline that a file imports anywhere: at its top, in functions, for type checking."""
    found: set[str] = set()
    for node in NODES[path]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in whole}
    return {name for name in found if name.split(".")[0] == "paceline"} - {module_name(path)}


@cache
def words_of(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in NODES[path] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def strings(path: Path) -> set[str]:
    """String literals in code: neither docstrings nor parts of an f-string."""
    skipped = {id(n.value) for n in NODES[path] if isinstance(n, ast.Expr)}
    skipped |= {id(part) for n in NODES[path] if isinstance(n, ast.JoinedStr) for part in n.values}
    constants = [n for n in NODES[path] if isinstance(n, ast.Constant) and id(n) not in skipped]
    return {n.value for n in constants if isinstance(n.value, str)}


def of_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """The body for every one of `names`, as one test: two thousand tests of a millisecond each take a minute."""

    def whole(body: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for name in names:
                try:
                    body(name)
                except AssertionError as error:
                    wrong.append(f"{name}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__ = body.__name__
        return test

    return whole


@of_each(MODULES)
def test_imports_run_one_way(name: str) -> None:
    own = unit(name)
    assert own in BELOW, f"a new unit {own!r}: say in BELOW what it may import"
    wrong = {other for other in imports(MODULES[name]) if unit(other) not in {own, *BELOW[own]}}
    assert not wrong, f"{name} may not import {sorted(wrong)}: imports run one way (docs/architecture.md)"


def test_one_basename_one_file() -> None:
    """A module is found, and spoken of, by its file's name alone."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        files[path.name].append(str(path.relative_to(SOURCE)))
    several = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert not set(several) - {"__init__.py", "__main__.py"}, f"{several}: say in the name what the module holds"


def test_no_cycles() -> None:
    try:
        TopologicalSorter({name: imports(path) for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


@of_each([name for name in MODULES if unit(name) == "launcher"])
def test_the_launcher_speaks_to_workers_only_through_world(name: str) -> None:
    named = {text for text in strings(MODULES[name]) if text.startswith("PACELINE_")}
    assert not named, f"{sorted(named)}: environment variables between launcher and worker are named in world.py"


@pytest.mark.parametrize("name", ["errors", "world", "config", "notebook", "launcher", "cli", "on_host"])
def test_the_launchers_side_loads_no_torch(name: str) -> None:
    code = f"import sys, paceline.{name}; print(*(m for m in ('torch', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout.strip(), f"import paceline.{name} loads {done.stdout}"


def test_a_script_loads_no_strategy_and_no_tool_that_it_does_not_use() -> None:
    """FSDP2, DTensor and FLOP counting import sympy and hundreds of modules of torch."""
    code = "import sys, paceline, paceline.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.flop_counter", "sympy")
    assert not set(heavy) & set(done.stdout.split())


@of_each([name for name in MODULES if unit(name) in ("run", "fitting")])
def test_the_run_never_asks_which_strategy_it_holds(name: str) -> None:
    path = MODULES[name]
    assert not strings(path) & STRATEGY_NAMES
    checked = [n.args[1] for n in NODES[path] if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance"]
    assert not {ast.unparse(what) for what in checked} & {
        *("Strategy", "Single", "DDP", "FSDP", "DataParallel", "Mirrored", "CentralStorage", "Pipeline"),
        *("LocalSGD", "DiLoCo", "TensorParallel", "Ulysses", "DeepSpeed"),
    }
    families = {name for name in imports(path) if name.startswith("paceline.strategies.") and name.count(".") == 3}
    assert all(name.startswith("paceline.strategies.kit.") for name in families)


SEAM = {"mesh", "plan", "store", "device"}  # what a strategy has beside its methods


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in NODES[path] if isinstance(node, ast.ClassDef)}


def methods(path: Path, *names: str) -> set[str]:
    found = [node for name in names for node in classes(path)[name].body]
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


OUTSIDE_STRATEGIES = [name for name in MODULES if unit(name) != "strategies"]


@of_each(OUTSIDE_STRATEGIES)
def test_nothing_is_read_of_a_strategy_but_mesh_plan_store_and_methods(name: str) -> None:
    known = SEAM | methods(SOURCE / "strategies" / "base.py", "Strategy", "LoopStrategy", "ClosureStrategy")
    reads = [
        node
        for node in NODES[MODULES[name]]
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("strategy", "_strategy")
    ]
    wrong = [f"{node.lineno}: {ast.unparse(node)}" for node in reads if node.attr not in known]
    assert not wrong, f"{MODULES[name]}: {wrong}: ask the strategy's mesh, plan or store, or call a method"


@cache
def kinds_of_plan_and_strategy() -> set[str]:
    kinds = {
        kind
        for file in [*(SOURCE / "strategies").rglob("*.py"), SOURCE / "data" / "batch_plan.py"]
        for kind, node in classes(file).items()
        if {ast.unparse(base) for base in node.bases} & {"BatchPlan", "LoopStrategy", "ClosureStrategy", "DDP"}
    }
    assert {"OneShard", "WorkQueue", "DDP", "Pipeline", "Reproducible"} <= kinds
    return kinds


@of_each([name for name in OUTSIDE_STRATEGIES if unit(name) not in ("run", "data")])
def test_only_strategies_name_a_kind_of_plan_or_strategy(name: str) -> None:
    named = {node.id for node in NODES[MODULES[name]] if isinstance(node, ast.Name)}
    assert not named & (kinds_of_plan_and_strategy() | {"one_shard"})


def test_one_thing_is_found_without_being_handed_over() -> None:
    """Where a sum goes is said by its group. What is ambient is the mesh of the open run, and nothing else."""
    rebound = {
        f"{name}.{variable}"
        for name, path in MODULES.items()
        if unit(name) in ("comm", "strategies", "monitor", "run")
        for node in NODES[path]
        if isinstance(node, ast.Global)
        for variable in node.names
    }
    assert rebound == {"paceline.comm.mesh._open", "paceline.comm.process_group.runs"}, "the other counts runs"
    local = [
        name
        for name, path in MODULES.items()
        if unit(name) in ("comm", "strategies") and "threading.local" in path.read_text()
    ]
    assert not local


@of_each([name for name in MODULES if unit(name) != "comm"])
def test_only_comm_calls_collectives(name: str) -> None:
    calls = [node.func for node in NODES[MODULES[name]] if isinstance(node, ast.Call)]
    direct = [f for f in calls if isinstance(f, ast.Attribute) and f.attr in COLLECTIVES]
    wrong = [f"{f.lineno}: {ast.unparse(f)}" for f in direct if ast.unparse(f.value) in ("dist", "torch.distributed")]
    assert not wrong, f"{MODULES[name]}: {wrong}: go through paceline.comm"


PRIVATE = "torch_private"
OTHERS = {  # private names that are not torch's: Python's, those of libraries that a script may bring, and
    "_gradient_of", "_sample_dirichlet",  # ours on a parameter, an operator in a table
    "_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_is_gil_enabled", "_reconstructor", "_replace",
    "_computed", "_defaults", "_reductions", "_to_sync", "_update_count",  # torchmetrics
    "_FabricDataLoader", "_FabricModule", "_FabricOptimizer", "_dataloader",  # Lightning Fabric
    "_render_traceback_",  # IPython
    "_init_weights", "_keys_to_ignore_on_load_unexpected", "_tied_weights_keys",  # transformers
    "_distributed",  # datasets
    "_hp_mapping", "_hp_optimizer_states_linked", "_index_in_param_group",  # DeepSpeed
    "_lazy_init_hp_params_optimizer_state",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_").isidentifier()


def private_reads(path: Path) -> list[tuple[str, str, int]]:
    """(the object, a private name that is read of it, the line), for attributes and for strings that are such names."""
    found = [("", text, 0) for text in strings(path)]
    for node in NODES[path]:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            found.append((ast.unparse(node.value), node.attr, node.lineno))
    return [(owner, name, line) for owner, name, line in found if is_private(name) and owner != "super()"]


def own_names(path: Path) -> set[str]:
    """What a file defines: functions, classes, variables, and the attributes that it sets on `self`."""
    found: set[str] = set()
    for node in NODES[path]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            found |= {node.attr} if isinstance(owner, ast.Name) and owner.id in ("self", "cls") else set()
    return found


def torch_modules(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of what a file imports of torch, reads along torch's modules, or names in a string."""
    found = [(text, 0) for text in strings(path)]
    aliases = {"torch": "torch"}
    for node in NODES[path]:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in NODES[path]:
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            found.append((".".join([aliases.get(first, ""), *rest]), node.lineno))
    return [(name, line) for name, line in found if re.fullmatch(r"torch(\.\w+)+", name)]


TORCHS = {name for key, path in MODULES.items() if unit(key) == PRIVATE for _, name, _ in private_reads(path)}
OWN = {name for key, path in MODULES.items() if unit(key) != PRIVATE for name in own_names(path)}


@of_each([name for name in MODULES if unit(name) != PRIVATE])
def test_private_names_of_torch_are_used_in_one_place(name: str) -> None:
    path = MODULES[name]
    wrong = [f"{line}: {module}" for module, line in torch_modules(path) if any(map(is_private, module.split(".")))]
    own = own_names(path)
    for owner, private, line in private_reads(path):
        mine = private not in TORCHS or (owner in ("self", "cls") and private in own)
        known = private in OWN | OTHERS or private.startswith("_paceline")
        if not (mine and known):
            wrong.append(f"{line}: {owner}.{private}")
    assert not wrong, f"{path}: {wrong}: read private names of torch in paceline/torch_private, and test them"


def offered(path: Path) -> set[str]:
    """The public names at the top of a module, also those within a `with` there."""
    body = [
        *TREES[path].body,
        *(node for block in TREES[path].body if isinstance(block, ast.With) for node in block.body),
    ]
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    names |= {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {name for name in names if not name.startswith("_")}


@of_each([name for name in MODULES if unit(name) == PRIVATE and "elastic" not in name])
def test_every_private_name_of_torch_is_used(name: str) -> None:
    words = [words_of(path) for key, path in MODULES.items() if key != name]
    unused = {one for one in offered(MODULES[name]) if not any(one in used for used in words)}
    assert not unused, f"{MODULES[name]}: nobody uses {sorted(unused)}"


LONG_FILE, LONG_FUNCTION = 600, 80  # lines; of a function without its docstring


def test_what_has_grown_long_is_said() -> None:
    """Advice, among pytest's warnings: a file that was golfed to stay under a number is worse than a longer one."""
    found = []
    for path in FILES:
        lines = len(path.read_text().splitlines())
        if lines > LONG_FILE:
            found.append(f"{path.relative_to(SOURCE)}: {lines} lines. Is it one subject?")
        for function in functions(path):
            docstring = ast.get_docstring(function, clean=False)
            size = int(function.end_lineno or 0) - function.lineno + 1
            size -= docstring.count("\n") + 1 if docstring else 0
            if size > LONG_FUNCTION:
                found.append(f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}: {size} lines")
    if found:
        warnings.warn("long: " + "; ".join(found), stacklevel=1)
