"""torchrun's options for several machines, and what is looked at before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline import launcher
from paceline.cli import main
from paceline.errors import LaunchError, SettingError
from paceline.launcher import checks
from paceline.launcher.nodes import ALONE, Nodes, read_nodes
from paceline.launcher.plan import Plan, make_plan, read_ranks, worker_environment
from paceline.world import World

TWO = Nodes(min_nodes=2, max_nodes=2, backend="c10d", host="n0", port=29400)


@pytest.mark.parametrize(
    ("options", "backend", "endpoint"),
    [
        ({"rdzv_endpoint": "n0:4000"}, "c10d", "n0:4000"),
        ({"rdzv_endpoint": "n0"}, "c10d", "n0:29400"),
        ({"rdzv_endpoint": "[fe80::1]:4000"}, "c10d", "[fe80::1]:4000"),
        ({"rdzv_endpoint": "n0:4000", "rdzv_backend": "etcd-v2"}, "etcd-v2", "n0:4000"),
        ({"master_addr": "n0", "node_rank": 1}, "static", "n0:29500"),
        ({"master_addr": "n0", "master_port": 4000, "node_rank": 0}, "static", "n0:4000"),
        ({"master_addr": "n0", "rdzv_backend": "c10d", "node_rank": 0}, "c10d", "n0:29400"),
        ({"rdzv_endpoint": "n0:4000", "node_rank": 1}, "static", "n0:4000"),
    ],
)
def test_where_two_machines_meet(options: dict[str, object], backend: str, endpoint: str) -> None:
    nodes = read_nodes(nnodes="2", rdzv_insecure=True, **options)  # type: ignore[arg-type]
    assert (nodes.min_nodes, nodes.max_nodes, nodes.backend, nodes.endpoint) == (2, 2, backend, endpoint)


def test_numbers_and_details_of_the_rendezvous() -> None:
    nodes = read_nodes(
        nnodes="1:4", rdzv_endpoint="n0:1", rdzv_id="job", rdzv_conf="join_timeout=9, a=b", rdzv_insecure=True
    )
    assert (nodes.min_nodes, nodes.max_nodes, nodes.run_id) == (1, 4, "job")
    assert nodes.conf == {"join_timeout": "9", "a": "b"}
    assert not nodes.loopback
    assert nodes.local_addr is None
    here = read_nodes(nnodes="2", rdzv_endpoint="127.0.0.1:1")
    assert (here.loopback, here.local_addr) == (True, "127.0.0.1")


def test_one_machine_meets_nobody() -> None:
    assert read_nodes() == read_nodes(nnodes="1:1", standalone=True) == ALONE
    for place in ("localhost:0", "127.0.0.1", "[::1]:4000"):
        assert read_nodes(rdzv_backend="c10d", rdzv_endpoint=place, rdzv_id="paceline", node_rank=0) == ALONE
    assert read_nodes(master_port=4000).port == 4000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": "0"}, "--nnodes 0: give at least one"),
        ({"nnodes": "4:2"}, "MIN not above MAX"),
        ({"nnodes": "two"}, "--nnodes two: give the number"),
        ({"nnodes": "1:2:3"}, "--nnodes 1:2:3"),
        ({"nnodes": "2"}, "--nnodes 2: several machines need a rendezvous. Give the same --rdzv-endpoint"),
        ({"nnodes": "2", "standalone": True}, "--standalone means only this machine"),
        ({"nnodes": "2", "node_rank": 2, "master_addr": "n0"}, "--node-rank 2: .* from 0 to 1"),
        ({"node_rank": 1}, "--node-rank 1: .* must be 0"),
        ({"nnodes": "2", "rdzv_backend": "static", "master_addr": "n0"}, "--node-rank N"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:port"}, "write HOST:PORT"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:0"}, "write HOST:PORT"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:1", "master_addr": "n1"}, "two rendezvous hosts"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:1", "rdzv_conf": "nonsense"}, "'nonsense' is not KEY=VALUE"),
        ({"master_port": 70000}, "--master-port 70000 is not a TCP port"),
    ],
)
def test_contradictions(options: dict[str, object], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_nodes(**options)  # type: ignore[arg-type]


def test_what_means_nothing_on_one_machine_is_said() -> None:
    """As in many torchrun command lines; the run's name is kept, and a port is where its store listens."""
    given = {"rdzv_backend": "static", "rdzv_endpoint": "n0:1", "rdzv_conf": "a=1", "master_addr": "n0"}
    nodes = read_nodes(**given, rdzv_id="r", master_port=4000, local_addr="n1")  # type: ignore[arg-type]
    assert nodes.unused == (
        "--rdzv-backend static",
        "--rdzv-endpoint n0:1",
        "--rdzv-conf a=1",
        "--master-addr n0",
        "--local-addr n1",
    )
    assert (nodes.run_id, nodes.port) == ("r", 4000)
    assert read_nodes(standalone=True, master_port=4000).unused == ("--master-port 4000",)
    several = read_nodes(nnodes="2", rdzv_endpoint="n0:1", rdzv_insecure=True)
    assert several.unused == read_nodes(node_rank=0).unused == ()


