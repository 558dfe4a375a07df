"""Slurm: the script for sbatch, and remedies for sbatch's errors.

The script starts one `paceline run` on each node with srun. If BatchJob.notice is set, Slurm sends SIGUSR1 to the batch
shell before it preempts the job. The shell forwards the signal to srun, and srun to the launchers. The launchers save a
checkpoint and exit with code RESUMABLE, and the script requeues the job.

Some sites announce preemption with SIGTERM instead. The launchers then save too, but the script does not requeue: Slurm
itself requeues a job that it preempts, and `scancel` also sends SIGTERM.
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
"""Seconds to save a checkpoint and exit after SIGTERM. Slurm sends SIGKILL after KillWait, 30 s by default."""

# An option of sbatch that the job already sets -> the corresponding option of `paceline submit`.
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

# Part of sbatch's message -> remedy.
_REMEDIES = {
    "invalid partition": "`sinfo` lists the partitions. Choose one with --partition.",
    "no partition specified": "`sinfo` lists the partitions. Choose one with --partition.",
    "invalid account": "`sacctmgr show associations user=$USER` lists your accounts. Choose one with --account.",
    "invalid qos": "`sacctmgr show qos` lists them. Choose one with --sbatch qos=NAME.",
    "time limit": "Give a --time that the partition allows: `sinfo --format='%P %l'` lists the limits.",
    "--time specification": "Write --time as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS.",
    "node count specification": "`sinfo` lists the nodes of each partition. Reduce --nodes.",
    "requested node configuration": (
        "No node has that number of CPUs or GPUs: `sinfo --Node --format='%N %c %G'` lists them. Reduce --nproc or "
        "--gpus-per-node."
    ),
    "processors requested": (
        "No node has that number of CPUs: `sinfo --Node --format='%N %c'` lists them. Reduce --nproc, or use fewer "
        "CPUs than processes with --sbatch cpus-per-task=N."
    ),
    "generic resource": "`sinfo --format='%P %G'` lists the GPUs of each partition.",
    "configuration source": "This machine is not part of a cluster. Submit from a login node, or set SLURM_CONF.",
    "unable to contact": "Slurm's controller does not answer. `scontrol ping` shows whether it is up.",
    "unrecognized option": "`sbatch --help` lists the options for --sbatch.",
}


# squeue's reasons for a pending job that remain when other jobs end: the job will never start.
_NEVER = (
    "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "PartitionInactive", "PartitionDown",
    "BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount", "InvalidQOS",
)  # fmt: skip


class Slurm:
    """The Scheduler that writes scripts for sbatch and submits them."""

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
                parts.append(_RENDEZVOUS)
            place = '"$head:$port"' if job.endpoint is None else shlex.quote(job.endpoint)
            line += f" \\\n  --nnodes {job.nodes} --rdzv-endpoint {place}"
            parts.append(_SECRET.format(paceline=shlex.join([job.command[0], "-m", "paceline"])))
            line += ' --rdzv-secret-file "$secret"'
        # Since Slurm 22.05, srun does not inherit the job's number of CPUs. Some sites configure srun to end all tasks
        # when one fails, but the launchers handle failures themselves.
        srun = 'srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK"'
        command = f"{srun} \\\n  {line} \\\n  {shlex.join(job.script)}"
        parts.append(f"{command}\n" if job.notice is None else f"{command} &\n{_REQUEUE}")
        return "".join(parts)

    def submit(self, job: BatchJob) -> Submitted:
        script = self.script(job)
        if shutil.which("sbatch") is None:
            raise LaunchError(
                "submit --slurm: there is no `sbatch` on this machine. Submit from a login node of the cluster (often "
                "after `module load slurm`), or write the script here and copy it there: `paceline submit --slurm "
                "--dry-run ... > job.sh`, then `sbatch job.sh`."
            )
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LaunchError(f"sbatch refuses the job: {_complaint(done.stderr)}{_remedy(done.stderr)}")
        number = done.stdout.strip().splitlines()[-1].partition(";")[0]  # "12;cluster" with several clusters
        pattern = str(_options(job)["output"])
        output = os.path.abspath(pattern.replace("%j", number).replace("%x", job.name))
        return Submitted(number, output, f"squeue --job {number}", f"scancel {number}", _why_never(number))


def _why_never(number: str) -> str | None:
    """Return why an accepted job will never start, or None.

    Sites with EnforcePartLimits=NO accept impossible jobs, which then wait forever.
    """
    if shutil.which("squeue") is None:
        return None
    done = subprocess.run(["squeue", "--noheader", "--format=%r", f"--job={number}"], capture_output=True, text=True)
    reason = done.stdout.strip()
    return reason if reason in _NEVER else None


def _options(job: BatchJob) -> dict[str, str | int | None]:
    """Return sbatch's options: name without hyphens -> value; None if the option has none. Raises SettingError."""
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
            raise SettingError(
                f"--sbatch {text}: write KEY=VALUE or KEY, such as --sbatch mem=64G or --sbatch exclusive."
            )
        if key in _OURS:
            raise SettingError(f"--sbatch {text}: use {_OURS[key]}, because the rest of the script depends on it.")
        found[key] = value.strip() if equals else None
    for key, given in found.items():
        if "\n" in str(given):
            raise SettingError(f"--{key} {given!r} contains a newline, which an #SBATCH line cannot. Remove it.")
    return found


