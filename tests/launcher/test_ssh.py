"""--hosts: what is read, refused and decided without any host. tests/system/test_hosts.py has real ones."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.cli import main
from paceline.errors import LaunchError
from paceline.launcher import hosts as hosts_module
from paceline.launcher.hosts import (
    MARK,
    Answer,
    Host,
    HostOptions,
    HostRendezvous,
    addresses,
    counts,
    disagreements,
    exit_code,
    passed_variables,
    read_hosts,
    refusal,
    ssh_command,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b", (Host("a"), Host("b"))),
        ("a:8, me@b.example.org:4,", (Host("a", 8), Host("me@b.example.org", 4))),
        ("10.0.0.2,fe80::1%eth0", (Host("10.0.0.2"), Host("fe80::1%eth0"))),
        ("[fe80::1]:8,me@[::2]:1", (Host("fe80::1", 8), Host("me@::2", 1))),
    ],
)
def test_hosts_are_read(text: str, expected: tuple[Host, ...]) -> None:
    assert read_hosts(text, None) == expected


def test_a_hostfile_is_read() -> None:
    text = "# the cluster\nnode1 slots=8\n\n me@node2   slots=4 # old\n"
    assert read_hosts(None, "hosts.txt", text) == (Host("node1", 8), Host("me@node2", 4))
    assert read_hosts(None, "hosts.txt", "node1\nnode2\n") == (Host("node1"), Host("node2"))
    assert read_hosts(None, "hosts.txt", "node1:2") == (Host("node1", 2),)


@pytest.mark.parametrize(
    ("hosts", "file", "said"),
    [
        ("", None, "no host given"),
        ("a,b,a", None, "--hosts a,b,a: a is given 2 times. .* a:2, or --nproc 2"),
        ("a:8,b", None, "some hosts have a number of processes, but b has none"),
        ("a:0", None, "a has '0' processes. .* --ssh-port"),
        ("a:x", None, "a has 'x' processes"),
        ("-oProxyCommand=x,b", None, "'-oProxyCommand=x' is not a host name"),
        ("a b", None, "'a b' is not a host name"),
        (None, "a slots=two", "--hostfile f, line 1: a has 'two' processes"),
        (
            None,
            "a\nb max_slots=4",
            "line 2: 'b max_slots=4' is invalid. Write one host per line, optionally with `slots=N`",
        ),
        (None, "a slots=1 slots=2", "one host per line"),
        (None, "# nothing", "--hostfile f: no host given"),
        ("a", "b", "give one of them"),
    ],
)
def test_hosts_that_cannot_be_read(hosts: str | None, file: str | None, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_hosts(hosts, None if file is None else "f", file or "")


def test_processes_on_each_host() -> None:
    assert counts((Host("a"), Host("b")), None) == ["1", "1"]
    assert counts((Host("a"), Host("b")), "gpu") == ["gpu", "gpu"]
    assert counts((Host("a", 2), Host("b", 3)), None) == ["2", "3"]
    with pytest.raises(
        LaunchError, match=r"--nproc 16, but a has 8 processes. Give only one of them. .* not their sum"
    ):
        counts((Host("a", 8), Host("b", 8)), "16")  # as Horovod's users write it


def meeting(nnodes: str = "1", backend: str | None = None, **rest: Any) -> HostRendezvous:
    return HostRendezvous(
        nnodes, backend, rest.get("endpoint"), rest.get("addr"), rest.get("port"), rest.get("further", {})
    )


def test_how_the_hosts_meet() -> None:
    at = ["10.0.0.1", "10.0.0.2"]
    assert meeting().options(0, at[:1], 4000, 1) == []
    place = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 4000 --local-addr 10.0.0.2"
    assert meeting().options(1, at, 4000, 2) == place.split()
    place = "--nnodes 2 --node-rank 1 --master-addr n1 --master-port 29500"
    assert meeting(addr="n1", port=29500).options(1, at, 4000, 2) == place.split()
    place = "--nnodes 1:2 --rdzv-endpoint [fe80::1]:4000 --local-addr 10.0.0.2"
    assert meeting("1:2").options(1, ["fe80::1", at[1]], 4000, 1) == place.split()
    place = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:1"
    assert meeting(backend="c10d", endpoint="n1:1").options(0, at, 4000, 2) == place.split()


def test_numbers_of_machines_that_do_not_fit() -> None:
    assert (meeting().check(3), meeting("3").check(3), meeting("1:3").check(3)) == (3, 3, 1)
    for nnodes in ("2", "1:2", "two", "0:3"):
        with pytest.raises(LaunchError, match=f"--nnodes {nnodes}, but 3 hosts are given"):
            meeting(nnodes).check(3)
    with pytest.raises(LaunchError, match="--node-rank is for one machine, but --hosts starts 3"):
        meeting(further={"node_rank": 0, "local_addr": None, "standalone": False}).check(3)


def test_variables_that_travel() -> None:
    here = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/h", "PYTHONPATH": "src", "WANDB_API_KEY": "x"}
    assert passed_variables(here, ()) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "src"}
    assert passed_variables(here, ("HOME", "A=b=c", "NCCL_DEBUG="))["HOME"] == "/h"
    assert passed_variables(here, ("A=b=c", "NCCL_DEBUG=")) == {"NCCL_DEBUG": "", "PYTHONPATH": "src", "A": "b=c"}
    with pytest.raises(LaunchError, match="--env NONE: not set here"):
        passed_variables(here, ("NONE",))
    with pytest.raises(LaunchError, match="--env 1=2: write NAME"):
        passed_variables(here, ("1=2",))


def test_the_command_line_of_ssh() -> None:
    """Without a question, and what the user says stands before what we say: ssh takes the first."""
    options = HostOptions(hosts="a", ssh_port=2222, ssh_option=("ConnectTimeout=60", "User=me"))
    command = ssh_command(Host("a"), options, "/opt/my env/python", "src:it's")
    assert command[:4] == ["ssh", "-T", "-p", "2222"]
    assert command[-3:] == ["--", "a", "exec env 'PYTHONPATH=src:it'\"'\"'s' '/opt/my env/python' -m paceline.on_host"]
    settings = command[5:-3:2]
    assert settings[0] == "BatchMode=yes"
    assert settings.index("ConnectTimeout=60") < settings.index(f"ConnectTimeout={hosts_module.CONNECT_SECONDS}")


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (
            255,
            "ssh: connect to host a port 22: Connection refused\n",
            "Connection refused\n  No ssh server .*--ssh-port",
        ),
        (255, "ssh: connect to host a port 22: Connection timed out\n", "ConnectTimeout=60"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "~/.ssh/config or /etc/hosts"),
        (255, "No ED25519 host key is known for a\nHost key verification failed.\n", "answer yes: `ssh -p 22 a`"),
        (255, "@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "-R a"),
        (255, "me@a: Permission denied (publickey,password).\n", "says: me@a: Permission denied .*`ssh-copy-id a`"),
        (255, "command-line: line 0: Bad configuration option: foo\n", "man ssh_config"),
        (255, "something new\n", "ssh says: something new\n  Does `ssh -p 22 a true` work"),
        (127, "env: '/p': No such file or directory\n", "/p cannot be run there .*--python"),
        (1, "/p: Error while finding module: No module named 'paceline'\n", "has no Paceline. Install version 1.2"),
        (1, "/p: No module named paceline.on_host\n", "older than on this machine .1.2"),
        (1, "This account is not available.\n", "printed: This account is not available"),
        (0, "", "printed: nothing"),
    ],
)
def test_why_a_host_did_not_answer(code: int, said: str, told: str) -> None:
    text = refusal(Host("a"), code, said, HostOptions(ssh_port=22), "/p", "1.2")
    with pytest.raises(LaunchError, match=rf"(?s)host a: .*{told}"):
        raise LaunchError(text)


def test_hosts_that_do_not_agree() -> None:
    hosts = (Host("a"), Host("b"))
    good = Answer(paceline="1", torch="2.13", python="3.11.2", script="x")
    assert disagreements(dict.fromkeys(hosts, good), "1") == []
    assert disagreements(dict(zip(hosts, (good, Answer(problem="no such thing")))), "1") == ["host b: no such thing"]
    other = Answer(paceline="2", torch="2.14", python="3.12.0", script="y")
    told = disagreements(dict(zip(hosts, (good, other))), "1")
    assert [line.partition(":")[0].partition(".")[0] for line in told] == [
        "host b has Paceline 2, but this machine has 1",
        "The hosts have different versions of torch",
        "The hosts have different versions of Python",
        "The script on b differs from the script on a",
    ]


def test_the_addresses_by_which_hosts_are_reached() -> None:
    """This machine has none of its own choice: others say from where ssh came."""
    answers = [Answer(), Answer(address="10.0.0.2", client="10.0.0.9"), Answer(address="10.0.0.3", client="10.0.0.9")]
    assert addresses(answers, [True, False, False]) == ["10.0.0.9", "10.0.0.2", "10.0.0.3"]
    assert addresses(answers[:1], [True]) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([("a", 0), ("b", 0)], 0),
        ([("a", 1), ("b", 137)], 137),  # a was told of b's failure, and was faster
        ([("a", 7), ("b", 137)], 7),
        ([("a", None), ("b", 1)], 1),
        ([("a", 0), ("b", None)], 1),
        ([], 0),
    ],
)
def test_the_exit_code_of_all(ended: list[tuple[str, int | None]], code: int) -> None:
    assert exit_code(ended) == code


def run(*words: str) -> str:
    done = CliRunner().invoke(main, ["run", *words])
    assert done.exit_code == 2, done.output
    return done.output


def test_options_that_need_hosts() -> None:
    assert "--ssh-port needs hosts: give --hosts" in run("--ssh-port", "22", "train.py")
    assert "--env needs hosts" in run("--env", "A=1", "train.py")


def test_settings_are_checked_here(tmp_path: Path) -> None:
    assert "precision" in run("--hosts", "a,b", "--precision", "fp31", "train.py")
    assert "cannot be read" in run("--hostfile", str(tmp_path / "none"), "train.py")
    assert "refer to this machine. Give it once" in run("--hosts", "localhost,127.0.0.1", "train.py")


def test_no_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = run("--hosts", "198.51.100.1", "train.py")
    assert "there is no `ssh` on this machine. On Debian and Ubuntu: apt install openssh-client" in said


@pytest.mark.conformance
def test_a_run_on_this_machine_needs_no_ssh(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole way, but for ssh: asked, started with the options as typed, marked, and the exit code handed on. A
    process that the script leaves holds the streams open, which ssh would wait for."""
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '30'])\n"
        "open('left', 'w').write(str(left.pid))\n"
        "print(os.environ['PACELINE_SETTINGS'], sys.argv[1:], os.environ['A'], sys.stdin.read() == '', flush=True)\n"
        "os._exit(5 if '--fail' in sys.argv else 0)\n"
    )
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        words = [
            "--hosts",
            "localhost:1",
            "--seed",
            "4",
            "--no-compile",
            "--env",
            "A=x y",
            "train.py",
            "--seed",
            "9",
            "",
        ]
        done = CliRunner().invoke(main, ["run", *words])
        os.kill(int((tmp_path / "left").read_text()), 9)
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    left = (tmp_path / "left").read_text()
    assert done.output == (
        "[localhost] {\"seed\": 4, \"compile\": false} ['--seed', '9', ''] x y True\n"
        f"[localhost] paceline: a child process of a rank is still running: {left} (sleep). The launcher does not end "
        "it; use `kill`.\n"
    )


