"""Slurm on two nodes: srun, `paceline submit`, and jobs that are preempted, cut off, killed and refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.system.slurm_cluster import CORES, Cluster

from paceline.cli import main

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

SECONDS = 300.0  # for a job, which takes some ten on an idle machine

PLACES = r"""
import sys
import paceline
run = paceline.start(device="cpu", progress="off")
w = run.world
words = (w.source, w.rank, w.size, w.local_rank, w.local_size, w.node, w.nodes, run.sum(w.rank + 1), *sys.argv[1:])
sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece: srun mixes what the ranks print
"""

# Any number of processes trains the same model.
TRAIN = r"""
import os, signal, sys, time
from pathlib import Path
import torch, paceline
from torch import nn

name, *words = sys.argv[1:]
run = paceline.start(device="cpu", seed=3, progress="off")
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()
x, y = (torch.randn(48, n, generator=g, dtype=torch.float64) for n in (8, 1))
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=8, shuffle=True)
run.restore(name + ".checkpoints", missing_ok=True)
print(f"rank {run.rank} of {run.world_size} on node {run.world.node} starts after step {run.steps}", *words, flush=True)
for epoch in run.epochs(5):
    for batch in loader:
        run.forward_backward(lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), model, batch)
        run.step(optimizer)
        if words == ["crash"] and run.rank == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if run.steps == 6:
            run.save(name + ".checkpoints")
        if words == ["slow"] and run.steps >= 7 and not Path(name + ".go").exists():
            Path(name + ".running").touch()
            time.sleep(3.0)
