"""What each worker process runs: the user's script, as `python script.py` would. No torch.

Run as `python -m paceline.launcher.worker script FILE args...`, or `module NAME args...`, or `function FILE`. It
differs from plain python in these things:

- The kernel kills the process when its launcher dies.
- An exception that ends the script is written into a file, for the launcher to show once for all ranks; stderr stays
  empty. A hook that the script put into sys.excepthook is called as always.
- Ctrl-C ends it with exit code 130 and no traceback.
- A process group that the script leaves open is closed at its exit.
- Each line of output is written at once and in one piece: lines of several ranks do not mix, and none is lost.
- A thread of Paceline's answers when the launcher asks where the script stands (stack_thread.py). When native code
  crashes, the stack is written into a file.
- Where it ends with exit code 0, it writes down at which line of the script (world.LEFT), and when all exit functions
  have run (world.DONE): a crash of native code after that, in a library's destructors, loses nothing.
- A standard stream that is closed becomes os.devnull. Where the disk is full, what is printed into a file of the
  launcher's own is lost, and the script goes on.
- `import torch` and the end of the interpreter take less time (torch_import.py).
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

from paceline.errors import LaunchError, PacelineError, chain_of, in_words, only_tells_of_a_lost_peer
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
    STORE_DOOR,
    Served,
    ends_if_failed,
    tell_launcher,
    was_told,
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STANDARD_LIBRARY = re.compile(r"/lib/python3[^/]*/(?!site-packages/)|^<frozen ")
_LONGEST_FOLDER = 107 - len("/listener-12345678")  # of a socket, whose whole path unix(7) limits
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Code that is not the user's, by its file.
LIBRARY = re.compile(rf"/torch/|^{re.escape(_PACKAGE)}/|{STANDARD_LIBRARY.pattern}")


def main() -> None:
    end_with_launcher()
    if os.environ.get(STOP_FILE) and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # It asks the launcher to stop the run. Slurm, where it tracks trees of processes, sends it to all in a task's.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    streams.reopen_closed()
    kind, script, *args = sys.argv[1:]
    around_import("torch", lambda _: torch_import.paused())
    if os.environ.get(STORE_DOOR):
        after_import(store_redirect.MODULE, store_redirect.redirect)
    _register_stack_dump()
    _keep_sockets_with_the_run()
    # write_through: PYTHONUNBUFFERED, set in many containers, would write the parts of a line one by one.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # a TextIOWrapper
    if os.environ.get(ERROR_FILE):
        streams.drop_what_has_no_room(os.path.dirname(os.environ[ERROR_FILE]))
    pid = os.getpid()
    # The first to be registered are the last to be called. After this one only the thread ends that tells the stack.
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


def crash_file(error_file: str) -> str:
    """Where a worker writes its stack when its native code crashes (SIGSEGV, SIGABRT and the like)."""
    return f"{error_file}.crash"


def _register_stack_dump() -> None:
    """Answer when the launcher asks for the stack, and write it at a crash, unless faulthandler is in use already."""
    path = os.environ.get(ERROR_FILE)
    if path and sys.platform == "linux":
        stack_thread.serve(path)
        with contextlib.suppress(OSError):
            if not faulthandler.is_enabled():
                crash = open(crash_file(path), "a")  # noqa: SIM115  # kept open: the handler writes to it
                faulthandler.enable(file=crash, all_threads=True)  # all: gloo aborts in a thread of its own


def _keep_sockets_with_the_run() -> None:
    """multiprocessing has its sockets, as a DataLoader's workers make them, in a folder of its own in TMPDIR, which a
    killed process leaves there. In the launcher's folder they go with that."""
    path = os.environ.get(ERROR_FILE)
    if path:
        folder = os.path.join(os.path.dirname(path), "mp")
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            with contextlib.suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
                current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # there is no public way


def _note_exit(pid: int, where: str) -> None:
    """This process ends with exit code 0. Should the others still need it, the launcher says where it did."""
    if os.getpid() == pid:  # not in a child that the script has forked
        tell_launcher(os.environ, LEFT, where)


def _note_failing(pid: int, code: int, error: BaseException | None) -> None:
    """This process ends with an exit code that is not 0. It may take its time, and others fail meanwhile.

    error: what the script is in the middle of handling. Scripts catch what tells of a lost peer, log it, and exit.
    """
    if os.getpid() == pid:
        lost = error is not None and only_tells_of_a_lost_peer(map(in_words, chain_of(error)))
        tell_launcher(os.environ, FAILING, f"{code}\n{LOST_PEER if lost else ''}")


def _note_done(pid: int) -> None:
    """Nothing of Python's is left to do but to write out what was printed. Only where LEFT says that the exit code will
    be 0."""
    path = os.environ.get(ERROR_FILE)
    if os.getpid() == pid and path and was_told(path, LEFT):
        tell_launcher(os.environ, DONE)


def _note_hard_exits(pid: int) -> None:
    """Have os._exit() leave a note too: it ends the process with no word to anybody."""
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
    """ " at train.py, line 5": the innermost of these lines that is the user's; or "". The first is the innermost."""
    own = innermost_own([path for path, _ in lines])
    return "" if own is None else f" at {os.path.basename(lines[own][0])}, line {lines[own][1]}"


def innermost_own(paths: Sequence[str]) -> int | None:
    """Which of these files, innermost first, is the first of the user's; None: none is.

    A file that is installed, as those of click or Lightning, is the user's only where no other is: with `-m`, say.
    """
    own = [index for index, path in enumerate(paths) if not LIBRARY.search(path)]
    return next((index for index in own if "/site-packages/" not in paths[index]), own[0] if own else None)


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
    if not tell_launcher(os.environ, "", json.dumps(record)) and not record["shown"]:
        with contextlib.suppress(OSError, ValueError):  # closed, or on a disk that is full
            sys.stderr.write(str(record["traceback"]))


def describe(error: BaseException) -> dict[str, object]:
    """The record of an exception, which report.py reads.

    The traceback begins in the script. Of Paceline's own errors, the frames inside Paceline are left out.
    """
    text = traceback.TracebackException(type(error), error, _skip_worker(error.__traceback__))
    if isinstance(error, PacelineError):
        _hide_package(text, error)
    own = "".join(text.format_exception_only()).strip()
    if isinstance(error, SyntaxError):  # Python's text begins with the line of the file, and ends with what is wrong
        own = f"{type(error).__name__}: {error}"
    return {
        "time": time.time(),
        "summary": own,
        "traceback": "".join(text.format()),
        "chain": [in_words(link) for link in chain_of(error)],
        "shown": False,
    }


def _skip_worker(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without this file's frames at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_package(text: traceback.TracebackException, error: BaseException) -> None:
    """Leave out the frames inside Paceline, and causes that have none but in Paceline and torch.

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
            frames = traceback.walk_tb(cause.__traceback__)
            if {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames} <= {"paceline", "torch"}:
                setattr(text, name, None)


if __name__ == "__main__":
    main()
