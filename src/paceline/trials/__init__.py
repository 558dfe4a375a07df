"""Trials, for `paceline compare` and `verify`: a trial runs the user's script for a few steps in fresh processes.

start.py      the setup of a trial: the script, the strategy with options for this machine, the number of processes
trial.py      plans and runs one trial, and returns why it failed
spec.py       TrialSpec: the task of a trial's workers, passed in an environment variable
json_file.py  the output files of a command
"""
