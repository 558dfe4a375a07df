"""A Slurm cluster of two nodes, n1 and n2, both this machine: real munged, slurmctld and slurmd, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port
from tests.system.needed import PATH, need

CORES = 4  # of each node; two of them are one core of this machine, or less
NODES = ("n1", "n2")


class Cluster:
    """The running daemons.

    Attributes:
        home: the folder of their files.
        environ: the environment in which srun, sbatch and the like find this cluster.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {
            **os.environ,
            "SLURM_CONF": str(home / "slurm.conf"),
            "PATH": PATH,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
        }

    def start(self) -> None:
        self._configure()
        home = self.home
        munged = ["munged", "--force", "-S", str(home / "munge.sock"), "--key-file", str(home / "munge" / "key")]
        munged += ["--pid-file", str(home / "munged.pid"), "--log-file", str(home / "munged.log")]
        self._daemon([*munged, "--seed-file", str(home / "seed")])
        self._daemon(["slurmctld"])
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        self._daemon(["slurmd", "-N", node])

    def _daemon(self, command: list[str]) -> None:
        """Start a daemon in which the nodes' names resolve, as they do on a real cluster; nowhere else."""
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        line = ["unshare", "--mount", "sh", "-c", inside, str(self.home / "hosts"), *command]
        subprocess.run(line, env=self.environ, check=True, timeout=30, capture_output=True)

    def pid(self, name: str) -> int:
        return int((self.home / f"{name}.pid").read_text())

    def close(self) -> None:
        """End the jobs, then the daemons and what they have left.

        All are found by their environment. A file with a daemon's id may be older than the daemon's end, and the id may
        belong to another process by now.
        """
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self.run("scancel", "--user", "root", seconds=10)
            self.run("scancel", "--user", "root", "--signal", "KILL", seconds=10)
        for _ in range(5):  # a daemon may start another process before it is killed
            own = self._processes()
            for process in own:  # asked kindly, slurmd takes seconds
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(own, timeout=10)

    def _processes(self) -> list[psutil.Process]:
        """The living processes of this cluster: its daemons, and all that they have started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SLURM_CONF") == self.environ["SLURM_CONF"]
                if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    def run(self, *command: str, folder: Path | None = None, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands, ended after so many seconds."""
        return subprocess.run(
            ["timeout", "--kill-after=5", str(seconds), *command],
            cwd=folder or self.home,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=seconds + 10,
            check=False,
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        told = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(part.split("=", 1) for part in told.split() if "=" in part)

    def lose_power(self, node: str) -> None:
        """End all that runs on a node: its daemon, the daemons of its steps, and then their tasks."""
        os.kill(self.pid(node), signal.SIGKILL)
        while tasks := self._tasks(node):
            steps = {parent for task in tasks for parent in parents(task) if parent.name() == "slurmstepd"}
            for process in (*steps, *tasks):  # a living daemon would report how its tasks ended
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(tasks, timeout=30)

    def _tasks(self, node: str) -> list[psutil.Process]:
        """The living processes that the steps of a node have started."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    found.append(process)
        return found

    def wait(self, number: str, condition: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """The job when the condition is true of it."""
        begin = time.monotonic()
        while not condition(job := self.job(number)):
            if time.monotonic() - begin > seconds:
                output = Path(job.get("StdOut", "/dev/null"))
                text = output.read_text() if output.exists() else ""
                log = (self.home / "ctld.log").read_text()[-3000:]
                pytest.fail(f"not within {seconds} s. {job}\nIts output:\n{text}\nslurmctld:\n{log}")
            time.sleep(0.3)
        return job

    def _configure(self) -> None:
        home, host = self.home, socket.gethostname()
        (home / "munge").mkdir(mode=0o700)
        key = home / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        names = "".join(f"127.0.0.1 {node}\n" for node in NODES)
        (home / "hosts").write_text(Path("/etc/hosts").read_text() + "\n" + names)
        lines = [
            "ClusterName=t", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
            # A requeued job waits until its credentials have run out.
            "AuthType=auth/munge", f"AuthInfo=socket={home}/munge.sock,cred_expire=5", "CredType=cred/munge",
            f"SlurmctldPort={free_port()}", f"StateSaveLocation={home}/state", f"SlurmdSpoolDir={home}/%n",
            f"SlurmctldPidFile={home}/ctld.pid", f"SlurmdPidFile={home}/%n.pid",
            f"SlurmctldLogFile={home}/ctld.log", f"SlurmdLogFile={home}/%n.log",
            # By process tree, which sends a step's signals to all that a task has started: the harder case.
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU", "MpiDefault=none", "SlurmdParameters=config_overrides", "ReturnToService=2",
            "EnforcePartLimits=ALL",  # what no node can run is refused; otherwise it waits for ever
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0",
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "SlurmctldParameters=preempt_send_user_signal",
            *(f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CORES}" for n in NODES),
            "PartitionName=p Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120 State=UP",
            "PartitionName=urgent Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF State=UP",
        ]  # fmt: skip
        (home / "slurm.conf").write_text("\n".join(lines) + "\n")


def parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:  # it has ended
        return []


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    need("slurm-wlm munge", "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "unshare")
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: munge's socket has a limit
    home.chmod(0o755)
    cluster = Cluster(home)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(home, ignore_errors=True)
