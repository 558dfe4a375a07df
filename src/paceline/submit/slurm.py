"""Slurm: the script for sbatch, and what sbatch says.

The script starts one `paceline run` on each node by srun. With a notice, Slurm sends SIGUSR1 to the batch shell before
it takes the nodes away. The shell passes it on to srun, which gives it to the launchers; they save a checkpoint and end
with RESUMABLE, and the script puts the job back into the queue. At SIGTERM, by which other sites give notice, the
launchers save too, and the script does not: Slurm requeues such a job itself, and `scancel` sends SIGTERM as well.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess

from paceline.errors import LaunchError, SettingError
from paceline.submit.batch_job import BatchJob, Submitted
from paceline.world import RESUMABLE

GRACE_SECONDS = 25
"""At SIGTERM. Slurm sends SIGKILL after KillWait, which is 30 s where nobody has set it."""

# An option of sbatch that the job already says -> the option of `paceline submit` for it.
_OURS = {
    "nodes": "--nodes",
    "ntasks": "--nproc",
    "ntasks-per-node": "--nproc",
    "gpus-per-node": "--gpus-per-node",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "requeue": "--requeue",
    "no-requeue": "--requeue",
    "signal": "--signal",
}

# Part of what sbatch says -> what to do.
_REMEDIES = {
    "invalid partition": "`sinfo` lists the partitions; name one with --partition.",
    "no partition specified": "`sinfo` lists the partitions; name one with --partition.",
    "invalid account": "`sacctmgr show associations user=$USER` lists your accounts; name one with --account.",
    "invalid qos": "`sacctmgr show qos` lists them; name one with --sbatch qos=NAME.",
    "time limit": "Give a --time that the partition allows: `sinfo --format='%P %l'` lists the limits.",
    "--time specification": "Write --time as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS.",
    "node count specification": "`sinfo` lists how many nodes each partition has; ask for fewer with --nodes.",
    "requested node configuration": (
        "No node has so many CPUs or GPUs: `sinfo --Node --format='%N %c %G'` lists them. Ask for fewer with --nproc "
        "or --gpus-per-node."
    ),
    "processors requested": (
        "No node has so many CPUs: `sinfo --Node --format='%N %c'` lists them. Ask for fewer with --nproc, or for "
        "fewer than one a process with --sbatch cpus-per-task=N."
    ),
    "generic resource": "`sinfo --format='%P %G'` lists the GPUs of each partition.",
    "configuration source": "This machine knows of no cluster: submit from a login node, or set SLURM_CONF.",
    "unable to contact": "Slurm's controller does not answer: `scontrol ping` says whether it is up.",
    "unrecognized option": "`sbatch --help` lists what --sbatch may be given.",
}


# Reasons of a waiting job that no other job's end will change.
_NEVER = (
    "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "PartitionInactive", "PartitionDown",
    "BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount", "InvalidQOS",
)  # fmt: skip


class Slurm:
    """A Scheduler."""

    def script(self, job: BatchJob) -> str:
        directives = "".join(f"#SBATCH --{key}{_value(value)}\n" for key, value in _options(job).items())
        each = f"processes: {job.nproc} on each of {job.nodes} nodes" if job.nodes > 1 else f"processes: {job.nproc}"
        parts = [f"#!/bin/bash\n{directives}\n# {each}, started by one `paceline run` on each node.\n"]
        run = [*job.command, "--nproc", str(job.nproc)]
        if job.notice is not None:
            run += ["--grace", str(GRACE_SECONDS)]
        line = shlex.join(run)
        if job.nodes > 1:
            if job.endpoint is None:
                parts.append(_MEET)
            place = '"$head:$port"' if job.endpoint is None else shlex.quote(job.endpoint)
            line += f" \\\n  --nnodes {job.nodes} --rdzv-endpoint {place}"
            parts.append(_SECRET.format(paceline=shlex.join([job.command[0], "-m", "paceline"])))
            line += ' --rdzv-secret-file "$secret"'
        # srun does not take the CPUs from the job by itself (Slurm 22.05 and later), and some sites have it end all
        # tasks when one ends with an exit code; the launchers tell each other.
        srun = 'srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK"'
        command = f"{srun} \\\n  {line} \\\n  {shlex.join(job.script)}"
        parts.append(f"{command}\n" if job.notice is None else f"{command} &\n{_REQUEUE}")
        return "".join(parts)

    def submit(self, job: BatchJob) -> Submitted:
        script = self.script(job)
        if shutil.which("sbatch") is None:
            raise LaunchError(
                "submit --slurm: there is no `sbatch` on this machine. Submit from a login node of the cluster (often "
                "after `module load slurm`), or write the script here and take it there: `paceline submit --slurm "
                "--dry-run ... > job.sh`, then `sbatch job.sh`."
            )
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LaunchError(f"sbatch refuses the job: {_complaint(done.stderr)}{_remedy(done.stderr)}")
        number = done.stdout.strip().splitlines()[-1].partition(";")[0]  # "12;cluster" where there are several
        pattern = str(_options(job)["output"])
        output = os.path.abspath(pattern.replace("%j", number).replace("%x", job.name))
        return Submitted(number, output, f"squeue --job {number}", f"scancel {number}", _why_never(number))


def _why_never(number: str) -> str | None:
    """Why a job that was taken will not start. Some sites refuse none (EnforcePartLimits=NO), and such a job waits."""
    if shutil.which("squeue") is None:
        return None
    told = subprocess.run(["squeue", "--noheader", "--format=%r", f"--job={number}"], capture_output=True, text=True)
    reason = told.stdout.strip()
    return reason if reason in _NEVER else None


def _options(job: BatchJob) -> dict[str, str | int | None]:
    """Options of sbatch, without their hyphens; None where one has no value. Raises SettingError."""
    found: dict[str, str | int | None] = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1}
    found["cpus-per-task"] = job.nproc
    if job.gpus:
        found["gpus-per-node"] = job.gpus
    found |= {
        key: value
        for key, value in (("time", job.time), ("partition", job.partition), ("account", job.account))
        if value is not None
    }
    found["output"] = "slurm-%j.out"
    if job.notice is None:
        found["no-requeue"] = None
    else:
        found |= {"open-mode": "append", "requeue": None, "signal": f"B:USR1@{job.notice}"}
    for text in job.more:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise SettingError(f"--sbatch {text}: write KEY=VALUE or KEY, as --sbatch mem=64G or --sbatch exclusive.")
        if key in _OURS:
            raise SettingError(f"--sbatch {text}: say it with {_OURS[key]}, on which the rest of the script depends.")
        found[key] = value.strip() if equals else None
    for key, given in found.items():
        if "\n" in str(given):
            raise SettingError(f"--{key} {given!r}: it has an end of line in it, which no line of #SBATCH can hold.")
    return found


def _value(value: str | int | None) -> str:
    """An option's value as a line of #SBATCH has it: sbatch reads quotes, and a # begins a comment."""
    if value is None:
        return ""
    text = str(value)
    if re.fullmatch(r"[\w@%+=:,./*\[\]-]+", text):
        return f"={text}"
    return '="' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _complaint(said: str) -> str:
    """What sbatch said, as one sentence."""
    lines = [line.removeprefix("sbatch:").strip().removeprefix("error:").strip() for line in said.splitlines()]
    return " ".join(f"{line.rstrip('.')}." for line in lines if line) or "it does not say why."


