"""What each worker process runs: the user's script, as `python script.py` would. No torch.

Run as `python -m paceline.launcher.worker script FILE args...`, or `module NAME args...`, or `function FILE`. It
differs from plain python in these things:

- The kernel kills the process when its launcher dies.
- An exception that ends the script is written into a file, for the launcher to show once for all ranks; stderr stays
  empty. A hook that the script put into sys.excepthook is called as always.
- Ctrl-C ends it with exit code 130 and no traceback.
- A process group that the script leaves open is closed at its exit.
- Each line of output is written at once and in one piece: lines of several ranks do not mix, and none is lost.
- On a signal from the launcher, it writes its stack into a file.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence

from paceline.errors import LaunchError, PacelineError
from paceline.world import ERROR_FILE, LAUNCHER_PID, Served, ends_if_failed

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The launcher's request for the stack. A real-time signal: SIGUSR1 and 2 belong to scripts and batch systems.
STACK_SIGNAL = signal.SIGRTMIN + 12 if sys.platform == "linux" else None


def main() -> None:
    end_with_launcher()
    kind, script, *args = sys.argv[1:]
    _register_stack_dump()
    # write_through: PYTHONUNBUFFERED, set in many containers, would write the parts of a line one by one.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # a TextIOWrapper
    pid = os.getpid()
    atexit.register(_close_process_group, pid)  # the first to be registered is the last to be called
    hook = sys.excepthook = _ExceptHook()
    try:
        {"script": run_script, "module": run_module, "function": run_function}[kind](script, args)
    except KeyboardInterrupt as error:
        sys.last_value = error
        sys.exit(130)
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error
        raise
    except BaseException as error:  # asyncio.CancelledError is no Exception
        if os.getpid() != pid:  # a child that the script forked by hand: it does not speak for the rank
            sys.__excepthook__(type(error), error, _skip_worker(error.__traceback__))
        else:
            report(error, hook)
            sys.last_value = error  # as plain python does: what runs at the exit looks whether the script failed
        sys.exit(1)


def end_with_launcher() -> None:
    """Ask the kernel for SIGKILL when the launcher dies; end at once if it is dead already. On Linux only."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def stack_file(error_file: str) -> str:
    """Where a worker writes its stack when STACK_SIGNAL comes."""
    return f"{error_file}.stand"


