"""`paceline submit`: hand a run over to a scheduler, which starts it where and when there is room.

batch_job.py        what is to be run, and what every scheduler must be able to do (pure)
slurm.py            Slurm: the script for sbatch, and what sbatch says
submit_command.py   checks, then prints the script or submits it

Another scheduler is another module like slurm.py, and a flag beside --slurm in cli.py.
"""