def test_only_one_machine_is_kept_on_loopback() -> None:
    world = World(0, 2, 0, 1, 0, 2, "paceline", "n0", 4000)
    for nodes, interface in ((ALONE, "lo"), (TWO, "eth7")):
        plan = Plan("t.py", (), 1, {}, nodes=nodes, max_restarts=3)
        environ = worker_environment(
            plan, world, error_file="", run_id="r", launcher_pid=1, cores=1, restarts=2,
            environ={"GLOO_SOCKET_IFNAME": "eth7"},
        )  # fmt: skip
        assert environ["GLOO_SOCKET_IFNAME"] == interface
        assert (environ["TORCHELASTIC_RESTART_COUNT"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")


SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NNODES": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NODELIST": "n[0-3]", "SLURM_JOB_ID": "7",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "1",
}  # fmt: skip


def test_inside_another_launcher() -> None:
    with pytest.raises(LaunchError, match=r"inside srun task 1 of 4, and each .*`srun python train.py`"):
        checks.check_outer_world(SRUN, ALONE)
    with pytest.raises(LaunchError, match=r"inside rank 1 of 4 of another launcher \(RANK and WORLD_SIZE are set\)"):
        checks.check_outer_world(TORCHRUN, ALONE)
    with pytest.raises(LaunchError, match=r"each of the 4 tasks would start a launcher for 2 to 2 machines"):
        checks.check_outer_world(SRUN, TWO)
    four = Nodes(min_nodes=1, max_nodes=4, backend="c10d", host="n0", port=1)
    checks.check_outer_world(SRUN, four)  # srun starts one launcher on each of four machines
    with pytest.raises(LaunchError, match="but --node-rank is 3"):
        checks.check_outer_world(SRUN, Nodes(min_nodes=4, max_nodes=4, backend="static", host="n0", port=1, rank=3))
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "2"}
    checks.check_outer_world(pod, TWO)  # of a PyTorchJob of two pods, with two processes in each
    with pytest.raises(LaunchError, match="rank 1 of 4 of another launcher"):
        checks.check_outer_world({**pod, "TORCHELASTIC_RUN_ID": "x"}, TWO)  # and in it a torchrun, which has started us
    checks.check_outer_world({"RANK": "3"}, ALONE)  # a stale half of a world, which the workers do not see
    checks.check_outer_world(SRUN | {"SLURM_NTASKS": "1"}, ALONE)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(LaunchError, match=r"--nproc 2: 1 device is visible .*\(CUDA_VISIBLE_DEVICES=3\).*--nproc 1"):
        checks.check_devices(2, None, 1)
    with pytest.raises(LaunchError, match="2 devices are visible"):
        checks.check_devices(3, "cuda", 2)
    with pytest.raises(LaunchError, match=r"all but 1 of the processes need one each\. Use --nproc 3 "):
        checks.check_devices(4, None, 2, on_cpu=1)
    for nproc, device, count in ((2, None, 2), (2, None, 0), (2, "cpu", 1), (2, "cuda:0", 1)):
        checks.check_devices(nproc, device, count)
    checks.check_devices(3, None, 2, on_cpu=1)


