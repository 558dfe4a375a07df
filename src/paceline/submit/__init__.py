"""`paceline submit`: submit a run to a scheduler, which starts it when nodes are free.

batch_job.py        the description of a job, and the interface of a scheduler (pure)
slurm.py            Slurm: the script for sbatch, and remedies for sbatch's errors
submit_command.py   checks the job, then prints the script or submits it

To add a scheduler, write a module like slurm.py, and add a flag beside --slurm in cli.py.
"""
