"""What each launcher's variables say. Those of Slurm 22.05, Open MPI 4.1 and MPICH 4.0 were taken from real runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.errors import WorldError
from paceline.world import LAUNCHER_PID, World, expand_hosts, from_env

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
BATCH_SCRIPT = {  # one process, though four tasks were asked for
    "SLURM_JOB_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "4",
}
SALLOC_SHELL = {  # a step of one task in a job of four
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SRUN = {  # srun -N2 -n3, its last task
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
SRUN_ONE_NODE = {
    **SRUN,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1977155585",
}
MPIRUN_TWO_NODES = {
    **MPIRUN,
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_num_nodes": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "2000",
}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
ALONE = World(0, 1, 0, 1, 0, 1, "alone")


def without(table: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in table.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        pytest.param({}, ALONE, id="alone"),
        pytest.param({"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, ALONE, id="only an address, as from a profile"),
        pytest.param({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ALONE, id="a notebook's leftovers"),
        pytest.param(TORCHRUN, World(5, 6, 1, 2, 2, 3, "torchrun", "node0", 29500), id="torchrun"),
        pytest.param(
            {**TORCHRUN, LAUNCHER_PID: "77"}, World(5, 6, 1, 2, 2, 3, "paceline", "node0", 29500), id="paceline run"
        ),
        pytest.param(
            without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"),
            World(5, 6, 1, 2, 2, 3, "torchrun", "node0", 29500),
            id="torchrun, nodes left out",
        ),
        pytest.param(
            {**TORCHRUN, "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            World(4, 5, 1, 2, 1, 2, "torchrun", "node0", 29500),
            id="torchrun, 3 and 2 processes",
        ),
        pytest.param(BY_HAND, World(1, 2, 1, 2, 0, 1, "torchrun", "127.0.0.1", 1234), id="by hand on one machine"),
        pytest.param(
            {**BY_HAND, "LOCAL_RANK": "1"},
            World(1, 2, 1, 2, 0, 1, "torchrun", "127.0.0.1", 1234),
            id="torch.distributed.launch of old",
        ),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "job-master-0"},
            World(1, 2, 0, 1, 1, 2, "torchrun", "job-master-0", 1234),
            id="one process on each machine, as in Kubernetes",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1, 0, 1, "torchrun"), id="a world of one"),
        pytest.param(BATCH_SCRIPT, ALONE, id="Slurm batch script"),
        pytest.param(without(BATCH_SCRIPT, "SLURM_PROCID"), ALONE, id="salloc, older"),
        pytest.param(SALLOC_SHELL, ALONE, id="salloc, newer"),
        pytest.param(SRUN, World(2, 3, 0, 1, 1, 2, "slurm", "n1", 23565), id="srun"),
        pytest.param(
            without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
            World(2, 3, 0, 1, 1, 2, "slurm", "n1", 23565),
            id="srun, fewer variables",
        ),
        pytest.param(
            {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "WORLD_SIZE": "3"},
            World(2, 3, 0, 1, 1, 2, "slurm", "10.0.0.1", 29501),
            id="srun, master given by the batch script",
        ),
        pytest.param(SRUN_ONE_NODE, World(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 23565), id="srun on one node"),
        pytest.param({**SRUN, **TORCHRUN}, World(5, 6, 1, 2, 2, 3, "torchrun", "node0", 29500), id="torchrun in srun"),
        pytest.param(
            {**SRUN, "RANK": "2", "WORLD_SIZE": "3"},
            World(2, 3, 0, 1, 1, 2, "slurm", "n1", 23565),
            id="srun, ranks handed on by a wrapper script",
        ),
        pytest.param(MPIRUN, World(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1", 23847), id="mpirun"),
        pytest.param(MPIRUN_TWO_NODES, World(3, 4, 1, 2, 1, 2, "openmpi", "n1", 2000), id="mpirun on two nodes"),
        pytest.param({**SRUN, **MPIRUN}, World(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1", 23847), id="mpirun in Slurm"),
        pytest.param(MPIEXEC, World(1, 2, 1, 2, 0, 1, "mpich", "127.0.0.1", 29500), id="mpiexec"),
        pytest.param({**SRUN, **MPIEXEC}, World(1, 2, 1, 2, 0, 1, "mpich", "127.0.0.1", 29500), id="mpiexec in Slurm"),
        pytest.param(
            {**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"},
            World(2, 3, 0, 1, 1, 2, "slurm", "n1", 23565),
            id="srun --mpi=pmi2",
        ),
    ],
)
def test_world(environ: dict[str, str], world: World) -> None:
    assert from_env(environ) == world


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        pytest.param(without(TORCHRUN, "WORLD_SIZE"), ["WORLD_SIZE is not set", "RANK is"], id="no size"),
        pytest.param(without(TORCHRUN, "RANK"), ["WORLD_SIZE=6", "RANK is not set"], id="no rank"),
        pytest.param({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "WORLD_SIZE"], id="only a local rank"),
        pytest.param({**TORCHRUN, "RANK": "five"}, ["RANK='five'", "whole number"], id="not a number"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'", "at least 0"], id="negative"),
        pytest.param({**TORCHRUN, "RANK": "1.0"}, ["RANK='1.0'"], id="fraction"),
        pytest.param({**TORCHRUN, "RANK": ""}, ["RANK is not set"], id="empty"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "at least 1"], id="size 0"),
        pytest.param({**TORCHRUN, "RANK": "6"}, ["RANK=6", "WORLD_SIZE=6"], id="rank too high"),
        pytest.param(
            {**BY_HAND, "RANK": "5"}, ["RANK=5 is not below WORLD_SIZE=2"], id="rank too high, without a place"
        ),
        pytest.param(
            {**MPIRUN_TWO_NODES, "OMPI_COMM_WORLD_RANK": "9"},
            ["OMPI_COMM_WORLD_RANK=9 is not below OMPI_COMM_WORLD_SIZE"],
            id="MPI rank too high",
        ),
        pytest.param({**SRUN, "SLURM_PROCID": "9"}, ["SLURM_PROCID=9 is not below SLURM"], id="Slurm rank too high"),
        pytest.param(
            {**BY_HAND, "WORLD_SIZE": "1000000000"}, ["WORLD_SIZE=1000000000", "1,000,000"], id="too many processes"
        ),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"], id="local rank too high"),
        pytest.param({**TORCHRUN, "GROUP_RANK": "3"}, ["GROUP_RANK=3", "3"], id="node too high"),
        pytest.param({**TORCHRUN, "GROUP_WORLD_SIZE": "6"}, ["6 nodes", "WORLD_SIZE=6"], id="too many nodes"),
        pytest.param({**TORCHRUN, "RANK": "0"}, ["LOCAL_RANK=1", "RANK=0"], id="local rank above rank"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            ["LOCAL_WORLD_SIZE=2", "WORLD_SIZE=1"],
            id="more here than anywhere",
        ),
        pytest.param(without(TORCHRUN, "LOCAL_WORLD_SIZE"), ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE"], id="no local size"),
        pytest.param(without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK", "LOCAL_WORLD_SIZE=2"], id="no local rank"),
        pytest.param(
            {**without(TORCHRUN, "GROUP_RANK"), "WORLD_SIZE": "7"}, ["GROUP_RANK", "WORLD_SIZE=7"], id="which node?"
        ),
        pytest.param({**BY_HAND, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "RANK=1", "127.0.0.1"], id="two local rank 0"),
        pytest.param(without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR is not set", "one of 6"], id="no address"),
        pytest.param(without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT is not set"], id="no port"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "99999"}, ["MASTER_PORT=99999"], id="no TCP port"),
        pytest.param({**SRUN, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "slurm", "3"], id="size against Slurm's"),
        pytest.param({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2"}, ["SLURM_STEP_TASKS_PER_NODE=2"], id="Slurm's sum"),
        pytest.param(
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x"}, ["SLURM_STEP_TASKS_PER_NODE='2x'"], id="Slurm's form"
        ),
        pytest.param(without(SRUN, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST is not set"], id="no node list"),
        pytest.param(without(SRUN, "SLURM_LOCALID"), ["SLURM_LOCALID is not set"], id="no Slurm local id"),
        pytest.param(without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE is not set"], id="no MPI size"),
        pytest.param(without(MPIRUN_TWO_NODES, "MASTER_ADDR"), ["MASTER_ADDR", "mpirun -x"], id="no MPI master"),
        pytest.param(
            {**MPIRUN_TWO_NODES, "OMPI_COMM_WORLD_RANK": "2"},
            ["OMPI_COMM_WORLD_RANK=2", "--map-by slot"],
            id="MPI ranks dealt out over nodes",
        ),
        pytest.param(
            {**MPIRUN_TWO_NODES, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            ["OMPI_COMM_WORLD_LOCAL_SIZE=1", "evenly"],
            id="MPI ranks on uneven nodes",
        ),
        pytest.param(without(MPIEXEC, "MPI_LOCALNRANKS"), ["MPI_LOCALNRANKS is not set"], id="no MPICH local size"),
    ],
)
def test_bad_world(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        from_env(environ)
    for words in named:
        assert words in str(caught.value)
    assert any(
        word in str(caught.value) for word in ("Set ", "set ", "unset", "Correct", "Start ", "start ")
    )  # a remedy


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("login", ["login"]),
        ("n[1-2]", ["n1", "n2"]),
        ("gpu[07-09,12],login", ["gpu07", "gpu08", "gpu09", "gpu12", "login"]),
        ("a,b", ["a", "b"]),
        ("rack[1-2]-node[01,10]", ["rack1-node01", "rack1-node10", "rack2-node01", "rack2-node10"]),
        ("n[099-101].cluster.org", ["n099.cluster.org", "n100.cluster.org", "n101.cluster.org"]),
    ],
)
def test_hosts(short: str, hosts: list[str]) -> None:
    assert expand_hosts(short) == hosts


@pytest.mark.parametrize("short", ["", "[]", "n[1-x]"])
def test_bad_hosts(short: str) -> None:
    with pytest.raises(WorldError, match="SLURM_STEP_NODELIST"):
        expand_hosts(short)


def test_ports_of_two_steps_differ_and_ranks_agree() -> None:
    first = {from_env({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port, from_env(SRUN).master_port}
    assert len(first) == 1
    assert from_env({**SRUN, "SLURM_STEP_ID": "1"}).master_port not in first
    assert from_env({**SRUN, "SLURM_JOB_ID": "3"}).master_port not in first


def test_no_torch() -> None:
    code = "import sys, paceline.world, paceline.cli, paceline.launcher.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# What Kubeflow's training operator sets in a pod of a PyTorchJob: pkg/controller.v1/pytorch/envvar.go and master.go of
# its release 1.9.0. RANK is the number of the pod, and WORLD_SIZE its count times nprocPerNode.
POD = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "job-master-0",
    "PET_MASTER_ADDR": "job-master-0",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NNODES": "2",
}


def test_a_pod_of_a_pytorchjob() -> None:
    assert from_env(POD) == World(1, 2, 0, 1, 1, 2, "torchrun", "job-master-0", 23456)
    assert from_env({**POD, "PET_NPROC_PER_NODE": "1"}).local_size == 1
    with pytest.raises(WorldError, match=r"PET_NPROC_PER_NODE=2, but LOCAL_RANK is not set: .* `paceline run"):
        from_env({**POD, "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4"})  # it would wait for two that nobody starts