def test_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in ([], ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1"]):
            line = ["run", *options, "--master-port", str(port), str(tmp_path / "t.py")]
            result = CliRunner().invoke(main, line)
            assert result.exit_code == 2
            assert f"--master-port {port}: this machine cannot listen on port {port}" in result.output
    checks.check_port("127.0.0.1", port, "--master-port")  # free again


def test_a_variable_that_torch_cannot_read_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "abc")
    with pytest.raises(SettingError, match="TORCH_FR_BUFFER_SIZE='abc' is not an integer"):
        make_plan(str(tmp_path / "train.py"), [], 2, {})


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "thing"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported by the launcher')")
    (package / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    checks.check_module("thing.train")
    for name, said in (
        ("nothing.here", "no module 'nothing'"),
        ("thing.eval", "no module 'thing.eval'"),
        ("thing", "a package without a __main__.py"),
        ("thing.train.py", r"Leave out the `\.py`: `-m thing\.train`"),
    ):
        with pytest.raises(LaunchError, match=said):
            checks.check_module(name)
    (package / "__main__.py").touch()
    checks.check_module("thing")
    (tmp_path / "plain" / "inner").mkdir(parents=True)  # folders without an __init__.py are packages too
    (tmp_path / "plain" / "inner" / "train.py").touch()
    checks.check_module("plain.inner.train")


def test_ranks() -> None:
    assert read_ranks("1,3-5", 8) == {1, 3, 4, 5}
    assert (read_ranks("", 2), read_ranks("all", 2)) == (frozenset(), None)
    with pytest.raises(LaunchError, match=r"no rank 3, only 0 to 1.*torchrun's `--tee 3`"):
        read_ranks("3", 2)
    with pytest.raises(LaunchError, match="give ranks"):
        read_ranks("one", 2)


def test_settings_files_are_read_before_anything_starts(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other.toml"
    script.touch()
    other.write_text("seed = 3\n")
    plan = make_plan(str(script), [], 1, {"config": os.path.relpath(other), "precision": "bf16"})
    assert plan.settings == {"config": str(other), "precision": "bf16"}
    (tmp_path / "paceline.toml").write_text('device = "cpu"\nprecison = "bf16"\n')
    with pytest.raises(SettingError, match=r"paceline\.toml: 'precison' is not a setting. Did you mean 'precision'"):
        make_plan(str(script), [], 1, {})
    (tmp_path / "paceline.toml").write_text('device = "cpu"\n')
    plan = make_plan(str(script), [], 1, {})
    assert (plan.settings, plan.device) == ({}, "cpu")  # the workers find the file themselves
    with pytest.raises(SettingError, match="cannot be read"):
        make_plan(str(script), [], 1, {"config": str(tmp_path / "none.toml")})
    with pytest.raises(LaunchError, match="--max-restarts -1"):
        make_plan(str(script), [], 1, {}, max_restarts=-1)


def test_torchruns_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With underscores, and all flags at once."""
    calls: list[dict[str, object]] = []

    def fake(script: str, args: tuple[str, ...], **options: object) -> int:
        del options["check_strategy"]
        calls.append({"script": script, "args": args, **options})
        return 0

    monkeypatch.setattr(launcher, "run", fake)
    line = (
        "run --nproc_per_node auto --nnodes=1:4 --rdzv_backend c10d --rdzv_endpoint n0:1 --rdzv_id=7 --rdzv_conf a=b "
        "--rdzv_insecure "
    )
    line += (
        "--max_restarts 3 --monitor_interval 0.5 --local_addr n1 --log_dir logs --batch_norm shard -m pkg.train --a_b 1"
    )
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    nodes = Nodes(
        min_nodes=1, max_nodes=4, backend="c10d", host="n0", port=1, run_id="7", conf={"a": "b"}, local_addr="n1",
        insecure=True,
    )  # fmt: skip
    assert calls == [
        {
            "script": "pkg.train", "args": ("--a_b", "1"), "nproc": "auto", "nodes": nodes, "module": True,
            "max_restarts": 3, "memory_every": None, "monitor_seconds": 0.5, "output": None, "tee": "", "grace": None,
                "stall_seconds": None, "stall_action": "say",
            "settings": {"log_dir": "logs", "batch_norm": "shard"},
        }
    ]  # fmt: skip


def test_env_command() -> None:
    result = CliRunner().invoke(main, ["env"], env={"NCCL_DEBUG": "INFO", "TORCH_API_KEY": "hush"})
    assert result.exit_code == 0
    for word in ("Python ", "torch ", "backends ", "cores ", "paceline ", "NCCL_DEBUG=INFO", "TORCH_API_KEY=(set)"):
        assert word in result.output
    assert "hush" not in result.output
