"""--hosts and --hostfile: on which machines to start over ssh, how ssh is called, what its complaints mean. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import LaunchError

MARK = "\x1epaceline "
"""Before what the program on a host (paceline/on_host.py) says to the launcher that started it, as JSON, to the end of
the line: its answer to a probe, and its exit code. All else that comes from there is for the user."""

BEAT_SECONDS = 5.0
"""Between two signs of life that the launcher sends to each host."""

SILENT_SECONDS = 60.0
"""A host that hears nothing for so long ends its part: the launcher is gone, or cannot reach it."""

STOP_SECONDS = 8.0
"""For the run on a host to end its ranks when it is told to; then it is killed, and the kernel ends them."""

PASSED = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "CUBLAS_", "CUDNN_",
)  # fmt: skip
"""Environment variables that go to every host, by how their names begin."""

PASSED_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "TP_SOCKET_IFNAME")
"""And by their whole names. CUDA_VISIBLE_DEVICES is not among them: it is of one machine."""

CONNECT_SECONDS = 10
_NAME = re.compile(r"(?:[\w.+-]+@)?[\w.:%-]+")


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: as typed: what ssh takes, such as "node1", "10.0.0.2", "me@node1", or a Host of ~/.ssh/config.
        slots: the number of processes there; None: not said.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of `paceline run` that concern hosts, as they were typed."""

    hosts: str | None = None
    hostfile: str | None = None
    python: str | None = None
    env: Sequence[str] = ()
    ssh_port: int | None = None
    ssh_option: Sequence[str] = ()

    @property
    def given(self) -> bool:
        return self.hosts is not None or self.hostfile is not None

    def check_unused(self) -> None:
        """Raises LaunchError where an option needs hosts, and none are named."""
        for name in ("python", "env", "ssh_port", "ssh_option"):
            if getattr(self, name):
                raise LaunchError(f"--{name.replace('_', '-')} is for other hosts: give --hosts or --hostfile too.")


# ---------------------------------------------------------------- which hosts


