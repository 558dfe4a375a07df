"""`paceline run --hosts` over real sshd processes, on hosts that are network namespaces of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.system.ssh_hosts import SshHosts, ssh_hosts

from paceline.launcher.secret import write_secret

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

DEADLINE_SECONDS = 180.0  # for what takes ten seconds on an idle machine
PACELINE = [sys.executable, "-m", "paceline", "run"]

TRAIN = """
import os, sys
import torch
import paceline

torch.set_default_dtype(torch.float64)
run = paceline.start(seed=3)
world = run.world
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
print("place", os.uname().nodename, *(os.environ.get(name) for name in names), flush=True)
assert (world.rank, world.local_rank, world.node) == tuple(int(os.environ[n]) for n in names[::2]), world
torch.manual_seed(0)
x = torch.randn(61, 5)
data = torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
loader = run.loader(data, global_batch=10, shuffle=True)
for _ in run.epochs(3):
    for batch in loader:
        run.forward_backward(lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1]), model, batch)
        run.step(optimizer)
if run.main:
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, sys.argv[1])
"""

TCP = """
import os, sys
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
method = "tcp://" + sys.argv[1].format(**os.environ)
if sys.argv[2] == "start":
    import paceline
    run = paceline.start(init_method=method, rank=rank, world_size=size, progress="off")
    print("start", run.world.node, run.world.nodes, run.world.local_rank, run.sum(rank + 1), flush=True)
else:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
total = torch.tensor(rank + 1.0, dtype=torch.float64)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""

