"""The program of each worker process: runs the user's script as `python script.py` would. Does not import torch.

Run as `python -m paceline.launcher.worker script FILE args...`, `module NAME args...` or `function FILE`. Differences
from plain python:

- The kernel kills the process when its launcher dies.
- An exception that ends the script is written to a file, so that the launcher prints it once for all ranks. stderr
  stays empty. A hook that the script put into sys.excepthook is called as usual.
- Ctrl-C ends the process with exit code 130 and without a traceback.
- A process group that the script leaves open is destroyed at exit.
- Each line of output is written at once and in one piece. Lines of several ranks do not mix, and none is lost.
- A thread of Paceline reports the script's current stack to the launcher (stack_thread.py). If native code crashes,
  the stack is written to a file.
- A process that ends with exit code 0 records the script's last line (world.LEFT), and later that all exit functions
  have finished (world.DONE). A crash of native code after that, in a library's destructors, does no harm.
- A closed standard stream becomes os.devnull. If the disk is full, output to a file of the launcher is dropped and the
  script continues.
- `import torch` and the exit of the interpreter take less time (torch_import.py).
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
import re
import signal
import sys
import time
import traceback
import types
import typing
from collections.abc import Sequence
from multiprocessing.process import current_process

from paceline.errors import LaunchError, PacelineError, chain_of, describe_error, only_reports_lost_peer
from paceline.launcher import stack_thread, store_redirect, streams, torch_import
from paceline.launcher.import_hook import after_import, around_import
from paceline.world import (
    DONE,
    ERROR_FILE,
    FAILING,
    LAUNCHER_PID,
    LEFT,
    LOST_PEER,
    STOP_FILE,
    STORE_PORT,
    Served,
    ends_if_failed,
    send_to_launcher,
    was_sent,
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STANDARD_LIBRARY = re.compile(r"/lib/python3[^/]*/(?!site-packages/)|^<frozen ")
_LONGEST_FOLDER = 107 - len("/listener-12345678")  # for a socket: unix(7) limits the length of its path
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Files of code that is not the user's.
LIBRARY = re.compile(rf"/torch/|^{re.escape(_PACKAGE)}/|{STANDARD_LIBRARY.pattern}")


def main() -> None:
    end_with_launcher()
    if os.environ.get(STOP_FILE) and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # SIGUSR1 asks the launcher to stop the run. If Slurm tracks process trees, it signals all processes.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    streams.reopen_closed()
    kind, script, *args = sys.argv[1:]
    around_import("torch", lambda _: torch_import.paused())
    if os.environ.get(STORE_PORT):
        after_import(store_redirect.MODULE, store_redirect.redirect)
    _register_stack_dump()
    _keep_sockets_with_the_run()
    # write_through: PYTHONUNBUFFERED, set in many containers, would write the parts of a line one by one.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # a TextIOWrapper
    if os.environ.get(ERROR_FILE):
        streams.drop_output_on_full_disk(os.path.dirname(os.environ[ERROR_FILE]))
    pid = os.getpid()
    # Exit functions run in reverse order. Only the exit function of the stack thread runs after _note_done.
    atexit.register(_note_done, pid)
    atexit.register(_close_process_group, pid)
    _note_hard_exits(pid)
    hook = sys.excepthook = _ExceptHook()
    try:
        {"script": run_script, "module": run_module, "function": run_function}[kind](script, args)
        _note_exit(pid, f"at the end of {'the function' if kind == 'function' else os.path.basename(script)}")
    except KeyboardInterrupt as error:
        sys.last_value = error
        sys.exit(130)
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error
            _note_failing(pid, error.code & 255 if isinstance(error.code, int) else 1, error)
        else:
            lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            _note_exit(pid, f"by sys.exit(){_users_line(lines[::-1])}")
        raise
    except BaseException as error:  # asyncio.CancelledError is not an Exception
        if os.getpid() != pid:  # a child that the script forked: it must not report for the rank
            sys.__excepthook__(type(error), error, _skip_worker(error.__traceback__))
        else:
            report(error, hook)
            sys.last_value = error  # as in plain python: exit functions read it to see whether the script failed
        sys.exit(1)


def end_with_launcher() -> None:
    """Ask the kernel to send SIGKILL when the launcher dies. End now if the launcher is already dead. Linux only."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the call above
        os._exit(1)


