"""paceline doctor: find the faults of any script written for torchrun, without changing it.

doctor_command.py  the command: runs the script under the launcher, applies the rules, prints the findings
doctor_worker.py   the program of each rank: the script, with recorders
findings.py        the catalogue of causes (title, consequence, remedy), and findings as text and JSON
recorders/         run on each rank, and append the script's actions to an event log, in order
resume/            doctor --resume: kills a training, resumes it, and compares
rules/             run in the launcher, and turn the events of all ranks into findings
"""
