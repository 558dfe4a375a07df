"""Unauthenticated clients of a run: each is refused and reported, and the run continues.

With real launchers and their ranks, on this machine. A stranger here runs as the same user, so that only the secret
tells it from a launcher; another user of this machine is tried where the tests run as root.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.launcher.launches import DEADLINE_SECONDS, Machines

from paceline.cli import main
from paceline.config import read_file
from paceline.errors import LaunchError, SettingError
from paceline.launcher import secret, store, tunnel
from paceline.launcher.checks import listen
from paceline.launcher.nodes import read_nodes
from paceline.launcher.rendezvous import client

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
Path(f"ready{rank}").write_text(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
while not Path("go").exists():
    time.sleep(0.05)
total = torch.ones(1)
dist.all_reduce(total)
group = dist.new_group([0, 1])
dist.all_reduce(total, group=group)
print("sum", int(total), flush=True)
"""


class Run(Machines):
    """Launchers of one run that share a secret."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SCRIPT)
        self.key = secret.make_secret()
        self.file = self.write("secret", self.key)

    def write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.touch(0o600)
        path.write_text(text)
        return str(path)

    def start_by_secret(self, file: str, nnodes: str = "2") -> subprocess.Popen[str]:
        """c10d: the first keeps the stores."""
        place = ["--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-secret-file", file]
        return self.start(*place, "script.py")

    def go(self) -> tuple[list[str], str]:
        """Let the ranks go on. (What each printed, what was said on stderr); all must have ended well."""
        (self.directory / "go").touch()
        found = self.end_all()
        assert [code for code, _, _ in found] == [0] * len(found), found
        return [out for _, out, _ in found], "".join(err for _, _, err in found)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


class _Mischief:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _offer(address: tuple[str, int], data: bytes) -> bytes:
    """Send it, and return all that comes back until the connection ends."""
    found = b""
    with socket.create_connection(address, timeout=20.0) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                found += part
        except OSError:
            pass
    return found


def _torchs_client(address: tuple[str, int], command: str) -> str:
    """What torch's own client says, in a process of its own."""
    code = (
        "import datetime, sys, torch.distributed as dist\n"
        f"store = dist.TCPStore({address[0]!r}, {address[1]}, is_master=False, wait_for_workers=False,"
        " timeout=datetime.timedelta(seconds=3))\n"
        f"print('got in', {command})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=80, check=False)
    return done.stdout


@pytest.mark.conformance
def test_strangers_between_machines_are_refused_and_told_while_the_run_ends_right(run: Run) -> None:
    """No secret, a wrong one, random bytes, pickles, torch's own client, and a flood of silent connections."""
    run.start_by_secret(run.file)
    run.start_by_secret(run.file)
    run.wait_for_file("ready0", "ready1")
    place = ("127.0.0.1", run.port)
    made = run.directory / "made by a stranger"
    generator = random.Random(3)
    for key in (b"", secret.make_secret().encode()):
        with pytest.raises(store.Refused):
            tunnel.knock(place, key, 5.0)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(52, b"\0")  # of ZMTP
    noise = [generator.randbytes(generator.randrange(1, 3000)) for _ in range(50)]
    mischief = pickle.dumps(_Mischief(made))
    for data in (*noise, mischief, greeting + mischief * 3, b"GET / HTTP/1.0\r\n"):
        assert len(_offer(place, data)) <= len(greeting)  # that of the keeper
    assert not _torchs_client(place, "store.list_keys(), store.set('a', '1')")
    flood = [socket.create_connection(place) for _ in range(300)]
    tunnel.knock(place, run.key.encode(), 5.0)  # who knows the secret gets in all the same
    outs, said = run.go()
    for one in flood:
        one.close()
    assert outs == ["sum 4\n", "sum 4\n"]
    assert not made.exists()
    told = [line for line in said.splitlines() if line.startswith("paceline: refused")]
    known = f"(?:127.0.0.1|{re.escape(store.UNKNOWN_PLACE)})"  # strangers that close at once
    assert re.match(f"paceline: refused a connection from {known}: it does not know the secret[.]", told[0])
    assert f"at 127.0.0.1:{run.port}" in told[0]
    assert 2 <= len(told) <= 4, told  # the rest is counted
    assert sum(map(int, re.findall(r"refused (\d+) connections", said))) >= 50


def test_who_listens_between_machines_reads_nothing_and_changes_nothing() -> None:
    """A stranger between a launcher and the keeper records all, and says it again; or changes a byte."""
    key = secret.make_secret().encode()
    keeper = tunnel.open_rendezvous_host(listen("127.0.0.1", 0), key)
    place = ("127.0.0.1", keeper.port)
    middle = _Middle(place)
    relay, honest = tunnel.open_relay(("127.0.0.1", middle.port), key, "room"), tunnel.open_relay(place, key, "room")
    try:
        ours, looking = client("127.0.0.1", relay.port, 10.0), client("127.0.0.1", honest.port, 10.0)
        ours.set("a word in the clear", "and its value")
        assert (ours.add("count", 1), ours.get("a word in the clear")) == (1, b"and its value")
        for text in (b"a word in the clear", b"and its value", key):
            assert text not in middle.heard
        _offer(place, bytes(middle.sent))  # the same session once more
        assert looking.add("count", 0) == 1
        middle.forges = True
        with pytest.raises(RuntimeError):
            ours.add("count", 1)
        assert looking.add("count", 0) == 1
    finally:
        for one in (relay, honest, keeper):
            one.close()
        middle.listener.close()


def test_a_stranger_that_stays_is_named_by_its_address(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tunnel, "SECONDS_TO_PROVE", 1.0)
    keeper = tunnel.open_rendezvous_host(listen("127.0.0.1", 0), b"k" * 32)
    with socket.create_connection(("127.0.0.1", keeper.port), timeout=20.0) as silent:
        while silent.recv(4096):
            pass  # until the keeper ends the connection
    said, deadline = "", time.monotonic() + DEADLINE_SECONDS
    while not said and time.monotonic() < deadline:
        time.sleep(0.02)
        said = capfd.readouterr().err
    keeper.close()
    assert said == (
        "paceline: refused a connection from 127.0.0.1: it does not know the secret. "
        f"(The run's store is at 127.0.0.1:{keeper.port}.)\n"
    )


class _Middle:
    """Passes on what a launcher and the keeper say to each other, and keeps it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.address, self.sent, self.heard, self.forges = address, bytearray(), bytearray(), False
        threading.Thread(target=self._meet, daemon=True).start()

    def _meet(self) -> None:
        near, _ = self.listener.accept()
        far = socket.create_connection(self.address)
        threading.Thread(target=self._pass_on, args=(far, near), daemon=True).start()
        self._pass_on(near, far, self.sent)

    def _pass_on(self, here: socket.socket, there: socket.socket, kept: bytearray | None = None) -> None:
        with here, contextlib.suppress(OSError):
            while data := here.recv(65536):
                self.heard += data
                if kept is not None:
                    kept += data
                    data = data[:-1] + bytes([data[-1] ^ self.forges])
                there.sendall(data)
            there.shutdown(socket.SHUT_RDWR)


@pytest.mark.conformance
def test_a_keeper_without_the_secret_is_not_believed() -> None:
    """What answers must know the secret too: a stranger who has taken the port has no part in the run."""
    stranger = tunnel.open_rendezvous_host(listen("127.0.0.1", 0), b"a" * 32)
    relay = tunnel.open_relay(("127.0.0.1", stranger.port), b"k" * 32, "room")
    try:
        with pytest.raises(RuntimeError):
            client("127.0.0.1", relay.port, 3.0)
    finally:
        relay.close()
        stranger.close()


OTHER_USER = 65534


def test_a_system_that_does_not_tell_whose_a_connection_is_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "can_tell_owner", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    store._warn_once_of_no_check.cache_clear()
    with socket.socket() as one:
        store.check_owner(one)
        store.check_owner(one)
    assert capfd.readouterr().err.count("other users of this machine can access the run's store") == 1


@pytest.mark.conformance
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user of this machine"
)
@pytest.mark.skipif(not store.can_tell_owner(), reason="this system does not tell whose a connection is")
def test_another_user_of_this_machine_can_neither_list_nor_write(run: Run) -> None:
    """`paceline run` on one machine: this user's processes alone get to its store."""
    run.start("--nproc", "2", "--tee", "all", "script.py")
    run.wait_for_file("ready0", "ready1")
    host, port = (run.directory / "ready0").read_text().split()
    code = (
        "import encodings.idna, os, socket, struct, sys\n"
        f"os.setgid({OTHER_USER}); os.setuid({OTHER_USER})\n"
        f"sock = socket.create_connection(({host!r}, {port}), timeout=10)\n"
        "try:\n"
        "    sock.sendall(struct.pack('=BI', 0, 0x3C85F7CE) + struct.pack('=BI', 13, 1) + b'\\x11')\n"
        "    found = sock.recv(4096)\n"
        "except ConnectionError:\n"
        "    found = b''\n"
        "print(found)\n"
    )
    strangers = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert strangers.stdout == "b''\n", strangers.stderr
    same = code.replace(f"os.setgid({OTHER_USER}); os.setuid({OTHER_USER})\n", "")
    ours = subprocess.run([sys.executable, "-c", same], capture_output=True, text=True, timeout=60, check=True)
    assert ours.stdout != "b''\n"  # a program of this user's, as under torchrun
    outs, said = run.go()
    assert sorted(outs[0].splitlines()) == ["[rank 1] sum 4", "sum 4"]
    assert f"paceline: refused a connection from 127.0.0.1: it is a process of user {OTHER_USER}" in said


@pytest.mark.conformance
def test_a_wrong_secret_is_told_with_the_remedy(run: Run) -> None:
    run.start_by_secret(run.file, "1:2")
    run.wait_until_listening()
    wrong = run.write("wrong", secret.make_secret())
    second = run.start_by_secret(wrong, "1:2")
    _, said = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 2
    assert f"the launcher there does not accept the secret in {wrong}" in said
    assert "Give all machines the same file (--rdzv-secret-file)" in said


# ------------------------------------------------------------ the secret


def test_a_secret_is_made_once_and_read_by_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    done = CliRunner().invoke(main, ["secret", str(path)])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", first)
    assert first.strip() not in done.output
    done = CliRunner().invoke(main, ["secret", str(path)])
    assert (done.exit_code, path.read_text()) == (2, first)
    assert "exists and may be in use, so it is not overwritten" in done.output
    nodes = read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_secret_file=str(path))
    assert (nodes.secret, nodes.guarded) == (first.strip(), True)
    assert first.strip() not in repr(nodes)
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"other users can read or write it \(its mode is 640\).*chmod 600"):
        secret.read_secret(str(path))
    path.chmod(0o600)
    path.write_text("hunter2\n")
    with pytest.raises(LaunchError, match="has only 7 characters, so it can be guessed"):
        secret.read_secret(str(path))
    with pytest.raises(LaunchError, match="paceline secret"):
        secret.read_secret(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "\0" * 32,
        "\x1b[2J" * 16,
        "a" * 64,
        "ab" * 40,
        "password" * 8,
        "0123456789abcdef" * 4,
        "abcdefghijklmnopqrstuvwxyz0123456789",
        "0" * 63 + "1",
        "x" * 5000,
    ],
)
def test_a_secret_that_can_be_guessed_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(LaunchError, match=r"Make one with `paceline secret"):
        secret.read_secret(str(path))