LONG = """
import os, subprocess, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
worker = subprocess.Popen(["sleep", "1000"])  # as a data loader's worker: it must go too
Path(f"ready-{dist.get_rank()}-{count}").write_text(str(dist.get_world_size()))
print("world", dist.get_world_size(), flush=True)
for _ in range(10 if len(sys.argv) > 1 and count != "0" else 3000):
    dist.all_reduce(total)
    time.sleep(0.1)
worker.kill()  # what a rank that ends well leaves behind is left on purpose
print("end", flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("train.py", TRAIN), ("tcp.py", TCP), ("long.py", LONG)):
        (tmp_path / name).write_text(text)
    return tmp_path


def finish(process: subprocess.Popen[str], seconds: float = DEADLINE_SECONDS) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). A process that takes too long is ended, and the test fails with what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running after {seconds} s: {process.communicate()}")
    return process.returncode, out, err


def run_on(
    hosts: SshHosts, folder: Path, *words: str, at: str = "login", environ: dict[str, str] | None = None
) -> tuple[int, str, str]:
    found = finish(hosts.start(at, *PACELINE, *hosts.options, *words, cwd=folder, environ=environ))
    hosts.wait_until_idle(hosts.names, 20.0)
    return found


def wait_for(process: subprocess.Popen[str], folder: Path, *names: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all((folder / name).exists() for name in names):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no files {names}: {process.communicate()}")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("one")
    (folder / "train.py").write_text(TRAIN.replace("int(os.environ[n])", "int(os.environ.get(n, 0))"))
    command = [sys.executable, "train.py", "one.pt"]
    subprocess.run(command, cwd=folder, check=True, timeout=DEADLINE_SECONDS, capture_output=True)
    return torch.load(folder / "one.pt")


@pytest.mark.parametrize(
    ("named", "at", "places"),
    [
        (["--hosts", "node1,node2"], "login", ["node1 0 2 0 1 0 2", "node2 1 2 0 1 1 2"]),
        (
            ["--hosts", "node1:2,node2:1,node3:1", "--tee", "all", "--ssh-port", "2222"],
            "node1",  # itself one of them: it is started without ssh
            ["node1 0 4 0 2 0 3", "node1 1 4 1 2 0 3", "node2 2 4 0 1 1 3", "node3 3 4 0 1 2 3"],
        ),
        (
            ["--hosts", "node2,node1,node3", "--rdzv-backend", "c10d"],
            "login",
            None,  # c10d numbers them as they come
        ),
    ],
)
def test_the_model_of_several_hosts_is_that_of_one_process(
    hosts: SshHosts,
    folder: Path,
    one_process: dict[str, torch.Tensor],
    named: list[str],
    at: str,
    places: list[str] | None,
) -> None:
    code, out, err = run_on(hosts, folder, *named, "train.py", "several.pt", at=at)
    assert code == 0, (out, err)
    lines = [line for line in out.splitlines() if " place " in line]
    told = sorted(line.partition("place ")[2] for line in lines)
    assert told == places or (places is None and len(told) == 3), out
    assert all(re.match(rf"\[{line.partition('place ')[2].split()[0]}\] ", line) for line in lines), out
    several = torch.load(folder / "several.pt")
    assert several.keys() == one_process.keys()
    for name, value in one_process.items():
        assert (several[name] - value).norm() <= 1e-10 * value.norm(), name


@pytest.mark.parametrize("script", ["plain", "start"])
def test_tcp_under_the_static_rendezvous(hosts: SshHosts, folder: Path, script: str) -> None:
    """A plain script names the launcher's store: at any other address torch waits for ever, under torchrun as here,
    since the launcher is to have opened it. start() opens one. node1 knows itself as 127.0.1.1."""
    address = "{MASTER_ADDR}:{MASTER_PORT}" if script == "plain" else "node1:29777"
    code, out, err = run_on(hosts, folder, "--hosts", "node1,node2", "tcp.py", address, script)
    assert code == 0, (out, err)
    told = ["[node1] start 0 2 0 3", "[node2] start 1 2 0 3"] if script == "start" else []
    assert sorted(out.splitlines()) == sorted([*told, "[node1] sum 3.0", "[node2] sum 3.0"])


@pytest.mark.parametrize("script", ["plain", "start"])
def test_tcp_without_a_launcher(hosts: SshHosts, folder: Path, script: str) -> None:
    both = []
    for rank, name in enumerate(("node1", "node2")):
        environ = {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        both.append(hosts.start(name, sys.executable, "tcp.py", "node1:29778", script, cwd=folder, environ=environ))
    found = [finish(process) for process in both]
    told = ["start 0 2 0 3\n", "start 1 2 0 3\n"] if script == "start" else ["", ""]
    assert [(code, out) for code, out, _ in found] == [(0, f"{line}sum 3.0\n") for line in told], found


def launcher(hosts: SshHosts, folder: Path, name: str, *words: str) -> subprocess.Popen[str]:
    """One `paceline run`, started by hand on a host."""
    return hosts.start(name, *PACELINE, *words, cwd=folder, environ={"GLOO_SOCKET_IFNAME": "eth0"})


def test_launchers_started_by_hand_meet_by_number(
    hosts: SshHosts, folder: Path, one_process: dict[str, torch.Tensor]
) -> None:
    write_secret(str(folder / "static.secret"))
    place = ["--nnodes", "2", "--rdzv-secret-file", "static.secret", "--master-addr", "10.77.0.1", "--local-addr"]
    both = [
        launcher(hosts, folder, name, *place, hosts.address(name), "--node-rank", rank, "train.py", "static.pt")
        for name, rank in (("node1", "0"), ("node2", "1"))
    ]
    found = [finish(process) for process in both]
    assert [code for code, _, _ in found] == [0, 0], found
    assert [out for _, out, _ in found] == ["place node1 0 2 0 1 0 2\n", "place node2 1 2 0 1 1 2\n"]
    static = torch.load(folder / "static.pt")
    assert all((static[name] - value).norm() <= 1e-10 * value.norm() for name, value in one_process.items())


def test_hosts_join_an_elastic_run(hosts: SshHosts, folder: Path) -> None:
    write_secret(str(folder / "elastic.secret"))
    words = ["--nnodes", "1:3", "--rdzv-endpoint", "10.77.0.1:29400", "--rdzv-conf", "last_call_timeout=3"]
    words += ["--rdzv-secret-file", "elastic.secret"]
    started = []
    for name in hosts.names:
        place = ["--local-addr", hosts.address(name)]
        started.append(launcher(hosts, folder, name, *words, *place, "long.py", "short"))
        if name == "node1":
            wait_for(started[0], folder, "ready-0-0")
    found = [finish(process) for process in started]
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert found[0][1].startswith("world 1\n"), found
    assert all(out.endswith("world 3\nend\n") for _, out, _ in found), found
    hosts.wait_until_idle(hosts.names, 20.0)


def test_arguments_environment_and_exit_code(hosts: SshHosts, folder: Path) -> None:
    """No shell sees the arguments. A relative path, a hostfile, variables, and the code of the rank that failed."""
    (folder / "jobs").mkdir()
    (folder / "jobs" / "show me.py").write_text(
        "import os, sys, time\n"
        "rank = os.environ['RANK']\n"
        "open(f'seen-{rank}', 'w').write(repr([os.getcwd(), sys.argv, os.environ.get('OTHER'), "
        "os.environ.get('TOKEN'), os.environ.get('NCCL_DEBUG'), os.environ.get('SECRET')]))\n"
        "print('\\u00e9t\\u00e9', end='', flush=True)\n"
        "if rank == '0':\n"
        "    open('printed', 'w').close()\n"
        "    sys.exit(0)\n"
        "while not os.path.exists('printed'):  # rank 1's failure ends rank 0 wherever it stands\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    (folder / "hosts.txt").write_text("# two machines\nnode1 slots=1\n\nnode2 slots=1  # the second\n")
    arguments = ["a b", "it's", '"$HOME" `id` \\ *', "two\nlines", "-x", "--hosts", ""]
    environ = {"TOKEN": "a b'c", "SECRET": "kept", "NCCL_DEBUG": "WARN"}
    options = ["--hostfile", "hosts.txt", "--env", "TOKEN", "--env", "OTHER=1 2"]
    code, out, err = run_on(hosts, folder, *options, "jobs/show me.py", *arguments, environ=environ)
    assert code == 7, (out, err)
    seen = repr([str(folder), ["jobs/show me.py", *arguments], "1 2", "a b'c", "WARN", None])
    assert [(folder / f"seen-{rank}").read_text() for rank in (0, 1)] == [seen, seen]
    assert sorted(out.splitlines()) == ["[node1] été", "[node2] été"]
    assert "paceline: host node2 ended with exit code 7.\n" in err
    assert "[node2] rank 1 ended with exit code 7" in err


def test_nothing_is_left_when_the_launcher_is_killed(hosts: SshHosts, folder: Path) -> None:
    """kill -9: no handler of its own can tell the hosts."""
    process = hosts.start("login", *PACELINE, *hosts.options, "--hosts", "node1:1,node2:2", "long.py", cwd=folder)
    wait_for(process, folder, "ready-0-0", "ready-1-0")
    assert any("sleep 1000" in words for words in hosts.processes("node2").values())
    process.kill()  # `ip netns exec`, unshare and sh have each become the next program: this is the launcher
    process.communicate(timeout=30)
    hosts.wait_until_idle(["node1", "node2", "login"], 30.0)


def test_ctrl_c(hosts: SshHosts, folder: Path) -> None:
    process = hosts.start("login", *PACELINE, *hosts.options, "--hosts", "node1,node2", "long.py", cwd=folder)
    wait_for(process, folder, "ready-0-0", "ready-1-0")
    os.kill(process.pid, signal.SIGINT)
    code, out, err = finish(process, 60.0)
    assert code == 130, (out, err)
    assert err.endswith("paceline: interrupted; all ranks have ended.\n"), err
    hosts.wait_until_idle(["node1", "node2", "login"], 5.0)


@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_host_that_goes_down_ends_the_run_with_its_name(hosts: SshHosts, folder: Path, how: str) -> None:
    """Its power fails, and the connection is reset at once; or its cable is cut, and nobody is told."""
    process = hosts.start("login", *PACELINE, *hosts.options, "--hosts", "node1,node2", "long.py", cwd=folder)
    wait_for(process, folder, "ready-0-0", "ready-1-0")
    try:
        if how == "power":
            hosts.kill_all("node2")
        else:
            hosts.cut("node2")
        code, out, err = finish(process, 90.0)
        assert code == 1, (out, err)
        assert "paceline: host node2 is lost: " in err, err
        hosts.wait_until_idle(["node1", "login"], 10.0)
        if how == "cable":  # what runs there hears nothing, and ends by itself; sshd waits for TCP
            hosts.wait_until_idle(["node2"], 120.0, but="sshd: ")
    finally:
        if how == "power":
            hosts.start_sshd("node2")
        else:
            hosts.join("node2")


def test_an_elastic_run_goes_on_without_a_host_that_is_lost(hosts: SshHosts, folder: Path) -> None:
    options = ["--hosts", "node1,node2", "--nnodes", "1:2", "--max-restarts", "2", "--rdzv-conf", "last_call_timeout=3"]
    process = hosts.start("login", *PACELINE, *hosts.options, *options, "long.py", "short", cwd=folder)
    wait_for(process, folder, "ready-0-0", "ready-1-0")
    try:
        hosts.kill_all("node2")  # node1 keeps the rendezvous
        code, out, err = finish(process)
    finally:
        hosts.start_sshd("node2")
    assert code == 0, (out, err)
    assert out.endswith("[node1] world 1\n[node1] end\n"), out
    assert "paceline: host node2 is lost: " in err, err


@pytest.mark.parametrize(
    ("how", "at"),
    [
        ("killed", "node1"),  # itself the first host: its part is a child of the launcher
        # What runs there might go on for a while, so that it is waited for, more than a minute.
        pytest.param("cable", "login", marks=pytest.mark.campaign),
    ],
)
def test_hosts_meet_again_without_the_one_that_kept_the_rendezvous(
    hosts: SshHosts, folder: Path, how: str, at: str
) -> None:
    (folder / "long.py").write_text(LONG.replace('count != "0"', 'Path("again").exists()'))
    options = ["--hosts", "node1,node2,node3", "--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=2"]
    process = hosts.start(at, *PACELINE, *hosts.options, *options, "long.py", "short", cwd=folder)
    wait_for(process, folder, "ready-0-0", "ready-1-0", "ready-2-0")
    (folder / "again").touch()
    try:
        if how == "cable":
            hosts.cut("node1")
        else:
            here = f"{sys.executable} -m paceline.on_host"  # and not the clients of ssh, which name it too
            (part,) = (pid for pid, words in hosts.processes("node1").items() if words == here)
            os.kill(part, signal.SIGKILL)
        code, out, err = finish(process, 150.0)
        assert code == 0, (out, err)
        lines = [f"[{name}] {word}" for name in ("node2", "node3") for word in ("end", "world 2")]
        assert sorted(out.splitlines()[-4:]) == lines, out
        assert "paceline: host node1 is lost: " in err, err
        assert "paceline: node1 was the rendezvous host. node2, node3 will continue without it.\n" in err
        assert ("paceline: node1 may still be running. Waiting up to" in err) == (how == "cable"), err
        hosts.wait_until_idle(hosts.names if how == "killed" else ["node2", "node3"], 20.0)
        if how == "cable":
            assert not any("sleep 1000" in words for words in hosts.processes("node1").values())
    finally:
        if how == "cable":
            hosts.join("node1")
            hosts.wait_until_idle(["node1"], 120.0)


# ---------------------------------------------------------------- what is refused, before anything starts


@pytest.fixture
def touching(folder: Path) -> Path:
    """A script that leaves a file where it starts."""
    (folder / "touch.py").write_text("import os\nopen('started', 'w').close()\n")
    return folder


def refused(hosts: SshHosts, folder: Path, *words: str) -> str:
    """stderr of a run that must not start."""
    code, out, err = run_on(hosts, folder, *words)
    assert code == 2, (out, err)
    assert not (folder / "started").exists()
    assert "Nothing was started." in err
    return re.sub(r"\s+", " ", err)


def test_a_host_without_a_server_one_that_is_unknown_and_one_that_is_off(hosts: SshHosts, touching: Path) -> None:
    """All are told at once."""
    hosts.stop_sshd("node2")
    hosts.cut("node3")
    try:
        err = refused(hosts, touching, "--hosts", "node1,node2,nowhere,node3", "touch.py")
    finally:
        hosts.start_sshd("node2")
        hosts.join("node3")
    assert "host node2: ssh says: ssh: connect to host node2 port 22: Connection refused" in err
    assert "systemctl start ssh" in err
    assert "host nowhere: ssh says: ssh: Could not resolve hostname nowhere" in err
    assert "host node3: ssh says: ssh: connect to host node3 port 22: " in err
    assert "host node1" not in err


def test_a_host_whose_key_is_unknown_and_one_that_lets_nobody_in(
    hosts: SshHosts, touching: Path, tmp_path: Path
) -> None:
    known = [f"--ssh-option=UserKnownHostsFile={tmp_path / 'none'}", "--ssh-option=GlobalKnownHostsFile=none"]
    code, _, err = finish(hosts.start("login", *PACELINE, *known, "--hosts", "node1,node2", "touch.py", cwd=touching))
    assert code == 2
    assert err.count("Host key verification failed") == 2
    assert "Connect once yourself and answer yes: `ssh node1`" in err
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True, timeout=30)
    known = [f"--ssh-option=UserKnownHostsFile={hosts.directory / 'known_hosts'}", "--ssh-option=IdentitiesOnly=yes"]
    key = f"--ssh-option=IdentityFile={tmp_path / 'other'}"
    words = [*PACELINE, *known, key, "--hosts", "node1", "touch.py"]
    code, _, err = finish(hosts.start("login", *words, cwd=touching))
    assert code == 2
    assert "ssh says: root@node1: Permission denied (publickey" in err
    assert "`ssh-copy-id node1`" in err
    assert not (touching / "started").exists()


def test_what_is_missing_on_the_hosts(hosts: SshHosts, touching: Path) -> None:
    err = refused(hosts, touching, "--python", "/no/such/python", "--hosts", "node1,node2", "touch.py")
    assert "host node1: /no/such/python cannot be run there" in err
    assert "give an interpreter that exists on all hosts with --python" in err
    bare = subprocess.run(
        ["/usr/bin/env", "-i", "/usr/bin/python3", "-c", "import paceline"], capture_output=True, timeout=30
    )
    if bare.returncode:
        err = refused(hosts, touching, "--python", "/usr/bin/python3", "--hosts", "node2", "touch.py")
        assert "host node2: /usr/bin/python3 there has no Paceline. Install version" in err
    err = refused(hosts, touching, "--hosts", "node1,node2", "none.py")
    assert "host node2: There is no script 'none.py' in " in err


def test_a_directory_that_only_this_machine_has(hosts: SshHosts, touching: Path) -> None:
    """The namespaces share the file system, but for one that is mounted in the launcher's view alone."""
    inside = touching / "mounted"
    inside.mkdir()
    mount = 'mount -t tmpfs none "$0" && mkdir "$0/here" && cd "$0/here" && echo "print(1)" > touch.py && exec "$@"'
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        mount,
        str(inside),
        *PACELINE,
        *hosts.options,
        "--hosts",
        "node1",
        "touch.py",
    ]
    code, _, err = finish(hosts.start("login", *words, cwd=touching))
    assert code == 2
    assert f"host node1: cannot enter the directory {inside / 'here'}: No such file or directory." in err
    assert "rsync -a" in err


def test_hosts_that_disagree(hosts: SshHosts, touching: Path) -> None:
    """Another version of Paceline on one host: by a PATH in which `python` is a wrapper there."""
    wrapper = touching / "python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'[ "$(hostname)" = node2 ] || exec {sys.executable} "$@"\n'
        f"exec {sys.executable} -c 'import importlib.metadata as m; old = m.version; "
        'm.version = lambda name: "0.0.1" if name == "paceline" else "2.0" if name == "torch" else old(name); '
        'import runpy; runpy.run_module("paceline.on_host", run_name="__main__")\'\n'
    )
    wrapper.chmod(0o755)
    err = refused(hosts, touching, "--python", str(wrapper), "--hosts", "node1,node2", "touch.py")
    assert "host node2 has Paceline 0.0.1, but this machine has " in err
    assert re.search(r"The hosts have different versions of torch: node1 2\.\d+\S*, node2 2\.0\.", err), err
