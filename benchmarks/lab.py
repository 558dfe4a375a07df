"""A laboratory for slow links: hosts on this machine, linked with a chosen bandwidth and delay. Needs root.

    with lab(hosts=2, link=Link(mbit=100, delay_ms=10)) as made:
        print(made.check())                             # measure the link with plain sockets
        made.run("train.py", "--steps", "10", nproc=1)  # `paceline run` on each host

The other benchmarks import it directly; tests/system imports it as `benchmarks.lab`.

Each host has a separate network, process table, host name, mounts and /dev/shm (unshare(1)), so processes on two hosts
share neither memory nor sockets of this machine. A host has one cable, eth0, to a switch: a bridge in another network
namespace. A cable is a veth pair. With a delay it is two TAP devices with delay_line.c between them, and each host's
cable has half of the delay. Both ends of a cable are shaped (tc-tbf(8)), so that a host sends and receives at most
`mbit`. TSO and GSO are off: the shaping would pass a frame of 64 KB as one.

Nothing is visible outside, and every process dies with its parent. So the kernel removes networks, cables and
processes even if this process is killed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NEEDED = {"ip": "iproute2", "tc": "iproute2", "cc": "gcc"}
NEEDED |= dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux")
PORT = 29500
_KERNEL = ("net", "pid", "mount", "uts", "ipc")  # the namespaces of a host


@dataclass(frozen=True)
class Link:
    """The link between any two hosts."""

    mbit: float | None = None  # 10**6 bits a second, in each direction; None: as fast as this machine is
    delay_ms: float = 0.0  # from one host to another: half of a round trip

    @property
    def mtu(self) -> int:
        """Ordinary frames up to 100 Mbit/s, and jumbo frames above, since each frame costs this machine time."""
        return 1500 if self.mbit is not None and self.mbit <= 100 else 9000

    def __str__(self) -> str:
        rate = "unshaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{rate}, {self.delay_ms:g} ms"


def missing() -> str | None:
    """The reason why no laboratory can be made here; None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root"
    gone = [name for name in NEEDED if shutil.which(name) is None]
    if gone:
        packages = " ".join(sorted({NEEDED[name] for name in gone}))
        return f"no {', '.join(gone)} here. On Debian and Ubuntu: apt-get install {packages}"
    return None