def test_secrets_of_other_tools_are_taken(tmp_path: Path) -> None:
    draw = random.Random(7)
    for alphabet in ("0123456789abcdef", string.ascii_letters + string.digits + "+/"):  # openssl rand -hex, -base64
        texts = ["".join(draw.choices(alphabet, k=secret.MIN_CHARACTERS)) for _ in range(2000)]
        assert not any(map(secret.can_be_guessed, texts))


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_secret_file_that_is_no_file_is_named_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(LaunchError, match=f"cannot be read: it is a {kind}"):
        secret.read_secret(str(path))
    with pytest.raises(SettingError, match=f"cannot be read: it is a {kind}"):
        read_file(path)
    done = CliRunner().invoke(main, ["run", "--hostfile", str(path), __file__])
    assert done.exit_code == 2
    assert f"it is a {kind}" in done.output


def test_several_machines_need_a_secret() -> None:
    with pytest.raises(LaunchError, match=r"need a shared secret.*`paceline secret FILE`.*--rdzv-secret-file FILE"):
        read_nodes(nnodes="2", rdzv_endpoint="n0:1")
    with pytest.raises(LaunchError, match="need a shared secret"):
        read_nodes(nnodes="2", master_addr="n0", node_rank=0)
    insecure = read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_insecure=True)
    assert (insecure.guarded, insecure.tunnelled, insecure.key) == (True, True, b"")
    assert not read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_backend="etcd-v2").guarded
    here = read_nodes(nnodes="2", rdzv_endpoint="127.0.0.1:1")  # of each launcher, the kernel tells the user
    assert (here.guarded, here.tunnelled, here.secret) == (True, False, None)
    with pytest.raises(LaunchError, match="contradict each other"):
        read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_insecure=True, rdzv_secret_file="x")
    with pytest.raises(LaunchError, match="works only with --rdzv-backend c10d"):
        read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_backend="etcd-v2", rdzv_secret_file="x")
