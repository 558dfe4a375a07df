"""`paceline submit --slurm` with programs that stand for Slurm's (with Slurm itself: tests/system/test_slurm.py)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import main
from paceline.submit.batch_job import BatchJob
from paceline.submit.slurm import Slurm

# What the script asks of Slurm. `srun` runs its command once, without its own options.
FAKES = {
    "scontrol": 'echo "$@" >> scontrol.log; [ "$1" = show ] && echo node7 && echo node8; exit "${SCONTROL:-0}"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "sbatch": """cat > submitted.sh; echo "$@" > sbatch.log
        [ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }; echo "17;c" """,
    "squeue": 'echo "${REASON:-None}"',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and such programs on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in FAKES.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    return tmp_path


def submit(*line: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["submit", *line])
    return done.exit_code, " ".join(done.output.split())


def test_a_job_is_submitted_and_told_where_it_is(slurm: Path) -> None:
    done = CliRunner().invoke(main, ["submit", "--slurm", "--nodes", "2", "--gpus-per-node", "4", "my train.py"])
    assert (done.exit_code, done.output) == (
        0,
        "submitted job 17: 2 nodes, 8 processes\n"
        f"output:    {slurm}/slurm-17.out\n"
        "state:     squeue --job 17\n"
        "cancel:    scancel 17\n",
    )
    assert (slurm / "sbatch.log").read_text() == "--parsable\n"
    script = (slurm / "submitted.sh").read_text()
    for part in (
        '#SBATCH --job-name="my train"\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=4\n',
        "#SBATCH --gpus-per-node=4\n",
        "#SBATCH --no-requeue\n",
        ' --nproc 4 \\\n  --nnodes 2 --rdzv-endpoint "$head:$port" --rdzv-secret-file "$secret" \\\n',
        'paceline secret "$secret" >/dev/null || exit 1\n',
        "trap 'rm -f \"$secret\"' EXIT\n",
    ):
        assert part in script


def test_a_dry_run_prints_the_script_and_submits_nothing(slurm: Path) -> None:
    options = ["--requeue", "--signal", "60", "--partition", "p", "--account", "a", "--time", "1-0", "--job-name", "x"]
    more = ["--sbatch", "mem=8G", "--sbatch", "exclusive", "--sbatch", "output=logs/%j.txt"]
    passed = ["--strategy=ddp", "--no-compile", "--seed=3", "--max-restarts=1"]
    line = ["--slurm", "--dry-run", *options, *more, *passed, "--", "my train.py", "--lr", "it's $HOME"]
    done = CliRunner().invoke(main, ["submit", *line, "--nproc", "3"])  # the last is the script's own
    assert done.exit_code == 0, done.output
    directives = [line.removeprefix("#SBATCH --") for line in done.output.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("job-name=x", "nodes=1", "ntasks-per-node=1", "cpus-per-task=1", "time=1-0", "partition=p", "account=a"),
        *("output=logs/%j.txt", "open-mode=append", "requeue", "signal=B:USR1@60", "mem=8G", "exclusive"),
    ]
    command = done.output.partition("srun ")[2].partition(" &\n")[0].replace("\\\n", "")
    words = shlex.split(command)
    run = words[words.index("run") + 1 :]
    assert run[-5:] == ["my train.py", "--lr", "it's $HOME", "--nproc", "3"]
    assert sorted(run[:-5]) == sorted([*passed, "--nproc", "1", "--grace", "25"])
    assert not (slurm / "submitted.sh").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["my train.py"], "No scheduler given"),
        (["--slurm", "train.py"], "There is no script 'train.py'"),
        (["--slurm", "--nproc", "0", "my train.py"], "--nproc 0: give a whole number"),
        (["--slurm", "--nproc", "3", "--gpus-per-node", "2", "my train.py"], "each process needs its own GPU"),
        (["--slurm", "--strategy", "ddpp", "my train.py"], "ddpp"),
        (["--slurm", "--sbatch", "ntasks=4", "my train.py"], "--sbatch ntasks=4: use --nproc"),
        (["--slurm", "--sbatch", "-p x", "my train.py"], "--sbatch -p x: write KEY=VALUE or KEY"),
        (["--slurm", "--sbatch", "comment=a\nb", "my train.py"], "contains a newline"),
        (["--slurm", "--tee", "5", "--nproc", "2", "my train.py"], "there is no rank 5"),
    ],
)
def test_what_cannot_be_is_refused_before_it_waits_in_a_queue(slurm: Path, line: list[str], said: str) -> None:
    code, told = submit(*line)
    assert (code, said in told) == (2, True), told
    assert not (slurm / "submitted.sh").exists()


def test_sbatch_missing_or_refusing(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSAL", "sbatch: error: Batch job submission failed: Invalid account or other")
    code, told = submit("--slurm", "my train.py")
    assert code == 2
    assert "sbatch refuses the job: Batch job submission failed: Invalid account or other. `sacctmgr show" in told
    monkeypatch.setenv("REASON", "PartitionConfig")
    monkeypatch.delenv("REFUSAL")
    code, told = submit("--slurm", "my train.py")
    assert code == 0
    assert "The job will never start (PartitionConfig)" in told
    monkeypatch.setenv("PATH", str(slurm))
    code, told = submit("--slurm", "my train.py")
    assert code == 2
    assert "there is no `sbatch` on this machine. Submit from a login node" in told
    assert "--dry-run" in told


# ---------------------------------------------------------------- the script, as bash runs it

RUN = """
import pathlib, signal, sys, time
class Told(Exception): pass
def told(*_): raise Told
signal.signal(signal.SIGUSR1, told)
try:
    pathlib.Path("made").write_text(repr(sys.argv[1:]))
    pathlib.Path("made").rename("args")
    time.sleep(float(sys.argv[1]))
    sys.exit(int(sys.argv[2]))
