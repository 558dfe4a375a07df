"""The environment and the command line of each worker, and the checks before anything starts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline import launcher
from paceline.cli import main
from paceline.errors import LaunchError, SettingError
from paceline.launcher import plan as plan_module
from paceline.launcher.checks import check_devices
from paceline.launcher.plan import Plan, command_line, count_processes, make_plan, thread_budget, worker_environment
from paceline.strategies import check
from paceline.world import ERROR_FILE, LAUNCHER_PID, SETTINGS, THREAD_BUDGET, World, from_env

PLAN = Plan("train.py", ("--lr", "0.1"), 2, {"strategy": "ddp", "seed": 3})
WORLD = World(1, 2, 1, 2, 0, 1, "paceline", "127.0.0.1", 4000)


def environment(environ: dict[str, str], cores: int = 8, plan: Plan = PLAN) -> dict[str, str]:
    return worker_environment(
        plan, WORLD, error_file="/tmp/e", run_id="r", launcher_pid=77, cores=cores, environ=environ
    )


def test_worker_reads_back_its_place() -> None:
    assert from_env(environment({})) == WORLD


def test_launcher_beats_what_was_in_the_environment() -> None:
    stale = {"RANK": "9", "WORLD_SIZE": "99", "MASTER_ADDR": "elsewhere", SETTINGS: '{"seed": 1}', LAUNCHER_PID: "1"}
    stale |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}
    environ = environment(stale)
    assert from_env(environ) == WORLD
    assert json.loads(environ[SETTINGS]) == {"strategy": "ddp", "seed": 3}
    assert environ[LAUNCHER_PID] == "77"
    assert environ[ERROR_FILE] == "/tmp/e"
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_no_settings_given_is_an_empty_object() -> None:
    assert environment({SETTINGS: '{"seed": 1}'}, plan=Plan("train.py", (), 2, {}))[SETTINGS] == "{}"


def test_the_rest_of_the_environment_stays() -> None:
    assert (
        environment({"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3"}).items()
        >= {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3"}.items()
    )


@pytest.mark.parametrize(("nproc", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (9, 8, 1)])
def test_threads_share_the_cores(nproc: int, cores: int, threads: int) -> None:
    assert thread_budget(nproc, cores) == threads
    plan = Plan("train.py", (), nproc, {})
    assert environment({}, cores, plan)["OMP_NUM_THREADS"] == str(threads)
    assert environment({"OMP_NUM_THREADS": "5"}, cores, plan)["OMP_NUM_THREADS"] == "5"


def test_strings_hash_alike_on_all_ranks_unless_the_plan_leaves_it() -> None:
    """As torchrun leaves it, where doctor looks for what the order of a set does."""
    left = replace(PLAN, hash_seed=None)
    assert environment({}, plan=PLAN)["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in environment({}, plan=left)
    assert environment({"PYTHONHASHSEED": "7"}, plan=left)["PYTHONHASHSEED"] == "7"


def test_threads_that_the_launcher_chose_are_marked() -> None:
    """A reproducible run must not take their number, which depends on how many processes there are."""
    assert environment({})[THREAD_BUDGET] == environment({})["OMP_NUM_THREADS"]
    assert THREAD_BUDGET not in environment({"OMP_NUM_THREADS": "5"})


def test_command_line() -> None:
    assert command_line(PLAN) == [sys.executable, "-m", "paceline.launcher.worker", "script", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("nproc", "gpus", "count"), [("3", 8, 3), (3, 8, 3), ("cpu", 8, 4), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 4)]
)
def test_number_of_processes(nproc: str | int, gpus: int, count: int) -> None:
    assert count_processes(nproc, 4, lambda: gpus) == count


@pytest.mark.parametrize(
    ("nproc", "gpus", "strategy", "count", "on_cpu"),
    [
        ("gpu", 2, "parameter_server", 3, 1),
        ("auto", 2, "parameter_server:servers=2", 4, 2),
        ("auto", 0, "parameter_server", 4, 1),  # four cores
        ("3", 2, "parameter_server", 3, 1),
        ("gpu", 2, "ddp", 2, 0),
    ],
)
def test_servers_need_no_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nproc: str,
    gpus: int,
    strategy: str,
    count: int,
    on_cpu: int,
) -> None:
    (script := tmp_path / "train.py").touch()
    monkeypatch.setattr(plan_module, "_visible_gpus", lambda: gpus)
    monkeypatch.setattr(plan_module, "available_cores", lambda: 4)
    plan = make_plan(str(script), [], nproc, {"strategy": strategy}, check)
    assert (plan.nproc, plan.on_cpu) == (count, on_cpu)
    check_devices(plan.nproc, plan.device, gpus, plan.on_cpu)


def test_a_machine_may_come_to_have_fewer_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "train.py").touch()
    monkeypatch.setattr(plan_module, "available_cores", lambda: 4)

    def counts(gpus: int, nproc: str, strategy: str = "ddp", **settings: str) -> tuple[tuple[int, int] | None, int]:
        monkeypatch.setattr(plan_module, "_visible_gpus", lambda: gpus)
        monkeypatch.setattr("paceline.launcher.checks.device_count", lambda: gpus)
        plan = make_plan(str(script), [], nproc, {"strategy": strategy, **settings}, check, max_restarts=1)
        check_devices(plan.nproc, plan.device, gpus, plan.on_cpu)
        return plan.elastic, plan.nproc

    assert counts(0, "2:4") == ((2, 4), 4)
    assert counts(8, "6:gpu") == ((6, 8), 8)
    assert counts(7, "6:8") == ((6, 8), 7)  # a device has gone before the start
    assert counts(7, "6:8", device="cpu") == ((6, 8), 8)
    assert counts(2, "3:4", "parameter_server") == ((3, 4), 3)  # the server needs none
    assert counts(8, "8") == (None, 8)
    with pytest.raises(LaunchError, match="2 devices are visible"):
        counts(2, "3:4")
    with pytest.raises(SettingError, match=r"this run has 1 process.*\(--nproc 1:4 may result in 1 processes\.\)"):
        counts(0, "1:4", "fsdp:replicate=2")
    for nproc in ("0:2", "3:2", ":2", "a:2", "2:", "1:2:3", "-1:2"):
        with pytest.raises(LaunchError, match=f"--nproc {nproc}"):
            counts(0, nproc)
    with pytest.raises(LaunchError, match=r"--nproc 1:2: .* Give --max-restarts"):
        make_plan(str(script), [], "1:2", {})


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5", "", "gpu"])
def test_bad_number_of_processes(nproc: str) -> None:
    with pytest.raises(LaunchError, match=f"--nproc {nproc}"):
        count_processes(nproc, 4, lambda: 0)


def test_bad_scripts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"nowhere\.py.*before the script"):
        make_plan(str(tmp_path / "nowhere.py"), [], 1, {})
    with pytest.raises(LaunchError, match=r"is a directory.*train\.py"):
        make_plan(str(tmp_path), [], 1, {})


def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SettingError, match="precision='fp8'"):
        make_plan(str(script), [], 1, {"precision": "fp8"})
    with pytest.raises(SettingError, match="strateggy"):
        make_plan(str(script), [], 1, {"strateggy": "ddp"})


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command hands on: only settings that were given, and the script's arguments as they are."""
    calls: list[tuple[object, ...]] = []

    def fake(script: str, args: tuple[str, ...], *, nproc: str, settings: dict[str, object], **_: object) -> int:
        calls.append((script, args, nproc, settings))
        return 7

    monkeypatch.setattr(launcher, "run", fake)
    line = "run --nproc 2 --strategy ddp:bucket_mb=25 --no-compile --batch-norm shard t.py --nproc 4 --help -- -x"
    assert CliRunner().invoke(main, line.split()).exit_code == 7
    assert CliRunner().invoke(main, ["run", "--nproc-per-node=2", "--standalone", "t.py"]).exit_code == 7
    assert (
        CliRunner().invoke(main, ["run", "--seed", "5", "--precision=bf16", "--nonfinite=skip", "t.py"]).exit_code == 7
    )
    assert calls == [
        (
            "t.py",
            ("--nproc", "4", "--help", "--", "-x"),
            "2",
            {"strategy": "ddp:bucket_mb=25", "compile": False, "batch_norm": "shard"},
        ),
        ("t.py", (), "2", {}),
        ("t.py", (), "1", {"seed": 5, "precision": "bf16", "nonfinite": "skip"}),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["run", "--nproc", "0", __file__], "--nproc 0"),
        (["run", "nowhere.py"], "nowhere.py"),
        (["run", "/"], "is a directory"),
        (["run", "--nprok", "2", __file__], "--nproc"),
        (["run", "--precision", "fp8", __file__], "precision='fp8'"),
        (["run"], "SCRIPT"),
        (["walk"], "walk"),
    ],
)
def test_usage_errors(line: list[str], said: str) -> None:
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
