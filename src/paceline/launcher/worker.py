"""What each worker process runs: the user's script, as `python script.py` would. No torch.

Run as `python -m paceline.launcher.worker script args...`. It differs from plain python in these things:

- The process is killed when its launcher dies, however that dies.
- An exception that ends the script is written into a file, for the launcher to show once for all ranks; stderr stays
  empty. A hook that the script put into sys.excepthook is called as always.
- Ctrl-C ends it with exit code 130 and no traceback.
- A process group that the script leaves open is closed at its exit.
- Each line of output is written at once, in one piece: lines of several ranks do not mix, and none is lost.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib.machinery
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence

from paceline.errors import PacelineError
from paceline.world import ERROR_FILE, LAUNCHER_PID

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    end_with_launcher()
    script, *args = sys.argv[1:]
    # write_through: PYTHONUNBUFFERED, set in many containers, would write the parts of a line one by one.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # a TextIOWrapper
    pid = os.getpid()
    atexit.register(_close_process_group, pid)  # the first to be registered is the last to be called
    hook = sys.excepthook = _Hook()
    try:
        run_script(script, args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.getpid() != pid:  # a child that the script forked by hand: it does not speak for the rank
            sys.__excepthook__(type(error), error, _skip_worker(error.__traceback__))
        else:
            report(error, hook)
        sys.exit(1)


def end_with_launcher() -> None:
    """Ask the kernel for SIGKILL when the launcher dies; end at once if it is dead already. On Linux only."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def run_script(script: str, args: Sequence[str]) -> None:
    """Execute the file as module __main__, with sys.argv and sys.path[0] as plain python sets them.

    Not runpy.run_path: that changes sys.argv[0] to the absolute path, and takes __main__ away again before the
    interpreter's exit, when threads and exit functions of the script still run.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = types.ModuleType("__main__")
    vars(module).update(
        __file__=path,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __cached__=None,
    )
    sys.modules[__spec__.name if __spec__ else "paceline.launcher.worker"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))


def _close_process_group(pid: int) -> None:
    """Without this, gloo aborts the process in the interpreter's exit, about every other time (torch 2.13)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and os.getpid() == pid and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # of a group that is broken already
            dist.destroy_process_group()


class _Hook:
    """Stands in for sys.excepthook. A hook of the script's that calls the one before it comes here."""

    def __init__(self) -> None:
        self.reached = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self.reached = True


def report(error: Exception, hook: _Hook) -> None:
    """Write the exception for the launcher; without a launcher, or where the file cannot be written, show it."""
    record = describe(error)
    if sys.excepthook is not hook:  # rich's, or that of an experiment tracker
        try:
            sys.excepthook(type(error), error, _skip_worker(error.__traceback__))
        except Exception:  # a broken hook must not hide the script's own error
            hook.reached = True
        record["shown"] = not hook.reached
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


def describe(error: Exception) -> dict[str, object]:
    """The record of an exception: what report.py reads.

    The traceback begins in the script. If the error is Paceline's own, its frames inside Paceline are left out.
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
    """The traceback without the frames of this file, with which it begins."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_package(text: traceback.TracebackException, error: BaseException) -> None:
    """Leave out the frames inside Paceline, and causes of which nothing remains.

    By the module's name and not the file's: code that dataclasses make has no file.
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