def crash_file(error_file: str) -> str:
    """Return the path of the file for a worker's stack at a crash of native code (SIGSEGV, SIGABRT and similar)."""
    return f"{error_file}.crash"


def _register_stack_dump() -> None:
    """Report the stack when the launcher asks. Write it at a crash too, unless faulthandler is already in use."""
    path = os.environ.get(ERROR_FILE)
    if path and sys.platform == "linux":
        stack_thread.serve(path)
        with contextlib.suppress(OSError):
            if not faulthandler.is_enabled():
                crash = open(crash_file(path), "a")  # noqa: SIM115  # kept open: the handler writes to it
                faulthandler.enable(file=crash, all_threads=True)  # all: gloo aborts in a separate thread


def _keep_sockets_with_the_run() -> None:
    """Put multiprocessing's sockets, such as those of DataLoader workers, into the launcher's folder.

    A killed process leaves multiprocessing's usual folder behind in TMPDIR. But the launcher removes its own folder.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        folder = os.path.join(os.path.dirname(path), "mp")
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            with contextlib.suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
                current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # no public API


def _note_exit(pid: int, where: str) -> None:
    """Record where this process ends with exit code 0. The launcher reports it if other ranks still need this rank."""
    if os.getpid() == pid:  # not in a child that the script forked
        send_to_launcher(os.environ, LEFT, where)


def _note_failing(pid: int, code: int, error: BaseException | None) -> None:
    """Record that this process will end with a nonzero exit code. The exit may be slow, and others may fail meanwhile.

    Args:
        error: the exception that the script is handling, or None. A script may catch the loss of a peer, log it, and
            exit.
    """
    if os.getpid() == pid:
        lost = error is not None and only_reports_lost_peer(map(describe_error, chain_of(error)))
        send_to_launcher(os.environ, FAILING, f"{code}\n{LOST_PEER if lost else ''}")


def _note_done(pid: int) -> None:
    """Record that all exit functions have finished, if LEFT was recorded (exit code 0)."""
    path = os.environ.get(ERROR_FILE)
    if os.getpid() == pid and path and was_sent(path, LEFT):
        send_to_launcher(os.environ, DONE)


def _note_hard_exits(pid: int) -> None:
    """Make os._exit() record its exit code too, because it runs no exit functions."""
    leave = os._exit

    def _exit(status: int) -> typing.NoReturn:
        if status == 0 and os.getpid() == pid:
            frames = traceback.walk_stack(sys._getframe(1))
            _note_exit(pid, f"by os._exit(){_users_line([(frame.f_code.co_filename, line) for frame, line in frames])}")
        elif isinstance(status, int):
            _note_failing(pid, status & 255, sys.exc_info()[1])
        leave(status)

    os._exit = _exit


def _users_line(lines: Sequence[tuple[str, int]]) -> str:
    """Format the user's innermost line as " at train.py, line 5", or "". `lines` begins with the innermost."""
    own = innermost_own([path for path, _ in lines])
    return "" if own is None else f" at {os.path.basename(lines[own][0])}, line {lines[own][1]}"


def innermost_own(paths: Sequence[str]) -> int | None:
    """Return the index of the user's innermost file, or None. `paths` begins with the innermost file.

    A file of an installed package, such as click or Lightning, counts only if there is no other user file, e.g. with
    `-m`.
    """
    own = [index for index, path in enumerate(paths) if not LIBRARY.search(path)]
    return next((index for index in own if "/site-packages/" not in paths[index]), own[0] if own else None)


