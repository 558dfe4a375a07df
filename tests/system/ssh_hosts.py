"""Hosts in network namespaces of this machine: each with its own address, name, /etc/hosts and sshd. Needs root.

All are joined by a bridge in a namespace of its own, so that nothing of this machine's network is touched. /etc/hosts
of each maps its own name to 127.0.1.1, as Debian's installer writes it: what goes by the machine's name meets nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

NEEDED = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "unshare": "util-linux"}
PORTS = (22, 2222)


def require() -> None:
    """Fail, not skip, where what these tests need is missing."""
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if missing:
        pytest.fail(f"make test-system needs {', '.join(missing)}: apt install {' '.join(missing)}", pytrace=False)
    if os.geteuid() != 0:
        pytest.fail("make test-system makes network namespaces: run it as root", pytrace=False)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class SshHosts:
    """`count` hosts node1, node2, ... at 10.77.0.1, ..., and one named `login` at 10.77.0.100, from which to start.

    Attributes:
        names: of the hosts that have an sshd.
        options: what `paceline run` is given to enter them.
    """

    def __init__(self, directory: Path, count: int, aliases: Mapping[str, str]) -> None:
        self.directory, self._aliases = directory, aliases
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._numbers = {**{name: number for number, name in enumerate(self.names, 1)}, "login": 100}
        self._prefix = f"pl{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._servers: dict[str, int] = {}  # name -> process id of its sshd, a daemon
        self.options = [
            *("--ssh-option", f"IdentityFile={directory / 'key'}", "--ssh-option", "IdentitiesOnly=yes"),
            *("--ssh-option", f"UserKnownHostsFile={directory / 'known_hosts'}", "--ssh-option", "ConnectTimeout=5"),
        ]

    def namespace(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def address(self, name: str) -> str:
        return f"10.77.0.{self._numbers[name]}"

    def open(self) -> None:
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / "key"))
        shutil.copy(self.directory / "key.pub", self.directory / "authorized_keys")
        os.makedirs("/run/sshd", exist_ok=True)
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "br0", "up")
        for name in self._numbers:
            self._plug_in(name)
        for name in self.names:
            self.start_sshd(name)
        self._write_known_hosts()

    def _plug_in(self, name: str) -> None:
        space = self.namespace(name)
        also = "".join(f"{self.address(other)} {words}\n" for other, words in self._aliases.items())
        others = also + "".join(f"{self.address(other)} {other}\n" for other in self._numbers if other != name)
        Path("/etc/netns", space).mkdir(parents=True)
        Path("/etc/netns", space, "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        Path("/etc/netns", space, "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
        _do("ip", "netns", "add", space)
        ends = ("eth0", "netns", space, "type", "veth", "peer", "name", name, "netns", self._switch)
        _do("ip", "link", "add", *ends)
        _do("ip", "-n", self._switch, "link", "set", name, "master", "br0", "up")
        _do("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _do("ip", "-n", space, "link", "set", device, "up")

    def command(self, name: str, *words: str) -> list[str]:
        """A command line that runs `words` on a host, under the host's name."""
        inner = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(name), "unshare", "--uts", "sh", "-c", inner, name, *words]

    def start_sshd(self, name: str) -> None:
        key = self.directory / f"host_{name}"
        if not key.exists():
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        config = self.directory / f"sshd_{name}"
        pid_file = self.directory / f"sshd_{name}.pid"
        pid_file.unlink(missing_ok=True)
        lines = [*(f"Port {port}" for port in PORTS), f"HostKey {key}", "StrictModes no", "UsePAM no"]
        lines += [f"AuthorizedKeysFile {self.directory / 'authorized_keys'}", "PasswordAuthentication no"]
        lines += [f"PidFile {pid_file}", "PermitRootLogin prohibit-password", "MaxStartups 100"]
        config.write_text("\n".join(lines) + "\n")
        log = self.directory / f"sshd_{name}.log"
        _do(*self.command(name, "/usr/sbin/sshd", "-E", str(log), "-f", str(config)))
        deadline = time.monotonic() + 20.0
        while not pid_file.exists() or not pid_file.read_text().strip():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self._servers[name] = int(pid_file.read_text())

    def stop_sshd(self, name: str) -> None:
        """The server alone: connections that are open stay."""
        os.kill(self._servers.pop(name), signal.SIGKILL)

    def _write_known_hosts(self) -> None:
        lines = []
        for name in self.names:
            kind, key, *_ = (self.directory / f"host_{name}.pub").read_text().split()
            for place in (name, self.address(name)):
                lines += [f"{place} {kind} {key}", f"[{place}]:{PORTS[1]} {kind} {key}"]
        (self.directory / "known_hosts").write_text("\n".join(lines) + "\n")

    def cut(self, name: str) -> None:
        """Pull the host's cable: nobody is told."""
        _do("ip", "-n", self._switch, "link", "set", name, "down")

    def join(self, name: str) -> None:
        _do("ip", "-n", self._switch, "link", "set", name, "up")

    def processes(self, name: str) -> dict[int, str]:
        """pid -> command line, of what runs on a host beside its sshd."""
        server = self._servers.get(name)
        found = {}
        for word in _do("ip", "netns", "pids", self.namespace(name)).split():
            with contextlib.suppress(OSError):
                words = Path("/proc", word, "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if words and (server is None or int(word) != server):  # a zombie has no command line
                    found[int(word)] = words
        return found

    def wait_until_idle(self, names: Sequence[str], seconds: float, but: str = "no process") -> None:
        """Wait until nothing runs on these hosts beside sshd, and what begins with `but`. Fails with what does."""
        deadline = time.monotonic() + seconds
        while True:
            left = {name: list(self.processes(name).values()) for name in names}
            if not any(not words.startswith(but) for found in left.values() for words in found):
                return
            assert time.monotonic() < deadline, f"after {seconds} s these still run: {left}"
            time.sleep(0.1)

    def start(
        self, name: str, *words: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host."""
        pipe = subprocess.PIPE
        place = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        return subprocess.Popen(
            self.command(name, *words), cwd=cwd, env=place, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def kill_all(self, name: str) -> None:
        """Every process on a host, as when its power fails."""
        for pid in _do("ip", "netns", "pids", self.namespace(name)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._servers.pop(name, None)

    def close(self) -> None:
        """Remove everything, also where `open` failed in the middle."""
        spaces = [self.namespace(name) for name in self._numbers]
        known = [line.split()[0] for line in _do("ip", "netns", "list").splitlines()]
        for name in self._numbers:
            if self.namespace(name) in known:
                self.kill_all(name)
        for space in (*spaces, self._switch):
            if space in known:
                _do("ip", "netns", "del", space)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
        with contextlib.suppress(OSError):  # it may hold others', or never have been there
            os.rmdir("/etc/netns")


@contextlib.contextmanager
def ssh_hosts(directory: Path, count: int, aliases: Mapping[str, str] | None = None) -> Iterator[SshHosts]:
    """The hosts, for a block. aliases: further names of a host, as all know it."""
    require()
    hosts = SshHosts(directory, count, aliases or {})
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
