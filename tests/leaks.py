"""What a test may leave behind: snapshots of the process before and after it, and what differs.

conftest.py holds every test to it in pytest's process; rank.py every test marked `ranks` in each rank.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import psutil

GRACE_SECONDS = 20.0  # for what is already ending
ENVIRONMENT_OF_LIBRARIES = {
    "PYTEST_CURRENT_TEST",  # pytest's own
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn's import
    "KMP_INIT_AT_FORK",  # scikit-learn's import
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch.compile
    "TRITON_CACHE_DIR",  # torch.compile
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # DeepSpeed's import
    "DS_ACCELERATOR",  # DeepSpeed reads it at its import; the strategy sets it for that
}
PROCESSES_OF_LIBRARIES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
Snapshot = dict[object, object]


def environment() -> Snapshot:
    return {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_OF_LIBRARIES}


def threads() -> Snapshot:
    own = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
    return {t.ident: t.name for t in own if not _of_torch_compile(t)}


def _of_torch_compile(thread: threading.Thread) -> bool:
    """The pools and the progress bar's thread that torch.compile keeps, once used, for the life of the process."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool = compiler.AsyncCompile.pool if compiler else None
    if pool is not None and pool.cache_info().currsize and thread in pool()._threads:
        return True
    return "SubprocPool" in thread.name or type(thread).__module__.startswith(("torch._inductor", "tqdm"))


def children() -> Snapshot:
    found: Snapshot = {}
    ranks = sys.modules.get("tests.ranks")
    kept = ranks.processes_of_teams() if ranks else ()
    for child in psutil.Process().children(recursive=True):
        if child.pid in kept:
            continue
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if command and not any(part in command for part in PROCESSES_OF_LIBRARIES):  # a zombie has no command
            found[child.pid] = command
    return found


def ports() -> Snapshot:
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.fd: f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}


def signal_handlers() -> Snapshot:
    return {s.name: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def torch_globals() -> Snapshot:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {"default_dtype": "torch.float32", "autocast": False, "grad": True, "deterministic": False}
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def process_group() -> Snapshot:
    distributed = sys.modules.get("torch.distributed")
    return {"initialised": distributed is not None and distributed.is_available() and distributed.is_initialized()}


WATCHED: dict[str, Callable[[], Snapshot]] = {
    "process group": process_group,  # first: its threads and ports go with it
    "environment variable": environment,
    "thread": threads,
    "child process": children,
    "listening port": ports,
    "signal handler": signal_handlers,
    "torch global": torch_globals,
}


def leaked(kind: str, before: Snapshot) -> Snapshot:
    """What is new, or changed, or (where that is a fault) gone since `before`."""
    now = WATCHED[kind]()
    may_end = kind in ("thread", "child process", "listening port")
    names = now.keys() - before.keys() if may_end else now.keys() | before.keys()
    return {name: now.get(name, "(removed)") for name in names if now.get(name) != before.get(name)}


def clean_up(kind: str, before: Snapshot, found: Snapshot) -> None:
    """As far as it can be done, so that one faulty test does not fail the ones after it."""
    if kind == "environment variable":
        for name in found:
            os.environ.pop(str(name), None)
            if name in before:
                os.environ[str(name)] = str(before[name])
    elif kind == "child process":
        for pid in found:
            os.kill(int(str(pid)), signal.SIGKILL)
    elif kind == "signal handler":
        for name in found:
            signal.signal(signal.Signals[str(name)], before[name])  # type: ignore[arg-type]
    elif kind == "torch global":
        torch = sys.modules["torch"]
        torch.set_default_dtype(getattr(torch, str(before["default_dtype"]).removeprefix("torch.")))
        torch.set_autocast_enabled("cpu", before["autocast"])
        torch.set_grad_enabled(before["grad"])
        torch.use_deterministic_algorithms(before["deterministic"])
    elif kind == "process group":
        sys.modules["torch.distributed"].destroy_process_group()


def snapshots(leaving_out: tuple[str, ...] = ()) -> dict[str, Snapshot]:
    return {kind: snapshot() for kind, snapshot in WATCHED.items() if kind not in leaving_out}


def left_behind(before: dict[str, Snapshot]) -> list[str]:
    """What has leaked since `before`, in words; it is cleaned up where that can be done."""
    faults = []
    for kind, earlier in before.items():
        found = leaked(kind, earlier)
        if found and kind in ("thread", "child process", "listening port"):
            gc.collect()  # a loader or a store that only a cycle keeps alive
            deadline = time.monotonic() + GRACE_SECONDS
            while (found := leaked(kind, earlier)) and time.monotonic() < deadline:
                time.sleep(0.02)
        if found:
            clean_up(kind, earlier, found)
            faults += [f"{kind} {name}: {value}" for name, value in found.items()]
    return faults
