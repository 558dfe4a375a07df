"""What `paceline run --hosts` starts on each host: `python -m paceline.on_host`. Importing it imports no torch.

1. The first line of the input is a JSON object: the directory and the script. The answer says what is there. It stands
   behind hosts.MARK on stdout, as the exit code later does on stderr.
2. The second line is the job: the environment, and the command line of `paceline run`.
3. The rest of the input is a lease. Each line is a sign of life of the launcher that started the run, or tells to save
   a checkpoint and end ("save"), or to do what SIGTERM asks for here ("notice"), or to stop ("stop 15", by that
   signal).
   When the input ends, because the launcher was killed or the connection broke, or when nothing comes for
   hosts.SILENT_SECONDS, because the network is cut, the run here ends too.

The input is watched, and no terminal is asked for (ssh -tt), since a terminal would mix stdout and stderr.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from importlib import metadata
from typing import Any

from paceline.cli import main as command_line
from paceline.errors import LaunchError
from paceline.launcher import checks, interrupts
from paceline.launcher.hosts import MARK, SILENT_SECONDS, STOP_SECONDS


def main() -> None:
    """Read the request and do what it says."""
    lease = os.dup(0)  # not inherited by the ranks
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    line, rest = _read_line(lease)
    if not line:
        sys.exit("paceline.on_host: nothing came on its input. It is started by `paceline run --hosts`.")
    request = json.loads(line)
    print(f"{MARK}{json.dumps(probe(request))}", flush=True)
    line, rest = _read_line(lease, rest)
    if not line:  # nothing is started
        return
    request |= json.loads(line)
    os.environ.update(request["environ"])
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # what the ranks print shall be seen at once
    interface = _interface(request["address"])
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # "save" may come before the run has a handler of its own. It comes again.
    signal.signal(signal.SIGUSR1, lambda signum, frame: None)
    threading.Thread(target=_watch, args=(lease, rest), daemon=True).start()
    if request["secret"] is not None:
        request["arguments"][1:1] = ["--rdzv-secret-file", _hidden_file(request["secret"])]
    sys.path[0] = request["directory"]  # as for `python -m paceline run` there; it was the home directory
    code: Any = 1
    try:
        command_line(args=request["arguments"], prog_name="paceline")
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # a fault of ours, or of what is installed here: os._exit below would not show it
        traceback.print_exc()
    finally:
        code = code if isinstance(code, int) else 0 if code is None else 1
        sys.stdout.flush()
        print(f"{MARK}{json.dumps({'exit': code})}", file=sys.stderr, flush=True)
        os._exit(min(code, 254))  # 255 is ssh's own. Not by way of Python's end: a stuck thread could hold it up.


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of hosts.Answer."""
    directory, script = request["directory"], request["script"]
    remedy = f"Make it and copy the code there (`rsync -a {directory}/ HOST:{directory}/`), or share the file system."
    try:
        os.chdir(directory)
    except OSError as error:
        return {"problem": f"the directory {directory} cannot be entered there: {error.strerror}. {remedy}"}
    try:
        checks.check_module(script) if request["module"] else checks.check_script(script)
    except LaunchError as error:
        return {"problem": f"{error} ({remedy})" if "There is no script" in str(error) else str(error)}
    digest = ""
    if not request["module"]:
        with open(script, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    connection = os.environ.get("SSH_CONNECTION", "").split() or [""] * 4  # client, its port, ours, our port
    return {
        "paceline": _version("paceline"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "address": connection[2].removeprefix("::ffff:"),
        "client": connection[0].removeprefix("::ffff:"),
        "port": _free_port(),
        "script": digest,
    }


def _hidden_file(secret: str) -> str:
    """A file that holds the secret and has no name in any folder: nothing is left of it, however this process ends. On
    systems without such files, one that only this user can read."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline")  # not inherited by the ranks
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secret.encode())
        return f"/proc/self/fd/{descriptor}"
    descriptor, path = tempfile.mkstemp(prefix="paceline-")
    with open(descriptor, "w") as file:
        file.write(secret)
    return path


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _interface(address: str) -> str:
    """The network interface with this address; "" where there is none. By itself gloo takes the one to which the
    host's own name leads, which on many machines is loopback."""
    import psutil

    found = psutil.net_if_addrs().items() if address else ()
    return next((name for name, all_of_it in found if address in [one.address for one in all_of_it]), "")


def _read_line(descriptor: int, data: bytes = b"") -> tuple[bytes, bytes]:
    """(the next line, what was read beyond it). The line is empty where the input ended before its end. data: what has
    been read already."""
    while b"\n" not in data:
        more = os.read(descriptor, 65536)
        if not more:
            return b"", b""
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def _watch(descriptor: int, data: bytes) -> None:
    """Pass signals on to this process. End it when the input ends, or falls silent."""
    while True:
        *lines, data = data.split(b"\n")
        for line in lines:
            if line.startswith(b"stop "):
                interrupts.end(int(line[5:]))
                threading.Timer(STOP_SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif line == b"save":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif line == b"notice":
                os.kill(os.getpid(), signal.SIGTERM)
        ready, _, _ = select.select([descriptor], [], [], SILENT_SECONDS)
        more = os.read(descriptor, 65536) if ready else b""
        if not more:
            break
        data += more
    interrupts.end(signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