def _value(value: str | int | None) -> str:
    """Format an option's value for an #SBATCH line. Quote it if needed: an unquoted # would begin a comment."""
    if value is None:
        return ""
    text = str(value)
    if re.fullmatch(r"[\w@%+=:,./*\[\]-]+", text):
        return f"={text}"
    return '="' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _complaint(said: str) -> str:
    """Join the lines of sbatch's message."""
    lines = [line.removeprefix("sbatch:").strip().removeprefix("error:").strip() for line in said.splitlines()]
    return " ".join(f"{line.rstrip('.')}." for line in lines if line) or "no reason given."


def _remedy(said: str) -> str:
    found = [remedy for part, remedy in _REMEDIES.items() if part in said.lower()]
    return f" {found[0]}" if found else ""


# The name of the first node, and a port that differs between jobs.
_RENDEZVOUS = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -z "$head" ]; then
  echo "scontrol printed no node name. Is it on the PATH of the compute nodes? Or submit with --rdzv-endpoint." >&2
  exit 1
fi
port=$((15000 + SLURM_JOB_ID % 14400))
"""

# The secret is in the job's working directory, which all nodes share (as they share the script).
_SECRET = """\
secret=$PWD/.paceline-secret-$SLURM_JOB_ID # shared by the launchers of this job, and removed at its end
rm -f "$secret"
{paceline} secret "$secret" >/dev/null || exit 1
trap 'rm -f "$secret"' EXIT
"""

_KILLED = 128 + signal.SIGUSR1

# bash's `wait` returns at each trapped signal. So the script calls it until srun has ended, and once more for srun's
# exit code. srun loses a signal that arrives before its tasks have started, so the script repeats SIGUSR1. The
# launchers act on the first that reaches them.
_REQUEUE = f"""\
step=$!

# When the job is preempted, paceline run saves a checkpoint and ends with exit code {RESUMABLE}, and the job is
# requeued. ({_KILLED}: the signal came before paceline run had started.)
taken=
trap 'taken=yes' USR1
trap 'kill -USR1 "$step"' TERM
while kill -0 "$step" 2>/dev/null; do
  if [ -n "$taken" ]; then
    kill -USR1 "$step" && sleep 2
  else
    wait "$step"
  fi
done
wait "$step"
code=$?
case "$taken:$code" in
  yes:{RESUMABLE} | yes:{_KILLED})
    scontrol requeue "$SLURM_JOB_ID" ||
      echo "job $SLURM_JOB_ID was not requeued. Submit it again to resume from its checkpoint." >&2 ;;
esac
exit "$code"
"""
