"""What `paceline compare` and `verify` share. A trial is the user's script, run for a few steps in fresh processes.

start.py      what is started: the script, the strategy with the options that this machine needs, the processes
trial.py      one trial from its start to its end, or why it failed
spec.py       TrialSpec: what a worker of a trial is asked to do, handed over in the environment
json_file.py  the files that a command is asked to write
"""