@pytest.mark.full
def test_being_asked_to_save_before_the_run_has_begun_there_does_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('it ran')\n")
    words = ["run", "--nproc", "1", "train.py"]
    asked = {"directory": str(tmp_path), "script": "train.py", "module": False}
    job = {"environ": {}, "address": "", "arguments": words, "secret": None}
    start = [sys.executable, "-m", "paceline.on_host"]
    process = subprocess.Popen(start, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(asked)}\n{json.dumps(job)}\nsave\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert process.stdout.readline().startswith(MARK)
    assert process.stdout.read() == "it ran\n"  # to its end: the input stays open as long as the run is to live
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_an_error_of_the_launcher_on_a_host_is_shown() -> None:
    """Of Paceline itself, or of what is installed there, such as a torch that cannot be loaded."""
    fault = "import paceline.on_host as h\ndef fail(**_): raise ImportError('libtorch.so: no such file')\n"
    asked = {"directory": "/", "script": "os", "module": True}
    job = {"environ": {}, "address": "", "arguments": ["run", "train.py"], "secret": None}
    start = [sys.executable, "-c", f"{fault}h.command_line = fail\nh.main()"]
    process = subprocess.Popen(start, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(asked)}\n{json.dumps(job)}\n")
    process.stdin.flush()
    assert process.stderr is not None
    error = process.stderr.read()  # to its end: were the input to end, so would the launcher
    process.communicate(timeout=60)
    assert process.returncode == 1
    *_, said, told, _ = error.split("\n")
    assert said == "ImportError: libtorch.so: no such file"
    assert told == MARK + '{"exit": 1}'


def test_ctrl_c_while_hosts_are_asked(tmp_path: Path) -> None:
    """One does not answer, by way of a ProxyCommand."""
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\ntouch asked\nsleep 1000 & wait\n")
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, "-m", "paceline", "run", "--hosts", "198.51.100.1,198.51.100.2", "train.py"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30.0
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (None, "paceline: interrupted; all ranks have ended.\n")
    assert process.returncode == 130


def test_ssh_that_asks_is_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in place of ssh: it gets no terminal, and what it says is told with the host's name."""
    fake = tmp_path / "ssh"
    fake.write_text(
        "#!/bin/sh\n(: </dev/tty) 2>/dev/null && echo terminal >&2\necho 'Permission denied' >&2\nexit 255\n"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = run("--hosts", "198.51.100.1,198.51.100.2", "train.py")
    assert "Nothing was started.\nhost 198.51.100.1: ssh says: Permission denied\n" in said
    assert "host 198.51.100.2: ssh says" in said
    assert "terminal" not in said
