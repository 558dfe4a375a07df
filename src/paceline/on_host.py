"""The program that `paceline run --hosts` starts on each host: `python -m paceline.on_host`. Does not import torch.

1. The first line of the input is a JSON object: the directory and the script. The reply describes the host. It is
   printed on stdout after hosts.MARK. Later the exit code is printed on stderr, after the same mark.
2. The second line is the job: the environment, and the command line of `paceline run`.
3. The rest of the input is a lease. Each line is a heartbeat of the launcher that started the run, or a request: save a
   checkpoint and end ("save"), act as on SIGTERM ("notice"), or stop with a signal ("stop 15").
   The run on this host also ends if the input ends (the launcher was killed, or the connection broke), or if no line
   arrives for hosts.SILENT_SECONDS (the network failed).

This program watches its input instead of a terminal (ssh -tt), because a terminal would mix stdout and stderr.
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
    """Read the request, run the job, and print its exit code."""
    lease = os.dup(0)  # not inherited by the ranks
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    line, rest = _read_line(lease)
    if not line:
        sys.exit("paceline.on_host: the input is empty. Use `paceline run --hosts`, which starts this program.")
    request = json.loads(line)
    print(f"{MARK}{json.dumps(probe(request))}", flush=True)
    line, rest = _read_line(lease, rest)
    if not line:  # the launcher starts no job on this host
        return
    request |= json.loads(line)
    os.environ.update(request["environ"])
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # show the ranks' output immediately
    interface = _interface(request["address"])
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # "save" may arrive before the run has installed its handler. The launcher repeats it.
    signal.signal(signal.SIGUSR1, lambda signum, frame: None)
    threading.Thread(target=_watch, args=(lease, rest), daemon=True).start()
    if request["secret"] is not None:
        request["arguments"][1:1] = ["--rdzv-secret-file", _hidden_file(request["secret"])]
    sys.path[0] = request["directory"]  # as for `python -m paceline run` in this directory; before: the home directory
    code: Any = 1
    try:
        command_line(args=request["arguments"], prog_name="paceline")
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # a bug in Paceline or a broken installation: os._exit below would hide it
        traceback.print_exc()
    finally:
        code = code if isinstance(code, int) else 0 if code is None else 1
        sys.stdout.flush()
        print(f"{MARK}{json.dumps({'exit': code})}", file=sys.stderr, flush=True)
        os._exit(min(code, 254))  # 255 means that ssh failed. Skip Python's shutdown: a stuck thread could block it.


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Check the directory and the script, and return the fields of hosts.Answer."""
    directory, script = request["directory"], request["script"]
    remedy = f"Copy the code there (`rsync -a {directory}/ HOST:{directory}/`), or use a shared directory."
    try:
        os.chdir(directory)
    except OSError as error:
        return {"problem": f"cannot enter the directory {directory}: {error.strerror}. Create it. {remedy}"}
    try:
        checks.check_module(script) if request["module"] else checks.check_script(script)
    except LaunchError as error:
        return {"problem": f"{error} ({remedy})" if "There is no script" in str(error) else str(error)}
    digest = ""
    if not request["module"]:
        with open(script, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    connection = os.environ.get("SSH_CONNECTION", "").split() or [""] * 4  # client, client's port, host, host's port
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
    """Write the secret to an anonymous file, which disappears with this process. Return its path.

    On systems without anonymous files, use a temporary file that only this user can read.
    """
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
    """Return the network interface with this address, or "".

    By default, gloo uses the interface of the host's name, which is loopback on many machines.
    """
    import psutil

    found = psutil.net_if_addrs().items() if address else ()
    return next((name for name, all_of_it in found if address in [one.address for one in all_of_it]), "")


def _read_line(descriptor: int, data: bytes = b"") -> tuple[bytes, bytes]:
    """Read a line. Return it and the bytes read after it. The line is empty if the input ended before a newline.

    Args:
        data: bytes that were read before.
    """
    while b"\n" not in data:
        more = os.read(descriptor, 65536)
        if not more:
            return b"", b""
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def _watch(descriptor: int, data: bytes) -> None:
    """Send the requested signals to this process. End it if the input ends, or is silent for SILENT_SECONDS."""
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