class Lab:
    """Attributes:
    link: the requested link.
    addresses: of the hosts.
    namespaces: Linux's names of the networks of the hosts and of the switch, such as "net:[4026532301]".
    """

    def __init__(self, hosts: int, link: Link) -> None:
        self.link = link
        self.addresses = [f"10.88.0.{number}" for number in range(1, hosts + 1)]
        self._keepers: list[subprocess.Popen[bytes]] = []  # of the hosts, and last of the switch
        self._pids: list[int] = []  # of the first process of each, as seen from outside
        self._lines: list[subprocess.Popen[bytes]] = []
        self._launches = itertools.count()

    # --- hosts and cables

    def open(self) -> None:
        for number in range(len(self.addresses)):
            self._keep(f"host{number}")
        self._keep("switch")
        switch = self._pids[-1]
        self.namespaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in self._pids]
        # A folder for compiled programs and the hosts' output: the switch's /dev/shm, which is removed with it.
        self._folder = Path(f"/proc/{switch}/root/dev/shm")
        self._in(switch, "ip", "link", "add", "bridge", "type", "bridge")
        self._in(switch, "ip", "link", "set", "bridge", "mtu", str(self.link.mtu), "up")
        for number, address in enumerate(self.addresses):
            self._plug(self._pids[number], address, f"port{number}")

    def _keep(self, name: str) -> None:
        """Start a host's first process. It ends with this process, and all others on the host end with it."""
        words = [f"--{kind}" for kind in _KERNEL]
        # /dev/shm is the machine's else, and with it what processes share by a name there. A connection that was idle
        # goes on as fast as before: benchmarks take turns on many, of which each would begin slowly again and again.
        script = 'mount -t tmpfs none /dev/shm && hostname "$0" && ip link set lo up'
        script += " && echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle && echo ready && exec sleep infinity"
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *words, "--fork", "--kill-child", "--mount-proc"]
        keeper = subprocess.Popen([*command, "sh", "-c", script, name], stdout=subprocess.PIPE)
        self._keepers.append(keeper)
        _await_ready(keeper, f"host {name}")
        self._pids.append(int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0]))

    def _plug(self, host: int, address: str, port: str) -> None:
        switch = self._pids[-1]
        if self.link.delay_ms:
            line = _delay_line(self._folder)
            half = str(round(self.link.delay_ms * 1e3 / 2))
            words = [str(line), half, str(self.link.mtu + 18), str(host), "eth0", str(switch), port]
            self._lines.append(subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdout=subprocess.PIPE))
            _await_ready(self._lines[-1], "the delay line")
        else:
            ends = ("eth0", "netns", str(host), "type", "veth", "peer", "name", port, "netns", str(switch))
            _do("ip", "link", "add", *ends)
        self._in(host, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        for pid, end in ((host, "eth0"), (switch, port)):
            self._in(pid, "ip", "link", "set", end, "mtu", str(self.link.mtu), "txqueuelen", "10000")
            self._in(pid, sys.executable, str(Path(__file__).resolve()), "offloads", end)
            if self.link.mbit is not None:
                # What may pass at once: a millisecond's worth, and some frames. What waits longer than 200 ms is lost.
                burst = max(int(self.link.mbit * 1e6 / 8 * 1e-3), 3 * self.link.mtu)
                rate = ("rate", f"{self.link.mbit}mbit", "burst", str(burst), "latency", "200ms")
                self._in(pid, "tc", "qdisc", "replace", "dev", end, "root", "tbf", *rate)
        self._in(switch, "ip", "link", "set", port, "master", "bridge", "up")
        self._in(host, "ip", "link", "set", "eth0", "up")

    def _in(self, pid: int, *words: str) -> str:
        return _do(*_entering(pid, ("net",)), *words)

    def close(self) -> None:
        for process in [*self._lines, *self._keepers]:
            process.kill()
        for process in [*self._lines, *self._keepers]:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        deadline = time.monotonic() + 10.0
        while any(Path(f"/proc/{pid}").exists() for pid in self._pids) and time.monotonic() < deadline:
            time.sleep(0.01)  # what runs on the hosts is being ended by the kernel

    # --- what runs there

    def start(self, host: int, *words: str, environ: Mapping[str, str] | None = None, **how: Any) -> Any:
        """Start a process on a host, in the current directory, as subprocess.Popen does. `close` ends it."""
        enter = _entering(self._pids[host], _KERNEL)
        inner = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *words]
        return subprocess.Popen([*enter, *inner], env={**os.environ, **(environ or {})}, **how)

    def run(
        self,
        *words: str,
        nproc: int = 1,
        seconds: float = 300.0,
        environ: Mapping[str, str] | None = None,
    ) -> list[str]:
        """`paceline run` a script with `nproc` processes on each host. Returns the output of each host.

        Raises RuntimeError with the output if a host's processes fail or take longer than `seconds`. Then the
        laboratory is closed, with all its processes.
        """
        command = [sys.executable, "-m", "paceline", "run", "--nnodes", str(len(self.addresses)), "--rdzv-insecure"]
        command += ["--nproc", str(nproc), "--master-addr", self.addresses[0]]
        command += ["--master-port", str(PORT + next(self._launches) % 1000)]
        surroundings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(environ or {})}
        outputs = [self._folder / f"host{number}.txt" for number in range(len(self.addresses))]
        started = []
        for number, address in enumerate(self.addresses):
            place = ["--node-rank", str(number), "--local-addr", address]
            with outputs[number].open("w") as out:
                everything: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT}
                started.append(self.start(number, *command, *place, *words, environ=surroundings, **everything))
        deadline = time.monotonic() + seconds
        codes: list[Any]
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in started]
        except subprocess.TimeoutExpired:
            codes = [f"none after {seconds:g} s"]
        printed = [path.read_text() for path in outputs]
        if any(codes):
            self.close()
            for process in started:
                process.wait()
            told = "\n".join(f"host {number}:\n{text}" for number, text in enumerate(printed))
            raise RuntimeError(f"{' '.join(words)}: exit codes {codes}\n{told}")
        return printed

    # --- measure the cables

    def check(self, seconds: float = 2.0) -> dict[str, Any]:
        """Measure the link between the first two hosts with TCP: {"mbit": [there, back], "round_trip_ms": median}.

        seconds: to send in each direction. TCP finds its rate in the first half; only the second half counts.
        """
        found = []
        for sender, receiver in ((0, 1), (1, 0)):
            address = self.addresses[receiver]
            answering = self.start(receiver, sys.executable, __file__, "answer", address, stdout=subprocess.PIPE)
            _await_ready(answering, "a socket on a host")
            words = (sys.executable, __file__, "ask", address, str(seconds))
            asking = self.start(sender, *words, stdout=subprocess.PIPE, text=True)
            out, _ = asking.communicate(timeout=30.0 + 10 * seconds)
            answering.communicate(timeout=30.0)
            found.append(json.loads(out))
        trips = [each["round_trip_ms"] for each in found]
        return {"mbit": [each["mbit"] for each in found], "round_trip_ms": round(statistics.mean(trips), 3)}

    def sent_bytes(self) -> list[int]:
        """The bytes that each host has sent over its cable so far, including headers."""
        return [interface_bytes("eth0", Path(f"/proc/{pid}/net/dev")) for pid in self._pids[:-1]]