def _remedy(said: str) -> str:
    found = [remedy for part, remedy in _REMEDIES.items() if part in said.lower()]
    return f" {found[0]}" if found else ""


# The first node, by its name; another port for each job.
_MEET = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -z "$head" ]; then
  echo "no name of a node from scontrol: is it on the PATH of the compute nodes? Or submit with --rdzv-endpoint." >&2
  exit 1
fi
port=$((15000 + SLURM_JOB_ID % 14400))
"""

# In the folder of the job, which the nodes share as they share the script.
_SECRET = """\
secret=$PWD/.paceline-secret-$SLURM_JOB_ID # what the launchers of this job share; it goes when the job ends
rm -f "$secret"
{paceline} secret "$secret" >/dev/null || exit 1
trap 'rm -f "$secret"' EXIT
"""

_KILLED = 128 + signal.SIGUSR1

# bash's `wait` returns at each signal that has a trap: it is called until srun has ended, and once more for its code.
_REQUEUE = f"""\
step=$!

# Notice that the nodes are taken away: paceline run saves a checkpoint and ends with exit code {RESUMABLE}, and the job
# goes back into the queue. ({_KILLED}: the signal came before paceline run had begun.)
taken=
trap 'taken=yes; kill -USR1 "$step"' USR1
trap 'kill -USR1 "$step"' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?
case "$taken:$code" in
  yes:{RESUMABLE} | yes:{_KILLED})
    scontrol requeue "$SLURM_JOB_ID" ||
      echo "job $SLURM_JOB_ID was not requeued. Submit it again: it goes on from its checkpoint." >&2 ;;
esac
exit "$code"
"""
