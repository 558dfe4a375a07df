"""Every use of pickle in the source, with the reason why no stranger's bytes come there."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
NAMES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "_pickle", "joblib"}
CALLS = {  # functions of torch that pickle, or unpickle
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip

ALLOWED = {
    "launcher/function.py": "paceline.launch: a function for processes of this machine, in a folder of this user's",
    "launcher/worker.py": "reads what launcher/function.py has written",
    "torch_private/dynamic_rendezvous.py": "bytes that this process has pickled itself; what comes from others is JSON",
    "horovod/elastic/elastic_state.py": "a commit in the launcher's folder, which is this user's alone",
    "horovod/hvd_state.py": "objects of the script's own classes: on one machine, or where the user allows it",
    "verify/plain_worker/examples.py": "a script's own examples, in the folder of verify, which is this user's alone",
    "data/batch_rows.py": "compares two objects by their pickles; nothing is read",
}


def _uses(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & NAMES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & NAMES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & CALLS
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            safe = node.arg == "weights_only"
            if not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                found.add(node.arg)
    return found


def test_pickle_is_used_where_the_list_says_why_and_nowhere_else() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): uses for path in sorted(SOURCE.rglob("*.py")) if (uses := _uses(path))
    }
    unknown = {name: uses for name, uses in found.items() if name not in ALLOWED}
    assert not unknown, f"say in ALLOWED why no stranger's bytes are unpickled there: {unknown}"
    assert not set(ALLOWED) - set(found), "ALLOWED names files that use no pickle"


def test_the_stores_and_what_launchers_tell_each_other_unpickle_nothing() -> None:
    """What strangers reach, and what launchers of several machines tell each other."""
    for name in ("store", "tunnel", "key_values", "secret", "peers", "rendezvous", "agent"):
        assert not _uses(SOURCE / "launcher" / f"{name}.py"), name