def run_script(script: str, args: Sequence[str]) -> None:
    """Execute the file as module __main__, with sys.argv and sys.path[0] as plain python sets them.

    This does not use runpy.run_path, which makes sys.argv[0] an absolute path, and removes __main__ before the
    interpreter exits, while threads and exit functions of the script may still run.
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
    """Execute a module like `python -m name`. sys.path[0] is already right, because this file was run with -m."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ModuleNotFoundError(f"no module {name!r} that can be run", name=name)
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
    """Call the function that `paceline.launch` pickled into a file, and write its result to a file beside it."""
    import pickle

    import cloudpickle  # type: ignore[import-untyped]  # pickle cannot load functions defined in a notebook or function

    _new_main([""])
    with open(path, "rb") as file:
        sys.path[:], payload = pickle.load(file)
    try:
        function, arguments = pickle.loads(payload)
    except Exception as error:  # unpickling may raise anything
        raise LaunchError(
            f"the function, or an argument, cannot be unpickled in this process ({type(error).__name__}: {error}). "
            "Everything that it uses must be in a module that can be imported here, or in the notebook or script."
        ) from error
    try:
        value = function(*arguments)
    except Served:
        value = None
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise LaunchError(
            f"the function's result, of type {type(value).__name__}, cannot be sent back ({error}). Return numbers, "
            "strings, tensors, or lists and dicts of them."
        ) from None
    result = f"{path}.{os.environ['RANK']}"
    with open(result + ".part", "wb") as file:
        file.write(data)
    os.replace(result + ".part", result)


def _new_main(argv: Sequence[str], **attributes: object) -> types.ModuleType:
    """Make a new __main__ for the user's code. worker.py stays importable under its real name."""
    sys.argv = list(argv)
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, **attributes)
    sys.modules[__spec__.name if __spec__ else "paceline.launcher.worker"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module


def _close_process_group(pid: int) -> None:
    """Destroy the script's process group. Otherwise gloo aborts about half of the processes at exit (torch 2.13)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and os.getpid() == pid and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception), ends_if_failed():  # suppress: the group may be broken
            dist.destroy_process_group()


class _ExceptHook:
    """Replaces sys.excepthook. The script's hook may call it as the previous hook."""

    def __init__(self) -> None:
        self.reached = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self.reached = True


def report(error: BaseException, hook: _ExceptHook) -> None:
    """Write the exception for the launcher. Print it if there is no launcher or the file cannot be written."""
    record = describe(error)
    before = len(getattr(error, "__notes__", ()))
    if sys.excepthook is not hook:  # such as rich's, or an experiment tracker's
        try:
            sys.excepthook(type(error), error, _skip_worker(error.__traceback__))
        except Exception:  # a broken hook must not hide the script's error
            hook.reached = True
        record["shown"] = not hook.reached
    for note in getattr(error, "__notes__", ())[before:]:  # added by a hook, such as ours
        record["traceback"] = f"{record['traceback']}{note}\n"
    if not send_to_launcher(os.environ, "", json.dumps(record)) and not record["shown"]:
        with contextlib.suppress(OSError, ValueError):  # closed, or the disk is full
            sys.stderr.write(str(record["traceback"]))


def describe(error: BaseException) -> dict[str, object]:
    """Return the record of an exception, which report.py reads.

    The traceback begins in the script. For Paceline's errors, frames inside Paceline are removed.
    """
    text = traceback.TracebackException(type(error), error, _skip_worker(error.__traceback__))
    if isinstance(error, PacelineError):
        _hide_package(text, error)
    own = "".join(text.format_exception_only()).strip()
    if isinstance(error, SyntaxError):  # Python's text begins with the line of the file, and ends with the error
        own = f"{type(error).__name__}: {error}"
    return {
        "time": time.time(),
        "summary": own,
        "traceback": "".join(text.format()),
        "chain": [describe_error(link) for link in chain_of(error)],
        "shown": False,
    }


def _skip_worker(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Remove this file's frames at the beginning of the traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_package(text: traceback.TracebackException, error: BaseException) -> None:
    """Remove frames inside Paceline, and causes that have frames only in Paceline and torch.

    Frames are identified by module name, not by file: code generated by dataclasses has no file.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [module == "paceline" or module.startswith("paceline.") for module in modules]
    hidden = inside[len(inside) - len(text.stack) :]  # the text lacks the worker's frames
    text.stack[:] = [frame for frame, hide in zip(text.stack, hidden) if not hide]
    for name in ("__cause__", "__context__"):
        inner, cause = getattr(text, name), getattr(error, name)
        if inner is not None and cause is not None:
            _hide_package(inner, cause)
            frames = traceback.walk_tb(cause.__traceback__)
            if {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames} <= {"paceline", "torch"}:
                setattr(text, name, None)


if __name__ == "__main__":
    main()