run.export(name + ".safetensors", model)
run.print("done after step", run.steps)
"""


class Folder:
    """A job's working directory, with blanks in its name and in the script's."""

    script, name = "my train.py", "job"

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster, self.path = cluster, path / "a job's folder"
        self.path.mkdir()
        (self.path / self.script).write_text(TRAIN)

    def submit(self, *line: str) -> str:
        """The number of the job."""
        done = self.cluster.run(sys.executable, "-m", "paceline", "submit", "--slurm", *line, folder=self.path)
        assert done.returncode == 0, done.stderr
        first, output, watch, cancel = done.stdout.splitlines()
        number = first.split(":")[0].split()[2]  # "submitted job 4711: 2 nodes, 4 processes"
        assert output.split(maxsplit=1)[1] == str(self.path / f"slurm-{number}.out")
        assert (watch.split(maxsplit=1)[1], cancel.split(maxsplit=1)[1]) == (
            f"squeue --job {number}",
            f"scancel {number}",
        )
        return number

    def output(self, number: str) -> str:
        return (self.path / f"slurm-{number}.out").read_text()

    def run_here(self, name: str, *line: str) -> dict[str, torch.Tensor]:
        """The weights that a run without Slurm ends with."""
        command = [sys.executable, *line, self.script, name]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=self.path, env=environ, check=True, timeout=SECONDS, capture_output=True)
        return load_file(self.path / f"{name}.safetensors")

    def wait_for_end(self, number: str) -> dict[str, torch.Tensor]:
        """The weights that the job ends with. It must end well."""
        job = self.cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), self.output(number)
        return load_file(self.path / f"{self.name}.safetensors")


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Folder:
    return Folder(cluster, tmp_path)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| over the whole model."""
    difference = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return float((difference / sum(float(value.double().square().sum()) for value in a.values())) ** 0.5)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- srun


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-N", "1", "-n", "2"], ["0 2 0 2 0 1 3", "1 2 1 2 0 1 3"]),
        (
            ["-N", "2", "-n", "4", "--ntasks-per-node", "2"],
            ["0 4 0 2 0 2 10", "1 4 1 2 0 2 10", "2 4 0 2 1 2 10", "3 4 1 2 1 2 10"],
        ),
    ],
)
def test_srun(cluster: Cluster, tmp_path: Path, options: list[str], expected: list[str]) -> None:
    (tmp_path / "script.py").write_text(PLACES)
    done = cluster.run("srun", *options, sys.executable, "script.py", "a", folder=tmp_path, seconds=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {line} a" for line in expected]


def test_a_launcher_in_each_task_of_srun_is_refused_where_it_would_start_runs_of_its_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(PLACES)
    line = ["srun", "-n", "2", "-N", "2", sys.executable, "-m", "paceline", "run", "script.py"]
    done = cluster.run(*line, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "You are inside srun task 1 of 2" in done.stderr


# ---------------------------------------------------------------- paceline submit


def test_a_job_on_two_nodes_trains_the_model_of_one_process(folder: Folder) -> None:
    words = ["it's", 'a "quoted" $HOME', "*"]
    two = ["--nodes", "2", "--nproc", "2", "--tee", "all", "--time", "10"]
    number = folder.submit(*two, "--", folder.script, folder.name, *words)
    expected = folder.run_here("alone")
    found = folder.wait_for_end(number)
    assert distance(expected, found) <= 1e-10
    lines = folder.output(number).splitlines()
    for rank in range(4):  # all in one file, and those of each node marked but for its first
        mark = "" if rank in (0, 2) else f"[rank {rank}] "
        line = f'{mark}rank {rank} of 4 on node {rank // 2} starts after step 0 it\'s a "quoted" $HOME *'
        assert lines.count(line) == 1, lines


def test_a_preempted_job_waits_and_goes_on_to_the_same_bits(folder: Folder) -> None:
    """By Slurm itself: a job of a partition with a higher priority needs both nodes."""
    cluster = folder.cluster
    two = ["--nodes", "2", "--nproc", "1", "--requeue", "--sbatch", f"cpus-per-task={CORES}"]
    number = folder.submit(*two, folder.script, folder.name, "slow")
    cluster.wait(number, lambda job: (folder.path / "job.running").exists(), SECONDS)
    line = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1"]
    urgent = cluster.run(*line, "--output=/dev/null", folder=folder.path).stdout.strip()
    cluster.wait(urgent, lambda job: job["JobState"] == "COMPLETED", SECONDS)
    (folder.path / "job.go").touch()
    expected = folder.run_here("whole", "-m", "paceline", "run", "--nproc", "2")
    assert same_bits(expected, folder.wait_for_end(number)), folder.output(number)
    output = folder.output(number)
    assert cluster.job(number)["Restarts"] == "1", output
    assert len(re.findall("starts after step", output)) == 4  # of the first rank of each node, twice
    assert "paceline: stopped by SIGUSR1, after saving" in output
    assert output.count("done after step 30") == 1


def test_a_signal_before_the_first_step(folder: Folder) -> None:
    number = folder.submit("--nproc", "2", "--requeue", folder.script, folder.name)
    # When srun's step exists, the script is ready for a signal, and Python has just started. Slurm itself loses a
    # signal that comes before the script runs.
    steps = ("squeue", "--noheader", "--steps", "--format=%i", f"--job={number}")
    folder.cluster.wait(number, lambda job: f"{number}.0" in folder.cluster.run(*steps).stdout.split(), SECONDS)
    done = folder.cluster.run("scancel", "--batch", "--signal=USR1", number)
    assert done.returncode == 0, done.stderr
    expected = folder.run_here("whole", "-m", "paceline", "run", "--nproc", "2")
    assert same_bits(expected, folder.wait_for_end(number)), folder.output(number)
    assert folder.cluster.job(number)["Restarts"] == "1", folder.output(number)


def test_a_job_whose_node_goes_down_goes_on_from_its_last_checkpoint(folder: Folder) -> None:
    cluster = folder.cluster
    number = folder.submit("--nodes", "2", "--nproc", "1", "--requeue", folder.script, folder.name, "slow")
    cluster.wait(number, lambda job: (folder.path / "job.running").exists(), SECONDS)
    cluster.lose_power("n2")
    try:
        # What slurmctld itself does when a node has not answered for SlurmdTimeout (300 s).
        down = cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        assert down.returncode == 0, down.stderr
        cluster.wait(number, lambda job: job["JobState"] == "PENDING", SECONDS)
        (folder.path / "job.go").touch()
    finally:
        cluster.start_node("n2")  # it registers, and ReturnToService makes it idle
    expected = folder.run_here("whole", "-m", "paceline", "run", "--nproc", "2")
    assert same_bits(expected, folder.wait_for_end(number)), folder.output(number)
    # 6 is the script's own last save. Ranks that Slurm ends may save a later one, and srun may not pass on their line.
    starts = re.findall(r"starts after step (\d+)", folder.output(number))
    assert len(starts) == 4, folder.output(number)
    assert starts[:2] == ["0", "0"], folder.output(number)
    assert starts[2] == starts[3], folder.output(number)
    assert int(starts[2]) >= 6, folder.output(number)


def test_a_rank_that_dies_is_named_in_the_jobs_output(folder: Folder) -> None:
    number = folder.submit("--nodes", "2", "--nproc", "2", folder.script, folder.name, "crash")
    job = folder.cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
    output = folder.output(number)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), output
    assert "rank 3 was killed by SIGSEGV (a crash in native code)" in output


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "gpus"], "sbatch refuses the job: .*nvalid partition.* Choose one with --partition"),
        (["--nproc", "64"], "sbatch refuses the job: .*Reduce --nproc"),
        (["--nodes", "3"], "sbatch refuses the job: .*Reduce --nodes"),
        (["--time", "soon"], "sbatch refuses the job: .*Write --time as MINUTES"),
        (["--gpus-per-node", "2"], "sbatch refuses the job: .*lists the GPUs of each partition"),
        (["--sbatch", "colour=red"], "sbatch refuses the job: .*`sbatch --help` lists the options for --sbatch"),
    ],
)
def test_what_sbatch_refuses_is_said_with_a_remedy(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(PLACES)
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    monkeypatch.setenv("PATH", cluster.environ["PATH"])
    done = CliRunner().invoke(main, ["submit", "--slurm", *options, "script.py"])
    assert done.exit_code == 2
    assert re.search(said, " ".join(done.output.split())), done.output
