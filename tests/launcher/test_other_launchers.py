"""The same script under launchers that are not ours: mpirun, srun, and torch's old one, where they are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = r"""
import sys
import paceline
run = paceline.start(device="cpu")
words = (run.world.source, run.world.rank, run.world.size, run.sum(run.world.rank + 1), *sys.argv[1:])
sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece: these launchers mix what the ranks print
sys.stdout.flush()
"""
DAEMONS = ("munged", "slurmctld", "slurmd")


def outcome(directory: Path, command: list[str], environ: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """(exit code, sorted lines of stdout, stderr)"""
    (directory / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


def test_the_old_torch_launcher(tmp_path: Path) -> None:
    """It puts --local-rank before the script's own arguments, which is the script's business; the world is as usual."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2", "script.py", "--lr", "1"]
    code, lines, err = outcome(tmp_path, command)
    assert code == 0, err
    assert lines == [f"torchrun {rank} 2 3 --local-rank={rank} --lr 1" for rank in (0, 1)]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian: openmpi-bin)")
def test_mpirun(tmp_path: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    code, lines, err = outcome(tmp_path, [*mpirun, sys.executable, "script.py", "a"])
    assert code == 0, err
    assert lines == ["openmpi 0 2 3 a", "openmpi 1 2 3 a"]
    code, lines, err = outcome(tmp_path, [*mpirun, sys.executable, "-m", "paceline", "run", "script.py"])
    assert (code, lines) == (2, [])
    assert "You are inside rank 0 of 2 of mpirun, and each of them would start a run of its own." in err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    """A Slurm of two nodes, both this machine. Gives the environment for srun."""
    sbin = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in (*DAEMONS, "srun") if shutil.which(name, path=sbin) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no {', '.join(missing)} (Debian: slurm-wlm)" if missing else "Slurm's daemons need root")
    import tempfile

    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:  # a short path: munge's socket has a limit
        home = Path(name)
        home.chmod(0o755)
        environ = {"SLURM_CONF": str(home / "slurm.conf"), "PATH": sbin}
        configure(home)
        key = ["--key-file", str(home / "munge" / "key"), "--pid-file", str(home / "munged.pid")]
        files = ["--log-file", str(home / "munged.log"), "--seed-file", str(home / "seed")]
        daemons = [["munged", "--force", "-S", str(home / "munge.sock"), *key, *files], ["slurmctld"]]
        daemons += [["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]]
        try:
            for command in daemons:
                subprocess.run(command, env={**os.environ, **environ}, check=True, timeout=20, capture_output=True)
            yield environ
        finally:
            for file in home.glob("*.pid"):
                with contextlib.suppress(ProcessLookupError):  # asked kindly, slurmd takes seconds
                    os.kill(int(file.read_text()), signal.SIGKILL)


def configure(home: Path) -> None:
    host = socket.gethostname()
    (home / "munge").mkdir(mode=0o700)
    key = home / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    lines = [
        "ClusterName=t", f"SlurmctldHost={host}", "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge",
        f"AuthInfo=socket={home}/munge.sock", "CredType=cred/munge", f"SlurmctldPort={free_port()}",
        f"StateSaveLocation={home}/state", f"SlurmdSpoolDir={home}/%n", f"SlurmctldPidFile={home}/ctld.pid",
        f"SlurmdPidFile={home}/%n.pid", f"SlurmctldLogFile={home}/ctld.log", f"SlurmdLogFile={home}/%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres", "MpiDefault=none",
        "SlurmdParameters=config_overrides", "ReturnToService=2",
        *(f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4" for n in ("n1", "n2")),
        "PartitionName=p Nodes=n1,n2 Default=YES OverSubscribe=YES State=UP",
    ]  # fmt: skip
    (home / "slurm.conf").write_text("\n".join(lines) + "\n")


@pytest.mark.conformance
def test_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    srun = ["timeout", "50", "srun"]
    code, lines, err = outcome(tmp_path, [*srun, "-n", "2", "-N", "1", sys.executable, "script.py", "a"], slurm)
    assert code == 0, err
    assert lines == ["slurm 0 2 3 a", "slurm 1 2 3 a"]
    paceline = [sys.executable, "-m", "paceline", "run"]
    code, lines, err = outcome(tmp_path, [*srun, "-n", "2", "-N", "2", *paceline, "script.py"], slurm)
    assert (code, lines) == (2, [])
    assert "You are inside srun task 1 of 2" in err
    place = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    code, lines, err = outcome(tmp_path, [*srun, "-n", "2", "-N", "2", *paceline, *place, "script.py", "b"], slurm)
    assert code == 0, err
    assert lines == ["paceline 0 2 3 b", "paceline 1 2 3 b"]
