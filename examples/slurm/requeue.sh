#!/bin/bash
# A job that makes room for others, or outlasts its time limit: two minutes before its end Slurm sends SIGUSR1, the run
# saves a checkpoint and ends with 75, and the job goes back into the queue. The script says run.restore(DIRECTORY,
# missing_ok=True) after run.prepare; nothing else.
# sbatch examples/slurm/requeue.sh train.py
#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append      # the output of all turns in one file
#SBATCH --requeue
#SBATCH --signal=B:USR1@120     # to this shell, so many seconds before

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((15000 + SLURM_JOB_ID % 14400))
secret=$PWD/.paceline-secret-$SLURM_JOB_ID # what the launchers share; in a folder that the nodes share
rm -f "$secret"
paceline secret "$secret" || exit 1
trap 'rm -f "$secret"' EXIT
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  paceline run --nnodes "$SLURM_JOB_NUM_NODES" --nproc 2 --grace 25 --rdzv-endpoint "$head:$port" \
  --rdzv-secret-file "$secret" "$@" &
step=$!

taken=
trap 'taken=yes; kill -USR1 "$step"' USR1
trap 'kill -USR1 "$step"' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ends `wait`, not srun
wait "$step"
code=$?
[ "$taken:$code" = yes:75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
