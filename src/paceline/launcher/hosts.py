"""--hosts and --hostfile: the list of machines, the ssh command, and remedies for ssh's errors. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import LaunchError

MARK = "\x1epaceline "
"""Prefix of a message from the program on a host (paceline/on_host.py) to its launcher. The rest of the line is JSON,
with the reply to the check or the exit code. All other output of a host is for the user."""

BEAT_SECONDS = 5.0
"""Seconds between two heartbeats of the launcher to each host."""

SILENT_SECONDS = 60.0
"""A host ends its ranks after this time without a heartbeat: the launcher has died, or cannot reach the host."""

STOP_SECONDS = 8.0
"""Time for a host's run to end its ranks after the order to stop. Then the run is killed; the kernel ends the ranks."""

PASSED = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "CUBLAS_", "CUDNN_",
)  # fmt: skip
"""Prefixes of the environment variables that are passed to every host."""

PASSED_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "TP_SOCKET_IFNAME")
"""Other variables that are passed to every host. CUDA_VISIBLE_DEVICES is not, because it is specific to a machine."""

CONNECT_SECONDS = 10
_NAME = re.compile(r"(?:[\w.+-]+@)?[\w.:%-]+")


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: the argument of ssh, as typed: such as "node1", "10.0.0.2", "me@node1", or a Host of ~/.ssh/config.
        slots: the number of processes on this machine; None: not given.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of `paceline run` that concern hosts, as typed."""

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
        """Raise LaunchError if an option needs hosts, but none are given."""
        for name in ("python", "env", "ssh_port", "ssh_option"):
            if getattr(self, name):
                raise LaunchError(f"--{name.replace('_', '-')} needs hosts: give --hosts or --hostfile too.")


# ---------------------------------------------------------------- the list of hosts


def read_hosts(hosts: str | None, hostfile: str | None, file_text: str = "") -> tuple[Host, ...]:
    """Parse --hosts ("a,b" or "a:8,b:8"), or the text of a --hostfile (one "a slots=8" per line).

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
        raise LaunchError(f"{where}: no host given. Write, for example, --hosts node1,node2.")
    names = [host.name for host in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LaunchError(
            f"{where}: {twice} is given {names.count(twice)} times. Give each host once. For several processes on it, "
            f"write {twice}:{names.count(twice)}, or --nproc {names.count(twice)} for every host."
        )
    said = [host.slots is not None for host in listed]
    if any(said) and not all(said):
        raise LaunchError(
            f"{where}: some hosts have a number of processes, but {names[said.index(False)]} has none. Give it for all "
            "hosts, or for none and use --nproc."
        )
    return tuple(listed)


def _host(where: str, text: str) -> Host:
    """Parse "a", "a:8", "me@a:8", "fe80::1" or "[fe80::1]:8"."""
    name, slots = text, None
    bracketed = re.fullmatch(r"((?:[\w.+-]+@)?)\[([^\]]*)\](?::(.*))?", text)
    if bracketed:
        name, slots = bracketed[1] + bracketed[2], bracketed[3]
    elif text.count(":") == 1:
        name, _, slots = text.partition(":")
    return Host(_checked_name(where, name), None if slots is None else _checked_slots(where, name, slots))


def _file_line(where: str, number: int, line: str) -> Host | None:
    """Parse a line such as "a slots=8  # comment". Return None for an empty line.

    Other options of Open MPI's and Horovod's hostfiles raise LaunchError, because Paceline does not implement them.
    """
    text = line.partition("#")[0].strip()
    if not text:
        return None
    where = f"{where}, line {number}"
    found = re.fullmatch(r"(\S+)(?:\s+slots=(\S+))?", text)
    host = None if found is None else _host(where, found[1])
    if found is None or host is None or (found[2] and host.slots is not None):
        raise LaunchError(f"{where}: {line.strip()!r} is invalid. Write one host per line, optionally with `slots=N`.")
    return host if found[2] is None else Host(host.name, _checked_slots(where, host.name, found[2]))


def _checked_name(where: str, name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise LaunchError(
            f"{where}: {name!r} is not a host name. Write names for ssh, separated by commas, with the number of "
            "processes after a colon: node1:8,me@node2:8."
        )
    return name


def _checked_slots(where: str, name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(
            f"{where}: {name} has {text!r} processes. Give a number of 1 or more, such as {name}:8 (in a hostfile, "
            "slots=8). For ssh's port, use --ssh-port."
        )
    return int(text)


def counts(hosts: Sequence[Host], nproc: str | None) -> list[str]:
    """Return the value of --nproc for each host. Raises LaunchError if both --nproc and slots are given.

    Args:
        nproc: as typed; None: not given.
    """
    if hosts[0].slots is None:
        return [nproc or "1"] * len(hosts)
    if nproc is not None:
        raise LaunchError(
            f"--nproc {nproc}, but {hosts[0].name} has {hosts[0].slots} processes. Give only one of them. --nproc is "
            "the number of processes on each host, not their sum."
        )
    return [str(host.slots) for host in hosts]


# ---------------------------------------------------------------- the rendezvous


@dataclass(frozen=True)
class HostRendezvous:
    """The rendezvous of the hosts' launchers. Each attribute is an option of `paceline run`."""

    nnodes: str
    backend: str | None
    endpoint: str | None
    master_addr: str | None
    master_port: int | None
    further: Mapping[str, Any] = field(default_factory=dict)  # per-machine options, invalid with --hosts

    def check(self, hosts: int) -> int:
        """Check the options, and return the minimum number of hosts. Raises LaunchError."""
        for name, value in self.further.items():
            if value is not None and value is not False:  # node_rank is 0
                raise LaunchError(
                    f"--{name.replace('_', '-')} is for one machine, but --hosts starts {hosts}. Leave it out: the "
                    "hosts are numbered in the given order, and the first is the rendezvous host."
                )
        least, colon, most = self.nnodes.partition(":")
        if self.nnodes == "1" and not colon:  # the default
            return hosts
        if not (least.isdecimal() and (most or least).isdecimal()) or int(most or least) != hosts or int(least) < 1:
            raise LaunchError(
                f"--nnodes {self.nnodes}, but {hosts} hosts are given. Leave it out, or write --nnodes MIN:{hosts} to "
                "continue after failures while MIN hosts are left."
            )
        return int(least)

    @property
    def may_move(self) -> bool:
        """Whether another host can become the rendezvous host."""
        return self.endpoint is None and self.master_addr is None

    def options(self, number: int, addresses: Sequence[str], port: int, least: int) -> list[str]:
        """Return the rendezvous options of `paceline run` on host `number`.

        Args:
            addresses: each host's address for the other hosts.
            port: a free port on the first host.
            least: the minimum number of hosts.
        """
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


# ---------------------------------------------------------------- environment and command


def passed_variables(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """Return the environment variables to pass to the hosts. Raises LaunchError.

    Args:
        asked: values of --env: NAME, or NAME=VALUE.
    """
    found = {name: value for name, value in environ.items() if name.startswith(PASSED) or name in PASSED_NAMES}
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"--env {text}: write NAME, to pass this shell's variable, or NAME=VALUE.")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: not set here. Set and export it, or write --env {name}=VALUE.")
        found[name] = value if equals else environ[name]
    return found


def ssh_command(host: Host, options: HostOptions, python: str, python_path: str | None) -> list[str]:
    """Return the ssh command line for a host.

    Except for the interpreter and PYTHONPATH, all data is sent as JSON on stdin, so no shell interprets it. ssh uses
    the first value of each option, so the user's options come before ours, except for BatchMode.
    """
    remote = ["exec", "env", *([f"PYTHONPATH={python_path}"] if python_path else []), python, "-m", "paceline.on_host"]
    ours = [
        f"ConnectTimeout={CONNECT_SECONDS}",
        "ServerAliveInterval=5",  # a lost host is noticed after 15 seconds
        "ServerAliveCountMax=3",
        "ControlMaster=no",  # use the user's open connection if there is one, and leave none behind
        "ClearAllForwardings=yes",  # only one connection could open the port of a LocalForward
    ]
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    settings = [word for text in ("BatchMode=yes", *options.ssh_option, *ours) for word in ("-o", text)]
    return ["ssh", "-T", *port, *settings, "--", host.name, shlex.join(remote)]


# ---------------------------------------------------------------- ssh's errors

_REMEDIES = (  # (part of ssh's message, remedy); the first match counts
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "Its key differs from the known key. If the host was reinstalled, remove the old key (`ssh-keygen -R {name}`) "
        "and connect once yourself: `{manual}`.",
    ),
    (
        "Host key verification failed",
        "This machine does not know its key yet. Connect once yourself and answer yes: `{manual}`.",
    ),
    (
        "Permission denied",
        "ssh must work without a password: run `ssh-copy-id {name}`, and for a key with a passphrase `ssh-add`. "
        "`{manual} true` must work without a question.",
    ),
    (
        "Connection refused",
        "No ssh server listens there on that port. Start one (`systemctl start ssh`), or give its port: --ssh-port.",
    ),
    (
        "Could not resolve hostname",
        "Is the name right? Write its address, or put the name into ~/.ssh/config or /etc/hosts.",
    ),
    ("timed out", "Is it running, and not behind a firewall? If it is slow: --ssh-option ConnectTimeout=60."),
    ("No route to host", "Is it running, and on a network that this machine can reach?"),
    ("Network is unreachable", "Is it on a network that this machine can reach?"),
    ("Bad configuration option", "Write --ssh-option KEY=VALUE with an option of `man ssh_config`."),
    ("command-line", "Write --ssh-option KEY=VALUE with an option of `man ssh_config`."),
)


def refusal(host: Host, code: int, said: str, options: HostOptions, python: str, version: str) -> str:
    """Explain why a host did not answer the check.

    Args:
        code: ssh's exit code.
        said: ssh's stderr.
    """
    port = "" if options.ssh_port is None else f"-p {options.ssh_port} "
    manual = f"ssh {port}{host.name}"
    lines = [line.strip() for line in said.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    if code == 255:
        words, remedy = next(
            ((part, text) for part, text in _REMEDIES if part in said), ("", f"Does `{manual} true` work?")
        )
        error = next((line for line in lines if words and words in line), lines[-1] if lines else "nothing")
        return f"host {host.name}: ssh says: {error.strip('@ ')}\n  {remedy.format(name=host.name, manual=manual)}"
    last = lines[-1] if lines else f"nothing (exit code {code})"
    if "No module named paceline.on_host" in said or "No module named 'paceline.on_host'" in said:
        return f"host {host.name}: Paceline there is older than on this machine ({version}). Install {version} there."
    if "No module named" in said and "paceline" in said:
        return (
            f"host {host.name}: {python} there has no Paceline. Install version {version} for it (`{manual} {python} "
            f"-m pip install paceline=={version}`), or give another interpreter with --python."
        )
    if code in (126, 127):
        return (
            f"host {host.name}: {python} cannot be run there ({last}). Install the same environment at the same path, "
            "or give an interpreter that exists on all hosts with --python."
        )
    return f"host {host.name}: Paceline's program there printed: {last}\n  Does `{manual} {python} -V` work?"


@dataclass(frozen=True)
class Answer:
    """A host's reply to the check (on_host.probe).

    Attributes:
        problem: why a run cannot start on the host, or "".
        paceline, torch, python: their versions.
        address, client: the addresses of the host and of the launcher in the ssh connection; "" without ssh.
        port: a free port on the host.
        script: a hash of the script; "" for a module.
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
    """Compare the hosts' answers, and return the reasons why a run cannot start.

    Args:
        version: Paceline's version on this machine.
    """
    found = [f"host {host.name}: {answer.problem}" for host, answer in answers.items() if answer.problem]
    if found:
        return found
    for host, answer in answers.items():
        if answer.paceline != version:
            found.append(
                f"host {host.name} has Paceline {answer.paceline}, but this machine has {version}. Install the "
                "same version on all."
            )
    for what, name in (("torch", "torch"), ("python", "Python")):
        values = {host.name: getattr(answer, what) for host, answer in answers.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{host} {value}" for host, value in values.items())
            found.append(f"The hosts have different versions of {name}: {listed}. Install the same one on all.")
    scripts = {host.name: answer.script for host, answer in answers.items()}
    if len(set(scripts.values())) > 1:
        first = next(iter(scripts))
        other = next(host for host, script in scripts.items() if script != scripts[first])
        found.append(
            f"The script on {other} differs from the script on {first}. Copy it there (`rsync -a ./ {other}:$PWD/`), "
            "or use a folder that all hosts share."
        )
    return found


def addresses(answers: Sequence[Answer], local: Sequence[bool]) -> list[str]:
    """Return each host's address for the other hosts.

    For a remote host, this is the address that ssh connected to. For this machine, it is the client address of the ssh
    connection to the first remote host.
    """
    seen = next((answer.client for answer, here in zip(answers, local) if not here), "127.0.0.1")
    return [seen if here else answer.address for answer, here in zip(answers, local)]


def exit_code(ended: Sequence[tuple[str, int | None]]) -> int:
    """Return the exit code of the run from the exit codes of its hosts.

    An exit code of 1 may only report the failure of another machine, so the first code above 1 takes precedence.

    Args:
        ended: (host, exit code) of each host that ended without an order, in the order of their ends. An exit code of
            None means that the connection was lost.
    """
    codes = [1 if code is None else code for _, code in ended if code != 0]
    return next((code for code in codes if code != 1), 1 if codes else 0)
