#!/bin/bash
# Several nodes, one `paceline run` on each: restarts, output in one place, failures told by their cause.
# sbatch examples/slurm/several_nodes.sh examples/digits.py
#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # launchers; the processes are --nproc
#SBATCH --cpus-per-task=2       # of all processes of a node
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
# On GPUs also: --gpus-per-node=8, and below --nproc 8.

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((15000 + SLURM_JOB_ID % 14400)) # another one for each job
secret=$PWD/.paceline-secret-$SLURM_JOB_ID # what the launchers share; in a folder that the nodes share
rm -f "$secret"
paceline secret "$secret" || exit 1
trap 'rm -f "$secret"' EXIT
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  paceline run --nnodes "$SLURM_JOB_NUM_NODES" --nproc 2 --rdzv-endpoint "$head:$port" \
  --rdzv-secret-file "$secret" "$@"