except Told:
    time.sleep(0.2)
    sys.exit(75)
"""


def job(slurm: Path, *args: str, **options: object) -> str:
    """A script that runs RUN in place of `paceline run`."""
    (slurm / "run.py").write_text(RUN)
    return Slurm().script(BatchJob("x", [sys.executable, "run.py", *args], ["my train.py"], **options))  # type: ignore[arg-type]


def start(slurm: Path, script: str) -> subprocess.Popen[str]:
    (slurm / "job.sh").write_text(script)
    environ = {**os.environ, "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "2"}
    return subprocess.Popen(["bash", "job.sh"], env=environ, text=True, stderr=subprocess.PIPE)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_the_script_ends_as_the_run_does(slurm: Path) -> None:
    assert ends(start(slurm, job(slurm, "0", "3", nodes=2, notice=60))) == (3, "")
    options = ["--nproc", "1", "--grace", "25", "--nnodes", "2", "--rdzv-endpoint", f"node7:{15000 + 41}"]
    secret = os.path.join(os.getcwd(), ".paceline-secret-41")
    options += ["--rdzv-secret-file", secret]
    assert (slurm / "args").read_text() == repr(["0", "3", *options, "my train.py"])
    assert not os.path.exists(secret)
    assert "requeue" not in (slurm / "scontrol.log").read_text()
    assert ends(start(slurm, job(slurm, "0", "0"))) == (0, "")


def test_the_script_passes_the_notice_on_and_requeues_the_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for signum, requeued, code in (
        (signal.SIGUSR1, "requeue 41\n", 0),
        (signal.SIGTERM, "", 0),  # scancel's too
        (signal.SIGUSR1, "requeue 41\n", 1),
    ):
        for name in ("args", "scontrol.log"):
            (slurm / name).unlink(missing_ok=True)
        monkeypatch.setenv("SCONTROL", str(code))
        process = start(slurm, job(slurm, "30", "3", notice=60))
        while not (slurm / "args").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signum)
        ended, err = ends(process)
        log = slurm / "scontrol.log"
        assert (ended, log.read_text() if log.exists() else "") == (75, requeued), err
        assert ("job 41 was not requeued. Submit it again" in err) == (code == 1)


def test_a_notice_that_srun_loses_is_sent_again(slurm: Path) -> None:
    """srun passes no signal on before its tasks have started. Here it loses the first two."""
    (slurm / "bin" / "srun").write_text(
        "#!/bin/bash\n"
        "trap 'echo lost >> lost.log' USR1; touch args\n"
        'while [ "$(cat lost.log 2>/dev/null | wc -l)" -lt 2 ]; do sleep 0.05; done\n'
        "trap 'exit 75' USR1\n"
        "while true; do sleep 0.05; done\n"
    )
    process = start(slurm, job(slurm, "30", "3", notice=60))
    while not (slurm / "args").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    ended, err = ends(process)
    assert (ended, (slurm / "scontrol.log").read_text()) == (75, "requeue 41\n"), err


def test_without_scontrol_the_script_says_so(slurm: Path) -> None:
    (slurm / "bin" / "scontrol").write_text("#!/bin/sh\nexit 127\n")
    code, err = ends(start(slurm, job(slurm, "0", "0", nodes=2)))
    assert (code, "scontrol printed no node name" in err) == (1, True)
    assert ends(start(slurm, job(slurm, "0", "0", nodes=2, endpoint="a:1"))) == (0, "")