@contextlib.contextmanager
def lab(hosts: int = 2, link: Link = Link()) -> Iterator[Lab]:  # a frozen record
    """A context with a laboratory, which is removed at the end. Raises RuntimeError if it cannot be made."""
    why = missing()
    if why is not None:
        raise RuntimeError(f"no laboratory for slow links: {why}")
    made = Lab(hosts, link)
    try:
        made.open()
        yield made
    finally:
        made.close()


def interface_bytes(name: str, table: Path = Path("/proc/net/dev")) -> int:
    """The bytes that an interface has sent so far, from the table of a process's network."""
    found = re.search(rf"^\s*{re.escape(name)}:(.*)$", table.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{table} has no interface {name}")
    return int(found[1].split()[8])


def _entering(pid: int, kinds: Sequence[str]) -> list[str]:
    words = [f"--{kind}" for kind in kinds]
    return ["setpriv", "--pdeathsig", "KILL", "nsenter", "--target", str(pid), *words, "--"]


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _await_ready(process: subprocess.Popen[bytes], what: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise RuntimeError(f"{what} did not start (exit code {process.wait(timeout=10.0)}); the message is above")


def _delay_line(folder: Path) -> Path:
    program = folder / "delay_line"
    if not program.exists():
        _do("cc", "-O2", "-o", str(program), str(HERE / "delay_line.c"))
    return program


# --- on a host: this file as a script


def _offloads(name: str) -> None:
    """Turn off TSO and GSO with ioctl, since ethtool(8) may be missing. Fails if one stays on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for get, put in ((0x1E, 0x1F), (0x23, 0x24)):  # ETHTOOL_GTSO and STSO, GGSO and SGSO
            value = array.array("I", [put, 0])
            for command in (put, get):
                value[0] = command
                request = struct.pack("16sP", name.encode(), value.buffer_info()[0])
                with contextlib.suppress(OSError):  # a device without it refuses the call
                    fcntl.ioctl(handle, 0x8946, request)  # SIOCETHTOOL
            if value[1]:
                raise SystemExit(f"{name}: TSO or GSO cannot be turned off")


def _answer(address: str) -> None:
    with socket.create_server((address, PORT - 1)) as listening:
        print("ready", flush=True)
        echoing, _ = listening.accept()
        with echoing:
            echoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while echoing.recv(1):
                echoing.sendall(b"x")
        taking, _ = listening.accept()
        with taking:
            seconds = float(taking.recv(16))
            taking.sendall(b"g")
            began = time.monotonic()
            counted, first, last = 0, None, began
            while part := taking.recv(2**16):
                last = time.monotonic()
                if last - began > seconds / 2:
                    if first is None:
                        first = last
                    else:
                        counted += len(part)
            elapsed = max(last - (began if first is None else first), 1e-9)
            taking.sendall(json.dumps(round(counted * 8 / elapsed / 1e6, 2)).encode())


def _ask(address: str, seconds: float) -> None:
    trips = []
    with socket.create_connection((address, PORT - 1)) as echo:
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(12):
            began = time.perf_counter()
            echo.sendall(b"x")
            echo.recv(1)
            trips.append((time.perf_counter() - began) * 1e3)
    with socket.create_connection((address, PORT - 1)) as sending:
        sending.sendall(f"{seconds:<16g}".encode())
        sending.recv(1)
        block, end = bytes(2**16), time.monotonic() + seconds
        while time.monotonic() < end:
            sending.sendall(block)
        sending.shutdown(socket.SHUT_WR)
        mbit = json.loads(sending.recv(64))
    print(json.dumps({"round_trip_ms": round(statistics.median(trips), 3), "mbit": mbit}))


if __name__ == "__main__":
    {"offloads": _offloads, "answer": _answer}.get(sys.argv[1], lambda *words: _ask(words[0], float(words[1])))(
        *sys.argv[2:]
    )