def read_hosts(hosts: str | None, hostfile: str | None, file_text: str = "") -> tuple[Host, ...]:
    """The hosts of --hosts ("a,b" or "a:8,b:8"), or of a --hostfile with `file_text` (a line for each, "a slots=8").

    Raises LaunchError.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError(f"--hosts {hosts} and --hostfile {hostfile}: give one of them.")
    if hostfile is not None:
        where = f"--hostfile {hostfile}"
        found = [_file_line(where, number, line) for number, line in enumerate(file_text.splitlines(), 1)]
        listed = [host for host in found if host is not None]
    else:
        where = f"--hosts {hosts}"
        listed = [_host(where, part.strip()) for part in (hosts or "").split(",") if part.strip()]
    if not listed:
        raise LaunchError(f"{where}: no host is named. Write, for example, --hosts node1,node2.")
    names = [host.name for host in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LaunchError(
            f"{where}: {twice} is named {names.count(twice)} times. Name each host once; for several processes there "
            f"write {twice}:{names.count(twice)}, or --nproc {names.count(twice)} for all hosts alike."
        )
    said = [host.slots is not None for host in listed]
    if any(said) and not all(said):
        raise LaunchError(
            f"{where}: the number of processes is said for some hosts and not for {names[said.index(False)]}. Say it "
            "for all of them, or for none and use --nproc."
        )
    return tuple(listed)


def _host(where: str, text: str) -> Host:
    """ "a", "a:8", "me@a:8", "fe80::1", "[fe80::1]:8"."""
    name, slots = text, None
    bracketed = re.fullmatch(r"((?:[\w.+-]+@)?)\[([^\]]*)\](?::(.*))?", text)
    if bracketed:
        name, slots = bracketed[1] + bracketed[2], bracketed[3]
    elif text.count(":") == 1:
        name, _, slots = text.partition(":")
    return Host(_checked_name(where, name), None if slots is None else _checked_slots(where, name, slots))


def _file_line(where: str, number: int, line: str) -> Host | None:
    """ "a slots=8  # comment"; None of an empty line. Further words, as Open MPI and Horovod have them, are refused and
    not passed over: one of them may say what nobody does."""
    text = line.partition("#")[0].strip()
    if not text:
        return None
    where = f"{where}, line {number}"
    found = re.fullmatch(r"(\S+)(?:\s+slots=(\S+))?", text)
    host = None if found is None else _host(where, found[1])
    if found is None or host is None or (found[2] and host.slots is not None):
        raise LaunchError(f"{where}: {line.strip()!r}. Write a host in each line, and `slots=N` after it, once.")
    return host if found[2] is None else Host(host.name, _checked_slots(where, host.name, found[2]))


def _checked_name(where: str, name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise LaunchError(
            f"{where}: {name!r} is no host's name. Write names as ssh takes them, with commas between and the number "
            "of processes after a colon: node1:8,me@node2:8."
        )
    return name


def _checked_slots(where: str, name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(
            f"{where}: {name} with {text!r} processes. Give a number of 1 or more, such as {name}:8 (in a hostfile "
            "slots=8). ssh's port is --ssh-port."
        )
    return int(text)


def counts(hosts: Sequence[Host], nproc: str | None) -> list[str]:
    """--nproc for each host. nproc: as typed; None: not given. Raises LaunchError where both say it."""
    if hosts[0].slots is None:
        return [nproc or "1"] * len(hosts)
    if nproc is not None:
        raise LaunchError(
            f"--nproc {nproc}, and {hosts[0].name} with {hosts[0].slots} processes: say it once. --nproc is the number "
            "of processes on each host, not of all of them."
        )
    return [str(host.slots) for host in hosts]


# ---------------------------------------------------------------- how the hosts meet


@dataclass(frozen=True)
class Meeting:
    """How the launchers of the hosts find each other. Attributes as of `paceline run`'s options."""

    nnodes: str
    backend: str | None
    endpoint: str | None
    master_addr: str | None
    master_port: int | None
    further: Mapping[str, Any] = field(default_factory=dict)  # options of one machine, which cannot be given to all

    def check(self, hosts: int) -> int:
        """The number of hosts that must stay. Raises LaunchError."""
        for name, value in self.further.items():
            if value is not None and value is not False:  # node_rank is 0
                raise LaunchError(
                    f"--{name.replace('_', '-')} is of one machine, and --hosts starts {hosts}. Leave it out: the "
                    "hosts are numbered in the order in which they are named, and meet at the first."
                )
        least, colon, most = self.nnodes.partition(":")
        if self.nnodes == "1" and not colon:  # the default
            return hosts
        if not (least.isdecimal() and (most or least).isdecimal()) or int(most or least) != hosts or int(least) < 1:
            raise LaunchError(
                f"--nnodes {self.nnodes}, and {hosts} hosts are named. Leave it out, or write --nnodes MIN:{hosts} to "
                "go on when hosts fail, while MIN are left."
            )
        return int(least)

    @property
    def may_move(self) -> bool:
        """May the hosts meet at another one than the first?"""
        return self.endpoint is None and self.master_addr is None

    def options(self, number: int, addresses: Sequence[str], port: int, least: int) -> list[str]:
        """What host `number` is told. addresses: of all hosts, as the others reach them. port: free at the first."""
        size = len(addresses)
        if size == 1:
            return []
        elastic = least < size or self.backend not in (None, "static")
        found = ["--nnodes", f"{least}:{size}" if least < size else str(size)]
        if not elastic:
            found += ["--node-rank", str(number)]
        if self.backend is not None:
            found += ["--rdzv-backend", self.backend]
        if self.endpoint is not None:
            return [*found, "--rdzv-endpoint", self.endpoint]
        host, port = self.master_addr or addresses[0], self.master_port or port
        if elastic:
            found += ["--rdzv-endpoint", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        else:
            found += ["--master-addr", host, "--master-port", str(port)]
        return found if self.master_addr else [*found, "--local-addr", addresses[number]]


# ---------------------------------------------------------------- what goes there


def passed_variables(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The environment variables for the hosts. asked: of --env: NAME, or NAME=VALUE. Raises LaunchError."""
    found = {name: value for name, value in environ.items() if name.startswith(PASSED) or name in PASSED_NAMES}
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"--env {text}: write NAME, for a variable of this shell, or NAME=VALUE.")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: it is not set here. Set and export it, or write --env {name}=VALUE.")
        found[name] = value if equals else environ[name]
    return found


def ssh_command(host: Host, options: HostOptions, python: str, python_path: str | None) -> list[str]:
    """The command line of ssh for a host. All but the interpreter travels as JSON on its input: no shell sees it.

    ssh takes the first value that it reads of an option: the user's stand before ours, but for BatchMode.
    """
    remote = ["exec", "env", *([f"PYTHONPATH={python_path}"] if python_path else []), python, "-m", "paceline.on_host"]
    ours = [
        f"ConnectTimeout={CONNECT_SECONDS}",
        "ServerAliveInterval=5",  # a host that is gone is known after 15 seconds
        "ServerAliveCountMax=3",
        "ControlMaster=no",  # a connection that the user has opened is used, and none is left behind
        "ClearAllForwardings=yes",  # a LocalForward of the user's could be had once only
    ]
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    settings = [word for text in ("BatchMode=yes", *options.ssh_option, *ours) for word in ("-o", text)]
    return ["ssh", "-T", *port, *settings, "--", host.name, shlex.join(remote)]


# ---------------------------------------------------------------- what ssh says

_REMEDIES = (  # a part of what ssh says -> the remedy; the first that fits
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "Its key is not the one that this machine knows. If it was set up anew, remove the old one: "
        "`ssh-keygen -R {name}`, and connect once by hand: `{by_hand}`.",
    ),
    (
        "Host key verification failed",
        "This machine has not seen its key yet. Connect once by hand and answer yes: `{by_hand}`.",
    ),
    (
        "Permission denied",
        "It must let you in without a password: `ssh-copy-id {name}`, and for a key with a passphrase `ssh-add`. "
        "`{by_hand} true` must work without a question.",
    ),
    (
        "Connection refused",
        "No ssh server listens there on that port. Start one (`systemctl start ssh`), or give its port: --ssh-port.",
    ),
    (
        "Could not resolve hostname",
        "Is the name right? Write its address, or put the name into ~/.ssh/config or /etc/hosts.",
    ),
    ("timed out", "Is it running, and is no firewall between? A slow one: --ssh-option ConnectTimeout=60."),
    ("No route to host", "Is it running and on a network that this machine reaches?"),
    ("Network is unreachable", "Is it on a network that this machine reaches?"),
    ("Bad configuration option", "Write --ssh-option KEY=VALUE with an option of `man ssh_config`."),
    ("command-line", "Write --ssh-option KEY=VALUE with an option of `man ssh_config`."),
)


def refusal(host: Host, code: int, said: str, options: HostOptions, python: str, version: str) -> str:
    """Why a host that was asked did not answer. code, said: ssh's exit code, and what came on stderr."""
    port = "" if options.ssh_port is None else f"-p {options.ssh_port} "
    by_hand = f"ssh {port}{host.name}"
    lines = [line.strip() for line in said.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    if code == 255:
        words, remedy = next(
            ((part, text) for part, text in _REMEDIES if part in said), ("", f"Does `{by_hand} true` work by hand?")
        )
        told = next((line for line in lines if words and words in line), lines[-1] if lines else "nothing")
        return f"host {host.name}: ssh says: {told.strip('@ ')}\n  {remedy.format(name=host.name, by_hand=by_hand)}"
    last = lines[-1] if lines else f"nothing (exit code {code})"
    if "No module named paceline.on_host" in said or "No module named 'paceline.on_host'" in said:
        return f"host {host.name}: its Paceline is older than {version}, that of this machine. Install the same there."
    if "No module named" in said and "paceline" in said:
        return (
            f"host {host.name}: {python} there has no Paceline. Install version {version} for it (`{by_hand} {python} "
            f"-m pip install paceline=={version}`), or name another interpreter with --python."
        )
    if code in (126, 127):
        return (
            f"host {host.name}: {python} cannot be run there ({last}). Install the same environment at the same place, "
            "or name an interpreter that all hosts have with --python."
        )
    return f"host {host.name}: the program that was to start there said: {last}\n  Does `{by_hand} {python} -V` work?"


@dataclass(frozen=True)
class Answer:
    """What a host said of itself when it was asked (on_host.probe).

    Attributes:
        problem: why a run cannot start there; "": none.
        paceline, torch, python: versions.
        address, client: of the ssh connection: its own, and that of the launcher; "" where there was none.
        port: a free one.
        script: a hash of the script; "" of a module.
    """

    problem: str = ""
    paceline: str = ""
    torch: str = ""
    python: str = ""
    address: str = ""
    client: str = ""
    port: int = 0
    script: str = ""


def disagreements(answers: Mapping[Host, Answer], version: str) -> list[str]:
    """What the hosts said that keeps a run from starting. version: of Paceline, on this machine."""
    found = [f"host {host.name}: {answer.problem}" for host, answer in answers.items() if answer.problem]
    if found:
        return found
    for host, answer in answers.items():
        if answer.paceline != version:
            found.append(
                f"host {host.name} has Paceline {answer.paceline}, and this machine {version}. Install the same on all."
            )
    for what, name in (("torch", "torch"), ("python", "Python")):
        values = {host.name: getattr(answer, what) for host, answer in answers.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{host} {value}" for host, value in values.items())
            found.append(f"The hosts have different versions of {name}: {told}. Install the same on all.")
    scripts = {host.name: answer.script for host, answer in answers.items()}
    if len(set(scripts.values())) > 1:
        first = next(iter(scripts))
        other = next(host for host, script in scripts.items() if script != scripts[first])
        found.append(
            f"The script on {other} is not that on {first}: the files differ. Copy it there (`rsync -a ./ "
            f"{other}:$PWD/`), or work in a folder that all hosts share."
        )
    return found


def addresses(answers: Sequence[Answer], local: Sequence[bool]) -> list[str]:
    """By which address the others reach each host: the one at which ssh reached it; of this machine the one from which
    the first other host saw ssh come."""
    seen = next((answer.client for answer, here in zip(answers, local) if not here), "127.0.0.1")
    return [seen if here else answer.address for answer, here in zip(answers, local)]


def exit_code(ended: Sequence[tuple[str, int | None]]) -> int:
    """The exit code of the whole, of those of the hosts that ended by themselves, in that order. None: the connection
    was lost. A 1 may only say that another machine failed, which has a code of its own."""
    codes = [1 if code is None else code for _, code in ended if code != 0]
    return next((code for code in codes if code != 1), 1 if codes else 0)