def _register_stack_dump() -> None:
    """Write the stack whenever STACK_SIGNAL comes."""
    path = os.environ.get(ERROR_FILE)
    if path and STACK_SIGNAL is not None:
        with contextlib.suppress(OSError):
            file = open(stack_file(path), "a")  # noqa: SIM115  # kept open: the handler writes to it
            # What the interpreter restores at its exit, when a request may still come: the default action would kill.
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def run_script(script: str, args: Sequence[str]) -> None:
    """Execute the file as module __main__, with sys.argv and sys.path[0] as plain python sets them.

    Not by runpy.run_path: that makes sys.argv[0] an absolute path, and removes __main__ before the interpreter's exit,
    when threads and exit functions of the script still run.
    """
    path = os.path.abspath(script)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _new_main([script, *args], __file__=path, __loader__=loader, __cached__=None)
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def run_module(name: str, args: Sequence[str]) -> None:
    """As `python -m name` does. sys.path[0] is the current directory already, since this file is run that way too."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ModuleNotFoundError(f"there is no module {name!r} that could be run", name=name)
    code = spec.loader.get_code(spec.name)
    main = _new_main(
        [str(spec.origin), *args],
        __file__=spec.origin,
        __loader__=spec.loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
    )
    assert code is not None
    exec(code, vars(main))


def run_function(path: str, args: Sequence[str]) -> None:
    """Call the function that `paceline.launch` pickled into a file, and write its result into one beside."""
    import pickle

    import cloudpickle  # type: ignore[import-untyped]  # functions of a notebook or of a function have no module to be found in

    _new_main([""])
    with open(path, "rb") as file:
        sys.path[:], payload = pickle.load(file)
    try:
        function, arguments = pickle.loads(payload)
    except Exception as error:  # unpickling raises what it likes
        raise LaunchError(
            f"the function, or an argument, cannot be made in this process ({type(error).__name__}: {error}). What it "
            "is made of must be in a module that can be imported here, or in the notebook or script itself."
        ) from error
    try:
        value = function(*arguments)
    except Served:
        value = None
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise LaunchError(
            f"what the function returned, of type {type(value).__name__}, cannot be sent back ({error}). Return "
            "numbers, strings, tensors, or lists and dicts of them."
        ) from None
    result = f"{path}.{os.environ['RANK']}"
    with open(result + ".part", "wb") as file:
        file.write(data)
    os.replace(result + ".part", result)


def _new_main(argv: Sequence[str], **attributes: object) -> types.ModuleType:
    """A fresh __main__ for the user's code. This module stays importable under its own name."""
    sys.argv = list(argv)
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, **attributes)
    sys.modules[__spec__.name if __spec__ else "paceline.launcher.worker"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module


def _close_process_group(pid: int) -> None:
    """Close the script's process group: else gloo aborts the process at its exit, every other time (torch 2.13)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and os.getpid() == pid and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception), ends_if_failed():  # the first: of a group that is broken already
            dist.destroy_process_group()


class _ExceptHook:
    """Stands in for sys.excepthook. A hook of the script's that calls the hook before it comes here."""

    def __init__(self) -> None:
        self.reached = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self.reached = True


def report(error: BaseException, hook: _ExceptHook) -> None:
    """Write the exception for the launcher. Without a launcher, or where the file cannot be written, print it."""
    record = describe(error)
    before = len(getattr(error, "__notes__", ()))
    if sys.excepthook is not hook:  # rich's, or that of an experiment tracker
        try:
            sys.excepthook(type(error), error, _skip_worker(error.__traceback__))
        except Exception:  # a broken hook must not hide the script's own error
            hook.reached = True
        record["shown"] = not hook.reached
    for note in getattr(error, "__notes__", ())[before:]:  # a hook's, such as ours
        record["traceback"] = f"{record['traceback']}{note}\n"
    path = os.environ.get(ERROR_FILE)
    try:
        if not path:
            raise OSError("there is no launcher")
        with open(path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(path + ".part", path)  # whole or not at all
    except OSError:
        if not record["shown"]:
            sys.stderr.write(str(record["traceback"]))


def describe(error: BaseException) -> dict[str, object]:
    """The record of an exception, which report.py reads.

    The traceback begins in the script. Of Paceline's own errors, the frames inside Paceline are left out.
    """
    text = traceback.TracebackException(type(error), error, _skip_worker(error.__traceback__))
    if isinstance(error, PacelineError):
        _hide_package(text, error)
    return {
        "time": time.time(),
        "summary": "".join(text.format_exception_only()).strip(),
        "traceback": "".join(text.format()),
        "chain": [f"{type(link).__name__}: {link}" for link in _chain(error)],
        "shown": False,
    }


def _skip_worker(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without this file's frames at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_package(text: traceback.TracebackException, error: BaseException) -> None:
    """Leave out the frames inside Paceline, and causes of which no frame remains.

    Frames are told by their module's name and not by their file: code that dataclasses generate has no file.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [module == "paceline" or module.startswith("paceline.") for module in modules]
    hidden = inside[len(inside) - len(text.stack) :]  # of the worker's own frames, the text has none
    text.stack[:] = [frame for frame, hide in zip(text.stack, hidden) if not hide]
    for name in ("__cause__", "__context__"):
        inner, cause = getattr(text, name), getattr(error, name)
        if inner is not None and cause is not None:
            _hide_package(inner, cause)
            if not inner.stack:
                setattr(text, name, None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what led to it, at most 20."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


if __name__ == "__main__":
    main()
